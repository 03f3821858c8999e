"""Which format a checkpoint's directory is in, its shape and its tensors."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable

from specjax.errors import InputError
from specjax.models.formats import (
    flax_msgpack,
    hf_safetensors,
    orbax_folder,
    t5x,
    torch_bin,
)
from specjax.models.formats.base import CONFIG_FILE, Tensors
from specjax.models.t5_config import T5Config

SAFETENSORS, PYTORCH, FLAX, T5X, ORBAX = FORMATS = (
    "safetensors",
    "PyTorch",
    "Flax",
    "T5X",
    "Orbax",
)

# The files of which one tells a format, and how it is read. Where a directory holds
# several, the first counts.
_READERS: dict[str, tuple[tuple[str, ...], Callable[[pathlib.Path], Tensors]]] = {
    SAFETENSORS: (
        (hf_safetensors.WEIGHTS_FILE, hf_safetensors.INDEX_FILE),
        hf_safetensors.read,
    ),
    PYTORCH: ((torch_bin.WEIGHTS_FILE, torch_bin.INDEX_FILE), torch_bin.read),
    FLAX: ((flax_msgpack.WEIGHTS_FILE, flax_msgpack.INDEX_FILE), flax_msgpack.read),
    T5X: ((t5x.TREE_FILE,), t5x.read),
}


@dataclasses.dataclass(frozen=True)
class Found:
    """A checkpoint that was opened.

    Attributes:
        format: one of `FORMATS`.
        config: the model's shape.
        tensors: all that is stored, by Hugging Face's names, not yet read; of Orbax
            none, which restores its arrays itself.
    """

    format: str
    config: T5Config
    tensors: Tensors


def find(directory: pathlib.Path, config: T5Config | None = None) -> Found:
    """Opens a checkpoint's directory, of whichever format.

    Args:
        directory: of the checkpoint.
        config: the model's shape; None: that of ``config.json``, without which T5X's
            is read from the tensors.

    Raises:
        InputError: there is no checkpoint, or one that is not whole.
    """
    if not directory.is_dir():
        raise InputError(f"There is no checkpoint directory {directory}.")
    kind = format_of(directory)
    described = (directory / CONFIG_FILE).is_file()
    if not described and kind != T5X and (config is None or kind is None):
        raise InputError(
            f"{directory} has no {CONFIG_FILE}: it is no T5 checkpoint, or writing it "
            "was interrupted."
        )
    if kind is None:
        raise InputError(
            f"{directory} has neither {hf_safetensors.WEIGHTS_FILE} nor "
            f"{hf_safetensors.INDEX_FILE}, nor weights of PyTorch "
            f"({torch_bin.WEIGHTS_FILE}), Flax ({flax_msgpack.WEIGHTS_FILE}), T5X "
            f"({t5x.TREE_FILE}) or Orbax."
        )
    if kind == ORBAX:
        shape = config or T5Config.from_json(directory / CONFIG_FILE)
        return Found(kind, shape, {})
    tensors = _READERS[kind][1](directory)
    if kind == PYTORCH:
        said = config or T5Config.from_json(directory / CONFIG_FILE)
        tensors = torch_bin.without_tied_head(tensors) if said.tied_head else tensors
    if config is None and described:
        has_head = "lm_head.weight" in tensors
        config = T5Config.from_json(directory / CONFIG_FILE, has_head=has_head)
    return Found(kind, config or t5x.config_of(tensors, directory), tensors)


def format_of(directory: pathlib.Path) -> str | None:
    """The format of a directory's weights, one of `FORMATS`; None: there are none."""
    for kind, (files, _) in _READERS.items():
        if any((directory / file).is_file() for file in files):
            return kind
    return ORBAX if orbax_folder.is_one(directory) else None
