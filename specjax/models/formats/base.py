"""What every format gives: tensors by Hugging Face's names, read when asked for."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Collection, Mapping

import ml_dtypes
import numpy as np

from specjax.errors import InputError

CONFIG_FILE = "config.json"
# Types of which a T5 is loaded, by the short names that safetensors files use.
STORED_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_SHORT = {dtype: name for name, dtype in STORED_TYPES.items()}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A stored tensor that is not yet read.

    Attributes:
        shape: as the model has it, whatever the file's own order of axes.
        dtype: a name of `STORED_TYPES`, or that of a type that no T5 is stored in.
        read: reads it. What it returns may lie in a file that is mapped into memory.
    """

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], np.ndarray]


Tensors = dict[str, Tensor]


def type_name(dtype: np.dtype | type) -> str:
    """The short name of a number type that T5s are stored in; else numpy's name."""
    return _SHORT.get(np.dtype(dtype), np.dtype(dtype).name)


def turned(tensor: Tensor) -> Tensor:
    """The transpose of a matrix."""
    return Tensor(tensor.shape[::-1], tensor.dtype, lambda: tensor.read().T)


def read_files(
    directory: pathlib.Path,
    single: str,
    index: str,
    read: Callable[[pathlib.Path], Mapping[str, Tensor]],
    rename: Callable[[str], str] = str,
) -> Tensors:
    """The tensors of one file, or of the shards that an index names.

    Args:
        directory: of the checkpoint.
        single: name of the one file.
        index: name of the index, JSON with a ``weight_map`` from tensor to file name.
        read: the tensors of a file.
        rename: turns the index's names into those that `read` gives.

    Raises:
        InputError: both are there or neither; the index cannot be read; a shard is
            absent, lacks what the index says, or holds what another one does.
    """
    stored: Tensors = {}
    for file, expected in _files(directory, single, index).items():
        held = read(directory / file)
        expected = {rename(name) for name in expected}
        if expected - held.keys():
            raise InputError(
                f"{directory / file} lacks {listed(expected - held.keys())}, which "
                f"{index} says it holds."
            )
        if held.keys() & stored.keys():
            raise InputError(
                f"{directory / file} holds {listed(held.keys() & stored.keys())}, as "
                "another shard does."
            )
        stored |= held
    return stored


def listed(names: Collection[str]) -> str:
    """The first three of some tensors, for a message."""
    shown = ", ".join(sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{more}"


def _files(directory: pathlib.Path, single: str, index: str) -> dict[str, set[str]]:
    """Names of the weight files, each with the tensors that an index expects in it."""
    path = directory / index
    if (directory / single).is_file():
        if path.is_file():
            raise InputError(f"{directory} holds both {single} and {index}; keep one.")
        return {single: set()}
    files: dict[str, set[str]] = {}
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        for name, file in weight_map.items():
            if file != pathlib.PurePath(file).name:
                raise ValueError(f"{file} lies outside the directory")
            files.setdefault(file, set()).add(name)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} is no shard index, a JSON object with a weight_map from tensor "
            f"to file name ({error!r})."
        ) from error
    for file in files:
        if not (directory / file).is_file():
            raise InputError(
                f"The shard {directory / file}, named in {index}, is absent."
            )
    return files
