"""Flax's msgpack files, mapped into memory: a tree whose arrays stay in the file.

The `msgpack` package would copy every array. Here the file is walked once, from header
to header, and an array is read when it is asked for.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import pathlib
import struct
from typing import Any

import ml_dtypes
import numpy as np

from specjax.errors import InputError
from specjax.models.formats import base
from specjax.models.formats.base import Tensor

_DEEPEST = 64  # of a tree; a real one has ten levels
_ARRAY = 1  # kind of extension: (shape, type, bytes), itself in msgpack
_CHUNKED = "__msgpack_chunked_array__"
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# First byte -> (bytes of the size that follows, what it is the size of).
_SIZED = {
    **{0xC4 + i: (1 << i, "bin") for i in range(3)},
    **{0xC7 + i: (1 << i, "ext") for i in range(3)},
    **{0xD9 + i: (1 << i, "str") for i in range(3)},
    **{0xDC + i: (2 << i, "array") for i in range(2)},
    **{0xDE + i: (2 << i, "map") for i in range(2)},
}
_NUMBERS = {0xCA: ">f", 0xCB: ">d", 0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q"}
_NUMBERS |= {0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}


def read_tree(path: pathlib.Path) -> dict[str, Any]:
    """The tree of a file, its arrays as tensors that are not yet read.

    Arrays of uint16 are bfloat16: so T5X stored them once, and no weight is a number
    of 16 bits without a sign.

    Raises:
        InputError: the file is cut short or no msgpack of nested dicts.
    """
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        reader = _Reader(data)
        tree = reader.value()
        if reader.at != len(data):
            raise ValueError(f"{len(data) - reader.at} bytes too many")
        tree = _joined(tree)
    # Damage shows as whatever it makes the reader trip over.
    except Exception as error:
        raise InputError(
            f"{path} is cut short or not a msgpack file of Flax ({error})."
        ) from error
    if not isinstance(tree, dict):
        raise InputError(f"{path} holds a {type(tree).__name__}, not a tree of arrays.")
    return tree


@dataclasses.dataclass
class _Reader:
    """A place in the file, which every call moves on."""

    data: mmap.mmap
    at: int = 0

    def skip(self, count: int) -> int:
        """Moves on by some bytes, and says where they begin."""
        start = self.at
        self.at += count
        if self.at > len(self.data):
            raise ValueError(f"it ends after {len(self.data)} bytes")
        return start

    def take(self, count: int) -> bytes:
        start = self.skip(count)
        return self.data[start : self.at]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def value(self, depth: int = 0) -> Any:
        if depth > _DEEPEST:
            raise ValueError(f"it is more than {_DEEPEST} levels deep")
        first = self.take(1)[0]
        if first < 0x80:
            return first
        if first >= 0xE0:
            return first - 0x100
        if first < 0x90:
            return self.sized("map", first & 0xF, depth)
        if first < 0xA0:
            return self.sized("array", first & 0xF, depth)
        if first < 0xC0:
            return self.sized("str", first & 0x1F, depth)
        if first in _CONSTANTS:
            return _CONSTANTS[first]
        if first in _NUMBERS:
            return self.number(_NUMBERS[first])
        if 0xD4 <= first <= 0xD8:
            return self.sized("ext", 1 << (first - 0xD4), depth)
        if first in _SIZED:
            width, kind = _SIZED[first]
            return self.sized(kind, int.from_bytes(self.take(width), "big"), depth)
        raise ValueError(f"byte {first:#x} begins nothing")

    def sized(self, kind: str, size: int, depth: int) -> Any:
        if kind == "str":
            return self.take(size).decode()
        if kind == "bin":
            return self.skip(size), size
        if kind == "array":
            return [self.value(depth + 1) for _ in range(size)]
        if kind == "map":
            return {
                str(self.value(depth + 1)): self.value(depth + 1) for _ in range(size)
            }
        code = self.take(1)[0]
        end = self.at + size
        if code != _ARRAY:  # a single number, of no use to a model
            return self.take(size)
        shape, name, (start, length) = self.value(depth + 1)
        if self.at != end:
            raise ValueError("an array's header does not fit its size")
        dtype = _BFLOAT16 if name in ("bfloat16", "uint16") else np.dtype(name)
        if length != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{length} bytes are no array of shape {shape}")
        data, shape = self.data, tuple(shape)
        return Tensor(
            shape,
            base.type_name(dtype),
            lambda: np.ndarray(shape, dtype, data, start),
        )


def _joined(tree: Any) -> Any:
    """Puts arrays together that Flax split, as it does beyond 1 GiB."""
    if not isinstance(tree, dict):
        return tree
    if _CHUNKED not in tree:
        return {name: _joined(own) for name, own in tree.items()}
    shape = tuple(_in_order(tree["shape"]))
    parts: list[Tensor] = _in_order(tree["chunks"])
    if sum(math.prod(part.shape) for part in parts) != math.prod(shape):
        raise ValueError(f"the chunks of an array of shape {shape} do not make it up")
    return Tensor(
        shape,
        parts[0].dtype,
        lambda: np.concatenate([part.read() for part in parts]).reshape(shape),
    )


def _in_order(numbered: Any) -> list[Any]:
    """A list that was stored as a dict from "0", "1" and so on."""
    if isinstance(numbered, list):
        return numbered
    return [numbered[str(i)] for i in range(len(numbered))]
