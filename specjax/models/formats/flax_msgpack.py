"""The Flax files of `transformers` 4 (`flax_model.msgpack`), one or shards."""

from __future__ import annotations

import pathlib
from typing import Any

from specjax.models.formats import base, msgpack_tree
from specjax.models.formats.base import Tensor, Tensors

WEIGHTS_FILE = "flax_model.msgpack"
INDEX_FILE = "flax_model.msgpack.index.json"

# Last part of a name -> what Hugging Face calls it elsewhere. A kernel is the transpose
# of a weight; an embedding is not.
_LEAVES = ("kernel", "embedding", "weight")


def read(directory: pathlib.Path) -> Tensors:
    """The tensors of a directory.

    Raises:
        InputError: a file is absent, cut short or no msgpack of Flax, or the shards are
            not those of the index.
    """
    return base.read_files(directory, WEIGHTS_FILE, INDEX_FILE, read_file, hf_name)


def read_file(path: pathlib.Path) -> Tensors:
    """The tensors of one file; their numbers stay in the file.

    Raises:
        InputError: the file is cut short or no msgpack of Flax.
    """
    leaves = flat(msgpack_tree.read_tree(path))
    return {
        hf_name(name): base.turned(leaf) if name.endswith("/kernel") else leaf
        for name, leaf in leaves.items()
    }


def hf_name(name: str) -> str:
    """`decoder/block/0/layer/2/DenseReluDense/wo/kernel` -> `decoder.block.0...`."""
    *parts, last = name.removeprefix("params/").split("/")
    return ".".join((*parts, "weight" if last in _LEAVES else last))


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a tree by their path, its parts joined by slashes."""
    leaves: dict[str, Any] = {}
    for name, own in tree.items():
        if isinstance(own, dict):
            leaves |= flat(own, f"{prefix}{name}/")
        elif isinstance(own, Tensor):
            leaves[f"{prefix}{name}"] = own
    return leaves
