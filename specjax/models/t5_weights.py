"""T5 checkpoints in Hugging Face's directory layout, read and written without torch."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from specjax.errors import InputError
from specjax.models.dense import Weight
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_HEAD = "lm_head.weight"
# Names under which the one embedding is stored, the usual one first.
_EMBEDDING = (
    "shared.weight",
    "encoder.embed_tokens.weight",
    "decoder.embed_tokens.weight",
)
# What is read of a checkpoint, and not a card or other settings beside it.
_READ_SUFFIXES = (".safetensors", ".bin", ".model")
_READ_NAMES = (CONFIG_FILE, "tokenizer_config.json", INDEX_FILE)
# In some old checkpoints, and used by no T5.
_UNUSED = ("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",)
_STORED_TYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

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


def load_t5(
    directory: str | os.PathLike[str],
    dtype: DTypeLike = jnp.float32,
    *,
    shardings: Callable[[T5], Any] | None = None,
) -> T5:
    """Reads a T5 from a Hugging Face directory.

    Every parameter comes from the files; nothing is initialised at random. Parameters
    are read one by one, and go to their devices before the next is read.

    Args:
        directory: holds ``config.json`` and ``model.safetensors``, or shards with
            ``model.safetensors.index.json``; stored as float32, float16 or bfloat16.
        dtype: type of the parameters and activations, float32 or bfloat16.
        shardings: says where each goes, given the model's shapes, as
            `specjax.sharding.shardings` does on a mesh; None: to the first device.

    Returns:
        the model.

    Raises:
        InputError: a file or shard is absent, cut short or malformed; a tensor is
            missing, unknown, mis-shaped or not finite; float16 is asked for.
    """
    dtype = _compute_type(dtype)
    directory = pathlib.Path(directory)
    stored = _find_tensors(directory)
    config = T5Config.from_json(directory / CONFIG_FILE, has_head=_HEAD in stored)
    table = tensor_table(config)
    skeleton = jax.eval_shape(lambda: T5(config, jax.random.key(0)))
    graph, state = nnx.split(skeleton)
    where = None
    if shardings is not None:
        where = nnx.to_pure_dict(nnx.split(shardings(skeleton))[1])
    shapes = nnx.to_pure_dict(state)
    wanted = {name: _slot_shape(shapes, slot) for name, slot in table.items()}
    sources = _match(stored, wanted, directory)

    slots: dict[tuple[str | int, ...], list[tuple[int | None, str]]] = {}
    for name, (path, index) in table.items():
        slots.setdefault(path, []).append((index, sources[name]))
    for path, parts in slots.items():
        # One fused parameter at a time is in memory twice.
        array = np.empty(_get(shapes, path).shape, dtype)
        for index, source in parts:
            part = stored[source].get_tensor(source).astype(dtype, copy=False)
            _check_finite(source, part, f"in {directory}")
            array[... if index is None else index] = part
        _get(shapes, path[:-1])[path[-1]] = (
            jnp.asarray(array)
            if where is None
            else jax.make_array_from_callback(
                array.shape, _get(where, path), array.__getitem__
            )
        )
    nnx.replace_by_pure_dict(state, shapes)
    return nnx.merge(graph, state)


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
    if storage not in _STORED_TYPES.values():
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
    shards = _shard(sizes, max_shard_bytes)

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


def _find_tensors(directory: pathlib.Path) -> dict[str, Any]:
    """Tensor name -> the open file that holds it; nothing is read yet."""
    if not directory.is_dir():
        raise InputError(f"There is no checkpoint directory {directory}.")
    if not (directory / CONFIG_FILE).is_file():
        raise InputError(
            f"{directory} has no {CONFIG_FILE}: it is no T5 checkpoint, or writing it "
            "was interrupted."
        )
    stored: dict[str, Any] = {}
    for file, expected in _weight_files(directory).items():
        reader = _open(directory / file)
        held = set(reader.keys())
        if expected - held:
            raise InputError(
                f"{directory / file} lacks {_listed(expected - held)}, which "
                f"{INDEX_FILE} says it holds."
            )
        if held & stored.keys():
            raise InputError(
                f"{directory / file} holds {_listed(held & stored.keys())}, as another "
                "shard does."
            )
        stored |= dict.fromkeys(held, reader)
    return stored


def _weight_files(directory: pathlib.Path) -> dict[str, set[str]]:
    """Names of the weight files, each with the tensors that an index expects in it."""
    index = directory / INDEX_FILE
    if (directory / WEIGHTS_FILE).is_file():
        if index.is_file():
            raise InputError(
                f"{directory} holds both {WEIGHTS_FILE} and {INDEX_FILE}; keep one."
            )
        return {WEIGHTS_FILE: set()}
    if not index.is_file():
        raise InputError(
            f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; weights in "
            "another format must be converted to safetensors first."
        )
    files: dict[str, set[str]] = {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        for name, file in weight_map.items():
            if file != pathlib.PurePath(file).name:
                raise ValueError(f"{file} lies outside the directory")
            files.setdefault(file, set()).add(name)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(
            f"{index} is no shard index, a JSON object with a weight_map from tensor "
            f"to file name ({error!r})."
        ) from error
    for file in files:
        if not (directory / file).is_file():
            raise InputError(
                f"The shard {directory / file}, named in {INDEX_FILE}, is absent."
            )
    return files


def _open(path: pathlib.Path) -> Any:
    # Imported late: reading weights is the only use of safetensors.
    import safetensors

    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(
            f"{path} is cut short or not a safetensors file ({error})."
        ) from error


def _match(
    stored: dict[str, Any], shapes: dict[str, tuple[int, ...]], directory: pathlib.Path
) -> dict[str, str]:
    """Checks that exactly the wanted tensors are there; wanted -> stored name."""
    sources = {name: name for name in shapes}
    embeddings = [name for name in _EMBEDDING if name in stored]
    sources[_EMBEDDING[0]] = (embeddings or _EMBEDDING)[0]
    missing = set(sources.values()) - stored.keys()
    if missing:
        raise InputError(f"{directory} lacks {_listed(missing)}.")
    extra = stored.keys() - {*sources.values(), *embeddings, *_UNUSED}
    if extra:
        raise InputError(
            f"{directory} holds {_listed(extra)}, for which its {CONFIG_FILE} has no "
            "place."
        )
    for name, source in sources.items():
        view = stored[source].get_slice(source)
        shape, dtype = tuple(view.get_shape()), view.get_dtype()
        if shape != shapes[name]:
            raise InputError(
                f"{source} in {directory} has shape {shape}, but its {CONFIG_FILE} "
                f"asks for {shapes[name]}."
            )
        if dtype not in _STORED_TYPES:
            raise InputError(
                f"{source} in {directory} is stored as {dtype}; supported are "
                f"{', '.join(_STORED_TYPES)}."
            )
    for copy in embeddings[1:]:
        original, duplicate = (
            stored[name].get_tensor(name) for name in (embeddings[0], copy)
        )
        if not np.array_equal(original, duplicate):
            raise InputError(
                f"{embeddings[0]} and {copy} in {directory} differ, but a T5 has one "
                "embedding."
            )
    return sources


def _listed(names: Collection[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"the tensor{'s' if len(names) > 1 else ''} {shown}{more}"


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


def _get(tree: Any, path: tuple[str | int, ...]) -> Any:
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
    shape = tuple(_get(parameters, path).shape)
    return shape if index is None else shape[1:]


def _stored_array(
    name: str, parameters: Any, slot: Slot, storage: np.dtype
) -> np.ndarray:
    path, index = slot
    array = np.asarray(_get(parameters, path))
    array = array if index is None else array[index]
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(array.astype(storage, copy=False))
    _check_finite(name, array, f"as {storage.name}")
    return array


def _shard(sizes: dict[str, int], max_bytes: int) -> dict[str, list[str]]:
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
    files = (path for path in pathlib.Path(directory).iterdir() if path.is_file())
    for path in sorted(files):
        if path.suffix in _READ_SUFFIXES or path.name in _READ_NAMES:
            with open(path, "rb") as file:
                own = hashlib.file_digest(file, "sha256").hexdigest()
            digest.update(f"{path.name} {own}\n".encode())
    return digest.hexdigest()
