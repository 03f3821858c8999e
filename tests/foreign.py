"""Checkpoints in other programs' formats, written by hand from Hugging Face's names."""

from __future__ import annotations

import json
import pathlib
import pickle
import re
import struct
import zipfile

import ml_dtypes
import numpy as np
import tensorstore
from flax import serialization

Tensors = dict[str, np.ndarray]

STORAGES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
}
MAGIC = 0x1950A86A20F9469CFC6C
SYSTEM = {"protocol_version": 1001, "little_endian": True, "type_sizes": {"int": 4}}


def write_config(directory: pathlib.Path, config) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_json()))


# Instructions of a pickle of protocol 2.


def text(value: str) -> bytes:
    raw = value.encode()
    return b"X" + struct.pack("<I", len(raw)) + raw


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def tuple_of(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def name(module: str, attribute: str) -> bytes:
    return f"c{module}\n{attribute}\n".encode()


def call(module: str, attribute: str, *arguments: bytes) -> bytes:
    return name(module, attribute) + tuple_of(*arguments) + b"R"


EMPTY = call("collections", "OrderedDict")


def tensor(key: str, array: np.ndarray, *extra: bytes, offset: int = 0) -> bytes:
    """A tensor of the storage `key`, which holds it from `offset` on."""
    kind = name("torch", STORAGES[array.dtype.name])
    size = number(array.size + offset)
    storage = tuple_of(text("storage"), kind, text(key), text("cpu"), size, *extra)
    strides = [step // array.itemsize for step in array.strides]
    return call(
        "torch._utils",
        "_rebuild_tensor_v2",
        storage + b"Q",
        number(offset),
        tuple_of(*map(number, array.shape)),
        tuple_of(*map(number, strides)),
        b"\x89",
        EMPTY,
    )


def state_dict(items: dict[str, bytes]) -> bytes:
    """A whole pickle: an ordered dict with an attribute, as torch writes it."""
    pairs = b"".join(text(key) + value for key, value in items.items())
    attributes = b"}" + text("_metadata") + EMPTY + b"s"
    return b"\x80\x02" + EMPTY + b"(" + pairs + b"u" + attributes + b"b."


def raw(array: np.ndarray) -> bytes:
    """The numbers in the order in which they lie: a transpose keeps its own."""
    return array.T.tobytes() if array.flags.f_contiguous else array.tobytes()


def write_zip(path: pathlib.Path, tensors: Tensors, data: bytes | None = None) -> None:
    """torch.save of today; `data` takes the place of its pickle."""
    items = {key: tensor(str(i), x) for i, (key, x) in enumerate(tensors.items())}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("archive/data.pkl", data or state_dict(items))
        archive.writestr("archive/byteorder", "little")
        for i, array in enumerate(tensors.values()):
            archive.writestr(f"archive/data/{i}", raw(array))
        archive.writestr("archive/version", "3\n")


def write_stream(
    path: pathlib.Path, tensors: Tensors, data: bytes | None = None
) -> None:
    """torch.save before 1.6; `data` takes the place of its pickle."""
    items = {key: tensor(str(i), x, b"N") for i, (key, x) in enumerate(tensors.items())}
    keys = [str(i) for i in range(len(tensors))]
    parts = [pickle.dumps(own, 2) for own in (MAGIC, 1001, SYSTEM)]
    parts += [data or state_dict(items), pickle.dumps(keys, 2)]
    for array in tensors.values():
        parts += [struct.pack("<q", array.size), raw(array)]
    path.write_bytes(b"".join(parts))


def flax_name(full: str) -> str:
    """FlaxT5's name of a tensor, its parts joined by slashes."""
    *parts, _ = full.split(".")
    leaf = "kernel"
    if "norm" in parts[-1]:
        leaf = "weight"
    elif parts[-1] in ("shared", "relative_attention_bias", "embed_tokens"):
        leaf = "embedding"
    return "/".join((*parts, leaf))


def nested(leaves: Tensors) -> dict:
    """A tree of arrays from their names, parted at slashes."""
    tree: dict = {}
    for full, array in leaves.items():
        *parts, last = full.split("/")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
        node[last] = array
    return tree


def write_flax(path: pathlib.Path, tensors: Tensors) -> None:
    leaves = {flax_name(full): array for full, array in tensors.items()}
    for own, array in leaves.items():
        if own.endswith("kernel"):
            leaves[own] = np.ascontiguousarray(array.T)
    path.write_bytes(serialization.msgpack_serialize(nested(leaves)))


LETTERS = {"q": "query", "k": "key", "v": "value", "o": "out"}


def t5x_name(full: str) -> str:
    """T5X's name of a tensor, its layers apart."""
    whole = {
        "shared.weight": "token_embedder/embedding",
        "lm_head.weight": "decoder/logits_dense/kernel",
        "encoder.final_layer_norm.weight": "encoder/encoder_norm/scale",
        "decoder.final_layer_norm.weight": "decoder/decoder_norm/scale",
    }
    if full in whole:
        return whole[full]
    stack, number, rest = re.fullmatch(
        r"(\w+)\.block\.(\d+)\.layer\.(.*)\.weight", full
    ).groups()
    sub, _, own = rest.partition(".")
    encoder = stack == "encoder"
    place = {"0": "attention" if encoder else "self_attention"}
    place["1"] = "mlp" if encoder else "cross_attention"
    place["2"] = "mlp"
    if own == "layer_norm":
        inner = f"pre_{place[sub]}_layer_norm/scale"
    elif own.endswith("relative_attention_bias"):
        inner = "relpos_bias/rel_embedding"
    elif own.startswith("DenseReluDense"):
        inner = f"mlp/{own.split('.')[1]}/kernel"
    else:
        kind = "encoder_decoder_attention" if own.startswith("EncDec") else place[sub]
        inner = f"{kind}/{LETTERS[own.split('.')[1]]}/kernel"
    return f"{stack}/layers_{number}/{inner}"


def t5x_leaves(tensors: Tensors, config, *, scanned: bool, heads_apart: bool) -> dict:
    """T5X's arrays by name: kernels turned, layers stacked along axis 1 if scanned."""
    leaves: dict[str, np.ndarray] = {}
    for full, array in tensors.items():
        own = t5x_name(full)
        if own.endswith(("kernel", "rel_embedding")):
            array = np.ascontiguousarray(array.T)
        if heads_apart and "attention" in own and own.endswith("kernel"):
            split = (config.num_heads, config.d_kv)
            out = own.endswith("out/kernel")
            shape = (*split, array.shape[1]) if out else (array.shape[0], *split)
            array = array.reshape(shape)
        if own.endswith("rel_embedding") and not config.bias_per_layer:
            own = own.replace("/layers_0", "")
        leaves[own] = array
    if not scanned:
        return leaves
    stacked: dict[str, list[np.ndarray]] = {}
    for own, array in leaves.items():
        stacked.setdefault(re.sub(r"(\w+)/layers_\d+", r"\1/\1", own), []).append(array)
    return {
        own: np.stack(arrays, 1)
        if own.split("/")[0] == own.split("/")[1]
        else arrays[0]
        for own, arrays in stacked.items()
    }


def write_t5x(
    directory: pathlib.Path,
    tensors: Tensors,
    config,
    *,
    scanned: bool = False,
    heads_apart: bool = False,
    chunks: int | None = None,
    as_bits: bool = False,
    old_paths: bool = False,
) -> None:
    """A checkpoint of T5X.

    Args:
        directory: made if it is absent.
        tensors: by Hugging Face's names.
        config: the model's shape.
        scanned: layers are stacked.
        heads_apart: heads and their width are axes of their own.
        chunks: longest side of a chunk of the zarr folders, to which matrices go; None:
            all is in the msgpack.
        as_bits: bfloat16 is stored as uint16.
        old_paths: a folder's path stands where tensorstore before 0.1.14 had it.
    """
    directory.mkdir(exist_ok=True)
    leaves = t5x_leaves(tensors, config, scanned=scanned, heads_apart=heads_apart)
    stored: dict = {}
    for own, array in leaves.items():
        if as_bits and array.dtype == ml_dtypes.bfloat16:
            array = array.view(np.uint16)
        stored[own] = array
        if chunks and array.ndim > 1:
            path = f"target.{own.replace('/', '.')}"
            metadata = {
                "shape": list(array.shape),
                "chunks": [min(chunks, size) for size in array.shape],
                "compressor": {"id": "gzip"},
            }
            spec = {
                "driver": "zarr",
                "dtype": array.dtype.name,
                "kvstore": {"driver": "file", "path": str(directory / path)},
                "metadata": metadata,
            }
            opened = tensorstore.open(spec, create=True, delete_existing=True).result()
            opened.write(array).result()
            spec["kvstore"] = {"driver": "gcs", "bucket": "t5x-dummy-bucket"}
            (spec if old_paths else spec["kvstore"])["path"] = path
            stored[own] = spec | {"metadata": metadata | {"chunks": np.array([chunks])}}
    state = {"step": np.int32(7), "param_states": {"v": np.zeros(3, np.float32)}}
    content = {"version": 3, "optimizer": {"target": nested(stored), "state": state}}
    packed = serialization.msgpack_serialize(content)
    (directory / "checkpoint").write_bytes(packed)
