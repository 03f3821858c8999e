"""T5 checkpoints: read in every format, written in Hugging Face's, without torch.

Whatever the format, tensors come by Hugging Face's names and are read when they are
asked for; here they are compared with the model's shape and fused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from specjax.errors import InputError
from specjax.models.dense import Weight
from specjax.models.formats import find, orbax_folder, t5x
from specjax.models.formats.base import (
    CONFIG_FILE,
    STORED_TYPES,
    Tensors,
    listed,
)
from specjax.models.formats.hf_safetensors import INDEX_FILE, WEIGHTS_FILE
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config

_HEAD = "lm_head.weight"
# Names under which the one embedding is stored, the usual one first.
_EMBEDDING = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
# What is read of a checkpoint, and not a card or other settings beside it.
_READ_SUFFIXES = (".safetensors", ".bin", ".msgpack", ".model")
_READ_NAMES = (CONFIG_FILE, "tokenizer_config.json", INDEX_FILE, t5x.TREE_FILE)
# In folders beside it: the chunks of T5X, and Orbax's list of its files' hashes.
_READ_BELOW = (f"{t5x.PARAMETERS}*/*", f"{orbax_folder.STEP}/*.json")
# In some old checkpoints, and used by no T5.
_UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)

# Where a stored tensor lives in the model: the path of its parameter, and its index
# along axis 0 of a fused one (None: the whole parameter).
Slot = tuple[tuple[str | int, ...], int | None]


def tensor_table(config: T5Config) -> dict[str, Slot]:
    """Hugging Face tensor name -> (parameter path, index in a fused parameter).

    ``encoder.projection`` of a draft that shares its target's encoder is our own name.

    This one table drives both reading and writing.
    """
    table: dict[str, Slot] = {_EMBEDDING[0]: (("embedding",), None)}

    def add(name: str, *path: str | int, index: int | None = None) -> None:
        table[f"{name}.weight"] = (path, index)

    if config.encoder_width is not None:
        add("encoder.projection", "projection")

    def attention(name: str, *path: str | int, has_bias: bool) -> None:
        for index, letter in enumerate("qkv"):
            add(f"{name}.SelfAttention.{letter}", *path, "qkv", index=index)
        add(f"{name}.SelfAttention.o", *path, "out")
        if has_bias:
            add(f"{name}.SelfAttention.relative_attention_bias", *path, "bias")
        add(f"{name}.layer_norm", *path, "norm", "scale")

    def feed_forward(name: str, *path: str | int) -> None:
        inputs = ("wi_0", "wi_1") if config.gated else ("wi",)
        for index, letter in enumerate(inputs):
            add(f"{name}.DenseReluDense.{letter}", *path, "wi", index=index)
        add(f"{name}.DenseReluDense.wo", *path, "wo")
        add(f"{name}.layer_norm", *path, "norm", "scale")

    stacks = {
        "encoder": config.num_encoder_layers,
        "decoder": config.num_decoder_layers,
    }
    for stack, num_layers in stacks.items():
        for i in range(num_layers):
            name, block = f"{stack}.block.{i}.layer", (stack, i)
            has_bias = i == 0 or config.bias_per_layer
            attention(f"{name}.0", *block, "attention", has_bias=has_bias)
            if stack == "decoder":
                cross = (*block, "cross")
                add(f"{name}.1.EncDecAttention.q", *cross, "q")
                add(f"{name}.1.EncDecAttention.k", *cross, "kv", index=0)
                add(f"{name}.1.EncDecAttention.v", *cross, "kv", index=1)
                add(f"{name}.1.EncDecAttention.o", *cross, "out")
                add(f"{name}.1.layer_norm", *cross, "norm", "scale")
            last = 1 if stack == "encoder" else 2
            feed_forward(f"{name}.{last}", *block, "feed_forward")
        if num_layers:
            add(f"{stack}.final_layer_norm", f"{stack}_norm", "scale")
    if not config.tied_head:
        table[_HEAD] = (("head",), None)
    return table


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was opened, and whose tensors are those of its shape.

    Attributes:
        directory: of the checkpoint.
        format: one of `find.FORMATS`.
        skeleton: the model with shapes in the place of its arrays.
        tensors: by the names of `tensor_table`, not yet read; of Orbax none.
    """

    directory: pathlib.Path
    format: str
    skeleton: T5
    tensors: Tensors

    @property
    def config(self) -> T5Config:
        """The model's shape."""
        return self.skeleton.config


def open_t5(
    directory: str | os.PathLike[str], config: T5Config | None = None
) -> Checkpoint:
    """Opens a checkpoint and compares its tensors with its shape; no weight is read.

    Args:
        directory: see `load_t5`.
        config: the model's shape, where the checkpoint does not say it.

    Raises:
        InputError: see `load_t5`; what is wrong with the numbers shows later.
    """
    directory = pathlib.Path(directory)
    found = find.find(directory, config)
    shape = found.config
    skeleton = jax.eval_shape(lambda: T5(shape, jax.random.key(0)))
    if found.format == find.ORBAX:
        return Checkpoint(directory, found.format, skeleton, {})
    parameters = nnx.to_pure_dict(nnx.state(skeleton))
    wanted = {
        name: _slot_shape(parameters, slot)
        for name, slot in tensor_table(shape).items()
    }
    # A shape that was told from the tensors fits them, but for those of some layers.
    by = "the given shape" if config is not None else f"its {CONFIG_FILE}"
    if config is None and not (directory / CONFIG_FILE).is_file():
        by = "the shape of its first layers"
    tensors = _match(found.tensors, wanted, directory, by)
    return Checkpoint(directory, found.format, skeleton, tensors)


def load_t5(
    directory: str | os.PathLike[str],
    dtype: DTypeLike = jnp.float32,
    *,
    shardings: Callable[[T5], Any] | None = None,
    config: T5Config | None = None,
) -> T5:
    """Reads a T5 from a directory of Hugging Face, T5X or Orbax.

    Every parameter comes from the files; nothing is initialised at random. Parameters
    are read one by one, and go to their devices before the next is read.

    Args:
        directory: holds ``config.json`` and weights, stored as float32, float16 or
            bfloat16: ``model.safetensors``, ``pytorch_model.bin``,
            ``flax_model.msgpack``, each in one file or in shards with an index, or what
            `experiments.convert` writes with Orbax; or is T5X's, with ``checkpoint``.
            Of several formats in one directory the first of these counts.
        dtype: type of the parameters and activations, float32 or bfloat16.
        shardings: says where each goes, given the model's shapes, as
            `specjax.sharding.shardings` does on a mesh; None: to the first device.
        config: the model's shape; None: that of ``config.json``, or, for T5X where
            there is none, what the tensors' shapes tell.

    Returns:
        the model.

    Raises:
        InputError: a file or shard is absent, cut short or malformed; a tensor is
            missing, unknown, mis-shaped or not finite; float16 is asked for.
    """
    dtype = _compute_type(dtype)
    checkpoint = open_t5(directory, config)
    graph, state = nnx.split(checkpoint.skeleton)
    where = None
    if shardings is not None:
        where = nnx.to_pure_dict(nnx.split(shardings(checkpoint.skeleton))[1])
    parameters = nnx.to_pure_dict(state)
    if checkpoint.format == find.ORBAX:
        like = jax.tree.map(
            lambda own, *place: jax.ShapeDtypeStruct(
                own.shape, dtype, sharding=place[0] if place else None
            ),
            *((parameters,) if where is None else (parameters, where)),
        )
        restored = orbax_folder.load(checkpoint.directory, like)
        nnx.replace_by_pure_dict(state, restored)
        return nnx.merge(graph, state)
    slots: dict[tuple[str | int, ...], list[tuple[int | None, str]]] = {}
    for name, (path, index) in tensor_table(checkpoint.config).items():
        slots.setdefault(path, []).append((index, name))
    # Layer after layer of one kind: T5X may keep them in one array.
    for path in sorted(slots, key=lambda path: [p for p in path if isinstance(p, str)]):
        array = _read(checkpoint, slots[path], get(parameters, path).shape, dtype)
        get(parameters, path[:-1])[path[-1]] = (
            jnp.asarray(array)
            if where is None
            else jax.make_array_from_callback(
                array.shape, get(where, path), array.__getitem__
            )
        )
    nnx.replace_by_pure_dict(state, parameters)
    return nnx.merge(graph, state)


def _read(
    checkpoint: Checkpoint,
    parts: list[tuple[int | None, str]],
    shape: tuple[int, ...],
    dtype: np.dtype,
) -> np.ndarray:
    """One parameter, fused of its stored parts; it alone is in memory twice."""
    array = np.empty(shape, dtype)
    for index, name in parts:
        part = checkpoint.tensors[name].read().astype(dtype, copy=False)
        _check_finite(name, part, f"in {checkpoint.directory}")
        array[... if index is None else index] = part
    return array


def save_t5(
    model: T5,
    directory: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Writes a T5 as a Hugging Face directory that `transformers` and `load_t5` read.

    Files are written beside their targets and moved into place when all are whole;
    ``config.json`` comes last, so a directory that has one is complete. Other files
    there, a tokenizer for one, stay.

    Args:
        model: the model.
        directory: made if it does not exist.
        dtype: storage type, float32, float16 or bfloat16; None: the model's own.
        max_shard_bytes: tensors beyond this go to further files, with an index.

    Raises:
        InputError: a weight is not finite, or becomes so in `dtype`; or one is no
            array, as in a draft that was trimmed or quantized.
    """
    # Imported late: writing weights is the only use of safetensors.
    from safetensors.numpy import save_file

    storage = _dtype(model.dtype if dtype is None else dtype)
    if storage not in STORED_TYPES.values():
        raise InputError(
            "T5 weights are stored as float32, float16 or bfloat16, not "
            f"{storage.name}."
        )
    if max_shard_bytes < 1:
        raise InputError(f"max_shard_bytes must be positive, not {max_shard_bytes}.")
    _check_whole(model)
    directory = pathlib.Path(directory)
    if directory.exists() and not directory.is_dir():
        raise InputError(f"{directory} is a file; save_t5 needs a directory.")
    directory.mkdir(parents=True, exist_ok=True)
    table = tensor_table(model.config)
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    sizes = {
        name: int(np.prod(_slot_shape(parameters, slot))) * storage.itemsize
        for name, slot in table.items()
    }
    shards = shards_of(sizes, max_shard_bytes)

    with _replacing(directory) as write:
        for file, names in shards.items():
            tensors = {
                name: _stored_array(name, parameters, table[name], storage)
                for name in names
            }
            path = write(file)
            path.touch()
            usual = path.stat().st_mode
            save_file(tensors, path, metadata={"format": "pt"})
            path.chmod(usual)  # safetensors makes files that their owner alone reads
        if len(shards) > 1:
            index = {
                "metadata": {"total_size": sum(sizes.values())},
                "weight_map": {n: f for f, names in shards.items() for n in names},
            }
            _write_json(write(INDEX_FILE), index)
        fields = model.config.to_json() | {"torch_dtype": storage.name}
        _write_json(write(CONFIG_FILE), fields)


def _match(
    stored: Tensors,
    shapes: dict[str, tuple[int, ...]],
    directory: pathlib.Path,
    by: str,
) -> Tensors:
    """Checks that those of the shape `by` are there; these, by their usual names."""
    sources = {name: name for name in shapes}
    embeddings = [name for name in _EMBEDDING if name in stored]
    sources[_EMBEDDING[0]] = (embeddings or _EMBEDDING)[0]
    missing = set(sources.values()) - stored.keys()
    if missing:
        raise InputError(f"{directory} lacks {listed(missing)}.")
    extra = stored.keys() - {*sources.values(), *embeddings, *_UNUSED}
    if extra:
        raise InputError(
            f"{directory} holds {listed(extra)}, for which {by} has no place."
        )
    for name, source in sources.items():
        tensor = stored[source]
        if tensor.shape != shapes[name]:
            raise InputError(
                f"{source} in {directory} has shape {tensor.shape}, but {by} "
                f"asks for {shapes[name]}."
            )
        if tensor.dtype not in STORED_TYPES:
            raise InputError(
                f"{source} in {directory} is stored as {tensor.dtype}; supported are "
                f"{', '.join(STORED_TYPES)}."
            )
    for copy in embeddings[1:]:
        if not np.array_equal(stored[embeddings[0]].read(), stored[copy].read()):
            raise InputError(
                f"{embeddings[0]} and {copy} in {directory} differ, but a T5 has one "
                "embedding."
            )
    return {name: stored[source] for name, source in sources.items()}


def _dtype(dtype: DTypeLike) -> np.dtype:
    try:
        return np.dtype(dtype)
    except TypeError as error:
        raise InputError(f"There is no number type {dtype!r}.") from error


def _compute_type(dtype: DTypeLike) -> np.dtype:
    wanted = _dtype(dtype)
    if wanted == np.float16:
        raise InputError(
            "T5 cannot compute in float16: its activations pass 65504, the largest "
            "float16, and become NaN; use bfloat16 or float32."
        )
    if wanted not in (np.float32, ml_dtypes.bfloat16):
        raise InputError(f"T5 computes in float32 or bfloat16, not {wanted.name}.")
    return wanted


def _check_finite(name: str, array: np.ndarray, where: str) -> None:
    if not np.isfinite(array).all():
        raise InputError(f"The weights {name} {where} hold NaN or infinity.")


def get(tree: Any, path: tuple[str | int, ...]) -> Any:
    """What lies at a path of a nested dict."""
    for key in path:
        tree = tree[key]
    return tree


def _check_whole(model: T5) -> None:
    values = jax.tree.leaves(
        nnx.state(model, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, Weight)
    )
    for value in values:
        if isinstance(value, Weight):
            raise InputError(
                f"a weight of this model is a {type(value).__name__}, which a T5's "
                "files cannot hold: save the T5 that it was made of, and make it anew "
                "after loading."
            )


def _slot_shape(parameters: Any, slot: Slot) -> tuple[int, ...]:
    path, index = slot
    shape = tuple(get(parameters, path).shape)
    return shape if index is None else shape[1:]


def _stored_array(
    name: str, parameters: Any, slot: Slot, storage: np.dtype
) -> np.ndarray:
    path, index = slot
    array = np.asarray(get(parameters, path))
    return as_stored(name, array if index is None else array[index], storage)


def as_stored(name: str, array: np.ndarray, storage: np.dtype) -> np.ndarray:
    """A tensor in the type that it is stored in.

    Raises:
        InputError: a weight is not finite, or becomes so.
    """
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array.astype(storage, copy=False))
    _check_finite(name, array, f"as {storage.name}")
    return array


def shards_of(sizes: dict[str, int], max_bytes: int) -> dict[str, list[str]]:
    """File name -> the tensors in it, in order, each file as full as allowed."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {WEIGHTS_FILE: groups[0]}
    stem, suffix = WEIGHTS_FILE.split(".")
    return {
        f"{stem}-{i:05d}-of-{len(groups):05d}.{suffix}": names
        for i, names in enumerate(groups, 1)
    }


def _write_json(path: pathlib.Path, fields: dict[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, sort_keys=True) + "\n", "utf-8")


@contextlib.contextmanager
def _replacing(directory: pathlib.Path) -> Iterator[Callable[[str], pathlib.Path]]:
    """Yields ``write(name) -> temporary path``; at the end all move into place.

    The old ``config.json`` goes first and the new one comes last: a process killed in
    between leaves a directory that `load_t5` refuses, never a mixture of two models.
    """
    pending: dict[str, pathlib.Path] = {}

    def write(name: str) -> pathlib.Path:
        pending[name] = directory / f".{name}.{os.getpid()}.partial"
        return pending[name]

    try:
        yield write
        (directory / CONFIG_FILE).unlink(missing_ok=True)
        shards = (path.name for path in directory.glob("model-*-of-*.safetensors"))
        for old in {*shards, WEIGHTS_FILE, INDEX_FILE} - pending.keys():
            (directory / old).unlink(missing_ok=True)
        for name, path in pending.items():
            os.replace(path, directory / name)
    finally:
        for path in pending.values():
            path.unlink(missing_ok=True)


def fingerprint(directory: str | os.PathLike[str]) -> str:
    """SHA-256 of a checkpoint's files: they may change under one name.

    Args:
        directory: a model's, its tokenizer's files among them. Reading it once more
            takes seconds per 10 GB.
    """
    digest = hashlib.sha256()
    directory = pathlib.Path(directory)
    for path in files_of(directory):
        with open(path, "rb") as file:
            own = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(directory).as_posix()} {own}\n".encode())
    return digest.hexdigest()


def files_of(directory: pathlib.Path) -> list[pathlib.Path]:
    """The files of a checkpoint, its tokenizer's among them, in order."""
    files = [
        path
        for path in directory.iterdir()
        if path.suffix in _READ_SUFFIXES or path.name in _READ_NAMES
    ]
    files += [path for below in _READ_BELOW for path in directory.glob(below)]
    return sorted(filter(pathlib.Path.is_file, files))
