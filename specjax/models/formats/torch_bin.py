"""PyTorch's `.bin` files, mapped into memory and read without torch.

Two formats share the name: since torch 1.6 a zip archive, in which the storages lie
uncompressed, and before it a stream of pickles with the storages behind them.
"""

from __future__ import annotations

import functools
import mmap
import pathlib
import struct
import zipfile
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.models.formats import base, torch_pickle
from specjax.models.formats.base import Tensor, Tensors

WEIGHTS_FILE = "pytorch_model.bin"
INDEX_FILE = "pytorch_model.bin.index.json"

_MAGIC = 0x1950A86A20F9469CFC6C  # the first pickle of a stream
_PROTOCOL = 1001  # the second
_LOCAL_HEADER = 30  # bytes of a zip entry's own header before its name
_HEAD, _EMBEDDING = "lm_head.weight", "shared.weight"

# Key of a storage -> where its numbers begin in the file.
_Places = dict[str, int]


def read(directory: pathlib.Path) -> Tensors:
    """The tensors of a directory.

    Raises:
        InputError: a file is absent, cut short, or holds more than tensors, or the
            shards are not those of the index.
    """
    return base.read_files(directory, WEIGHTS_FILE, INDEX_FILE, read_file)


def without_tied_head(tensors: Tensors) -> Tensors:
    """Leaves a head out that is the embedding: PyTorch stores a tied one twice."""
    if {_HEAD, _EMBEDDING} <= tensors.keys():
        head, embedding = (tensors[name].read() for name in (_HEAD, _EMBEDDING))
        # The first row tells most heads apart without reading them.
        if np.array_equal(head[:1], embedding[:1]) and np.array_equal(head, embedding):
            return {name: own for name, own in tensors.items() if name != _HEAD}
    return tensors


def read_file(path: pathlib.Path) -> Tensors:
    """The tensors of one file, in either format; their numbers stay in the file.

    Raises:
        InputError: the file is cut short, of neither format, or holds something else
            than tensors.
    """
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (ValueError, OSError) as error:  # an empty file cannot be mapped
            raise InputError(f"{path} is cut short: it cannot be mapped.") from error
    try:
        state, places = (_zip if data[:2] == b"PK" else _stream)(data, path)
        if not isinstance(state, dict):
            raise ValueError(f"it holds a {type(state).__name__}, not tensors by name")
        return {
            str(name): _tensor(data, str(name), view, places)
            for name, view in state.items()
        }
    except InputError:
        raise
    # Damage shows as whatever it makes the reader trip over.
    except Exception as error:
        raise InputError(f"{path} is cut short or no PyTorch file ({error}).") from (
            error
        )


def _zip(data: mmap.mmap, path: pathlib.Path) -> tuple[Any, _Places]:
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: entry for entry in archive.infolist()}
        pickles = [name for name in entries if name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise ValueError("the archive has no data.pkl")
        folder = pickles[0].removesuffix("data.pkl")
        if f"{folder}byteorder" in entries:
            order = archive.read(f"{folder}byteorder")
            if order != b"little":
                raise ValueError(f"its numbers are {order!r}-endian")
        with archive.open(pickles[0]) as file:
            state = torch_pickle.load(file, str(path))
    places = {}
    for name, entry in entries.items():
        if name.startswith(f"{folder}data/"):
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{name} is compressed")
            # Its name and the padding after it are counted in the entry's own header.
            at = entry.header_offset
            sizes = struct.unpack_from("<HH", data, at + _LOCAL_HEADER - 4)
            places[name.removeprefix(f"{folder}data/")] = (
                at + _LOCAL_HEADER + sum(sizes)
            )
    return state, places


def _stream(data: mmap.mmap, path: pathlib.Path) -> tuple[Any, _Places]:
    load = functools.partial(torch_pickle.load, data, str(path))
    data.seek(0)
    if load() != _MAGIC or load() != _PROTOCOL:
        raise ValueError("it begins as no file of PyTorch does")
    if not load().get("little_endian", True):
        raise ValueError("its numbers are big-endian")
    state, keys = load(), load()
    sizes = {
        view.storage.key: view.storage.dtype.itemsize
        for view in state.values()
        if isinstance(view, torch_pickle.View)
    }
    places, at = {}, data.tell()
    for key in map(str, keys):
        (count,) = struct.unpack_from("<Q", data, at)
        places[key] = at + 8
        at += 8 + count * sizes[key]
    return state, places


def _tensor(data: mmap.mmap, name: str, view: Any, places: _Places) -> Tensor:
    if not isinstance(view, torch_pickle.View):
        raise ValueError(f"{name} is a {type(view).__name__}, not a tensor")
    storage, start = view.storage, places[view.storage.key]
    own = start + view.needed * storage.dtype.itemsize
    if view.needed > storage.start + storage.size or own > len(data):
        raise ValueError(f"{name} goes past its end")

    def read() -> np.ndarray:
        return np.ndarray(
            view.shape,
            storage.dtype,
            data,
            start + view.offset * storage.dtype.itemsize,
            tuple(step * storage.dtype.itemsize for step in view.strides),
        )

    return Tensor(view.shape, base.type_name(storage.dtype), read)
