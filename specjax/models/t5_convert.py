"""A checkpoint written anew in Hugging Face's format, one shard at a time.

The model is never in memory as a whole, and shards that a killed run has finished stay.
"""

from __future__ import annotations

import json
import pathlib
import re
from collections.abc import Callable

import jax
import ml_dtypes
import numpy as np
from flax import nnx

from specjax.errors import InputError
from specjax.models import t5_weights
from specjax.models.formats import base, find, hf_safetensors
from specjax.models.formats.base import Tensor, Tensors
from specjax.models.t5_config import T5Config

# Of a type that a checkpoint of Orbax says it has; all others show theirs.
_DTYPE_FIELD = "torch_dtype"


def stored_type(checkpoint: t5_weights.Checkpoint) -> np.dtype:
    """The type that a checkpoint is stored in; float32 where it is of several."""
    if checkpoint.format == find.ORBAX:
        text = (checkpoint.directory / base.CONFIG_FILE).read_text(encoding="utf-8")
        own = json.loads(text).get(_DTYPE_FIELD, "float32")
        return np.dtype(ml_dtypes.bfloat16 if own == "bfloat16" else np.float32)
    found = {tensor.dtype for tensor in checkpoint.tensors.values()}
    return base.STORED_TYPES[found.pop()] if len(found) == 1 else np.dtype(np.float32)


def config_fields(config: T5Config, dtype: np.dtype) -> dict[str, object]:
    """What stands in ``config.json``."""
    return config.to_json() | {_DTYPE_FIELD: dtype.name}


def readable(checkpoint: t5_weights.Checkpoint) -> Tensors:
    """The checkpoint's tensors; those of Orbax are read now, as one model."""
    if checkpoint.format != find.ORBAX:
        return checkpoint.tensors
    model = t5_weights.load_t5(checkpoint.directory, stored_type(checkpoint))
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))

    def tensor(path: tuple[str | int, ...], index: int | None) -> Tensor:
        leaf: jax.Array = t5_weights.get(parameters, path)
        shape = leaf.shape if index is None else leaf.shape[1:]
        return Tensor(
            tuple(shape),
            base.type_name(leaf.dtype),
            lambda: np.asarray(leaf if index is None else leaf[index]),
        )

    table = t5_weights.tensor_table(checkpoint.config)
    return {name: tensor(*slot) for name, slot in table.items()}


def plan(
    tensors: Tensors, dtype: np.dtype, max_shard_bytes: int
) -> tuple[dict[str, list[str]], dict[str, int]]:
    """File name -> the tensors in it, and tensor -> its bytes as stored.

    Layer after layer of one kind: T5X may keep them in one array.
    """
    sizes = {
        name: int(np.prod(tensors[name].shape)) * dtype.itemsize
        for name in sorted(
            tensors, key=lambda name: re.sub(r"\.\d+", "", name, count=1)
        )
    }
    return t5_weights.shards_of(sizes, max_shard_bytes), sizes


def is_whole(path: pathlib.Path, names: list[str]) -> bool:
    """Whether a shard is there with all of its tensors."""
    try:
        return path.is_file() and hf_safetensors.read_file(path).keys() == set(names)
    except InputError:
        return False


def write(
    tensors: Tensors,
    config: T5Config,
    directory: pathlib.Path,
    dtype: np.dtype,
    *,
    max_shard_bytes: int = 5_000_000_000,
    advance: Callable[[int], None] = lambda bytes: None,
) -> None:
    """Writes what `load_t5` and `transformers` read; ``config.json`` comes last.

    Args:
        tensors: all of a model's, by Hugging Face's names.
        config: the model's shape.
        directory: made if it is absent. Whole shards in it are taken as its own.
        dtype: storage type, float32, float16 or bfloat16.
        max_shard_bytes: tensors beyond this go to further files. As much is in memory.
        advance: told the bytes of each shard that is whole.

    Raises:
        InputError: a weight is not finite, or becomes so in `dtype`; or what stands in
            the place of a tensor cannot be read.
        OSError: the disk is full, or the like; a shard may raise safetensors' own error
            then. Whole shards stay.
    """
    # Imported late: writing weights is the only use of safetensors.
    from safetensors.numpy import save_file

    directory.mkdir(parents=True, exist_ok=True)
    shards, sizes = plan(tensors, dtype, max_shard_bytes)
    for file, names in shards.items():
        if not is_whole(directory / file, names):
            arrays = {
                name: t5_weights.as_stored(name, tensors[name].read(), dtype)
                for name in names
            }
            partial = directory / f".{file}.partial"
            try:
                partial.touch()
                usual = partial.stat().st_mode
                save_file(arrays, partial, metadata={"format": "pt"})
                partial.chmod(usual)  # safetensors' own can be read by the owner alone
                partial.replace(directory / file)
            finally:
                partial.unlink(missing_ok=True)
        advance(sum(sizes[name] for name in names))
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {n: file for file, names in shards.items() for n in names},
        }
        _write_json(directory / hf_safetensors.INDEX_FILE, index)
    _write_json(directory / base.CONFIG_FILE, config_fields(config, dtype))


def _write_json(path: pathlib.Path, fields: dict[str, object]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
