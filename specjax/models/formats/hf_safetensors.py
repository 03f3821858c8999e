"""Hugging Face's safetensors, one file or shards with an index."""

from __future__ import annotations

import functools
import pathlib

from specjax.errors import InputError
from specjax.models.formats import base
from specjax.models.formats.base import Tensor, Tensors

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read(directory: pathlib.Path) -> Tensors:
    """The tensors of a directory.

    Raises:
        InputError: a file is absent, cut short or no safetensors file, or the shards
            are not those of the index.
    """
    return base.read_files(directory, WEIGHTS_FILE, INDEX_FILE, read_file)


def read_file(path: pathlib.Path) -> Tensors:
    """The tensors of one file, which stays open.

    Raises:
        InputError: the file is cut short or no safetensors file.
    """
    # Imported late: reading weights is the only use of safetensors.
    import safetensors

    try:
        file = safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is cut short or not a safetensors file ({error})."
        ) from error
    tensors = {}
    for name in file.keys():
        view = file.get_slice(name)
        tensors[name] = Tensor(
            tuple(view.get_shape()),
            view.get_dtype(),
            functools.partial(file.get_tensor, name),
        )
    return tensors
