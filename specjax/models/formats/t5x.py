"""Checkpoints of T5X: a msgpack file named `checkpoint`, and zarr folders beside it.

Small arrays lie in the msgpack itself. In the place of a large one stands a description
of the folder that holds its chunks, which are read through `tensorstore`. Layers are
apart (`layers_0`), or stacked along axis 1 of one array ("scanned").

Roberts et al. 2022 (arXiv:2203.17189).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import pathlib
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from specjax.errors import InputError
from specjax.models.formats import base, flax_msgpack, msgpack_tree
from specjax.models.formats.base import Tensor, Tensors
from specjax.models.t5_config import T5Config

TREE_FILE = "checkpoint"
# Folders of parameters; others hold what the optimizer remembers.
PARAMETERS = "target."

_ATTENTIONS = {
    "attention": ("encoder", "0.SelfAttention"),
    "self_attention": ("decoder", "0.SelfAttention"),
    "encoder_decoder_attention": ("decoder", "1.EncDecAttention"),
}
_NORMS = {
    "pre_attention_layer_norm": ("encoder", "0"),
    "pre_self_attention_layer_norm": ("decoder", "0"),
    "pre_cross_attention_layer_norm": ("decoder", "1"),
}
_LETTERS = {"query": "q", "key": "k", "value": "v", "out": "o"}
_LAST = {"encoder": "1", "decoder": "2"}  # the feed-forward layer
_BIAS = "SelfAttention.relative_attention_bias"
_WHOLE = {
    "token_embedder/embedding": "shared",
    "decoder/logits_dense/kernel": "lm_head",
    "encoder/encoder_norm/scale": "encoder.final_layer_norm",
    "decoder/decoder_norm/scale": "decoder.final_layer_norm",
    "encoder/relpos_bias/rel_embedding": f"encoder.block.0.layer.0.{_BIAS}",
    "decoder/relpos_bias/rel_embedding": f"decoder.block.0.layer.0.{_BIAS}",
}
# Stacked arrays that are kept once read: their layers are asked for one after another,
# and a fused parameter is made of up to three.
_KEPT = 3

Keep = Callable[[Callable[[], np.ndarray]], np.ndarray]


def read(directory: pathlib.Path) -> Tensors:
    """The parameters of a directory, under Hugging Face's names.

    Raises:
        InputError: the msgpack is cut short or holds no parameters; a zarr folder or
            one of its chunks is absent, or its description is damaged.
    """
    path = directory / TREE_FILE
    tree = msgpack_tree.read_tree(path)
    root = tree.get("optimizer", tree)
    root = root.get("target") if isinstance(root, dict) else None
    if not isinstance(root, dict):
        raise InputError(f"{path} has no optimizer/target, where T5X keeps parameters.")
    leaves = flax_msgpack.flat(_opened(root, directory))
    keep: Keep = functools.lru_cache(_KEPT)(lambda read: read())
    tensors: Tensors = {}
    for name, leaf in leaves.items():
        stack, _, rest = name.partition("/")
        layer, _, inner = rest.partition("/")
        numbered = re.fullmatch(r"layers_(\d+)", layer)
        block = f"{stack}.block.{{}}.layer"
        if name in _WHOLE:
            tensors[f"{_WHOLE[name]}.weight"] = _as_weight(name, leaf)
        elif numbered and (own := _in_layer(stack, inner)):
            full = f"{block.format(int(numbered[1]))}.{own}.weight"
            tensors[full] = _as_weight(name, leaf)
        elif layer == stack and (own := _in_layer(stack, inner)):
            parts = _unstacked(leaf, keep, path, name)
            for number, part in enumerate(parts):
                full = f"{block.format(number)}.{own}.weight"
                tensors[full] = _as_weight(name, part)
        else:
            tensors[name] = leaf  # its own name shows in the message about it
    return tensors


def config_of(tensors: Tensors, directory: pathlib.Path) -> T5Config:
    """The shape of a model that has no `config.json`, read from its tensors.

    The number of heads is that of the position bias. What no shape tells is taken as
    all published models have it: GELU where the feed-forward layer is gated, ReLU where
    it is not; a scaled head where it is the embedding.

    Raises:
        InputError: a tensor that tells a size is absent, or two disagree.
    """
    where = f"The shape of the model in {directory}"
    sizes = {name: tensor.shape for name, tensor in tensors.items()}
    first = "encoder.block.0.layer"
    gated = f"{first}.1.DenseReluDense.wi_0.weight" in sizes
    wi = f"{first}.1.DenseReluDense.{'wi_0' if gated else 'wi'}.weight"
    try:
        vocab_size, d_model = sizes["shared.weight"]
        num_buckets, num_heads = sizes[f"{first}.0.{_BIAS}.weight"]
        d_attention, _ = sizes[f"{first}.0.SelfAttention.q.weight"]
        d_ff, _ = sizes[wi]
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{where} cannot be told ({error}): put its config.json there."
        ) from error
    if d_attention % num_heads:
        raise InputError(
            f"{where} cannot be told: its {num_heads} heads do not divide "
            f"{d_attention}, the width of its queries; put its config.json there."
        )
    layers = {
        stack: len({n.split(".")[2] for n in sizes if n.startswith(f"{stack}.block.")})
        for stack in _LAST
    }
    tied = "lm_head.weight" not in sizes
    return T5Config(
        vocab_size=vocab_size,
        d_model=d_model,
        d_kv=d_attention // num_heads,
        num_heads=num_heads,
        d_ff=d_ff,
        num_encoder_layers=layers["encoder"],
        num_decoder_layers=layers["decoder"],
        gated=gated,
        activation="gelu_new" if gated else "relu",
        tied_head=tied,
        scaled_head=tied,
        bias_per_layer=f"encoder.block.1.layer.0.{_BIAS}.weight" in sizes,
        num_buckets=num_buckets,
    )


def _in_layer(stack: str, inner: str) -> str | None:
    """`mlp/wo/kernel` of a decoder -> `2.DenseReluDense.wo`; None: not of a T5."""
    match inner.split("/"):
        case [kind, which, "kernel"] if kind in _ATTENTIONS and which in _LETTERS:
            of, attention = _ATTENTIONS[kind]
            own = f"{attention}.{_LETTERS[which]}"
        case ["mlp", ("wi" | "wi_0" | "wi_1" | "wo") as which, "kernel"]:
            of, own = stack, f"{_LAST.get(stack)}.DenseReluDense.{which}"
        case ["pre_mlp_layer_norm", "scale"]:
            of, own = stack, f"{_LAST.get(stack)}.layer_norm"
        case [kind, "scale"] if kind in _NORMS:
            of, own = _NORMS[kind][0], f"{_NORMS[kind][1]}.layer_norm"
        case ["relpos_bias", "rel_embedding"]:
            of, own = stack, f"0.{_BIAS}"
        case _:
            return None
    return own if of == stack and stack in _LAST else None


def _as_weight(name: str, leaf: Tensor) -> Tensor:
    """A leaf in the model's order of axes: kernels are ``[in, out]`` in T5X."""
    if not name.endswith(("/kernel", "/rel_embedding")):
        return leaf
    shape = leaf.shape
    if len(shape) == 3:  # heads and their width apart, before or after the model's
        out = name.endswith("/out/kernel")
        shape = (math.prod(shape[:2]), shape[2])
        shape = shape if out else (leaf.shape[0], math.prod(leaf.shape[1:]))
    flat = Tensor(shape, leaf.dtype, lambda: leaf.read().reshape(shape))
    return base.turned(flat)


def _unstacked(leaf: Tensor, keep: Keep, path: pathlib.Path, name: str) -> list[Tensor]:
    """The layers of an array that has them along axis 1."""
    if len(leaf.shape) < 2:
        raise InputError(
            f"{name} in {path} has shape {leaf.shape}, and stands where the layers are "
            "stacked along axis 1."
        )
    shape = (leaf.shape[0], *leaf.shape[2:])

    def layer(number: int) -> Tensor:
        return Tensor(shape, leaf.dtype, lambda: keep(leaf.read)[:, number])

    return [layer(number) for number in range(leaf.shape[1])]


def _opened(tree: Any, directory: pathlib.Path) -> Any:
    """The tree with each description of a zarr folder as its tensor."""
    if not isinstance(tree, dict):
        return tree
    if "driver" not in tree or "kvstore" not in tree:
        return {name: _opened(own, directory) for name, own in tree.items()}
    # Whatever store it was written to, the path is relative to the checkpoint's; where
    # it stands depends on the version of tensorstore.
    path = str(tree["kvstore"].get("path", tree.get("path", ""))).rstrip("/")
    if path in ("", "..") or path != pathlib.PurePath(path).name:
        raise InputError(
            f"{directory / TREE_FILE} names the folder {path!r}, which is not beside "
            "it."
        )
    return _zarr(directory / path)


def _zarr(folder: pathlib.Path) -> Tensor:
    """A zarr array of version 2, all of whose chunks are there.

    tensorstore would read zeros in the place of a chunk that is absent.
    """
    header = folder / ".zarray"
    if not header.is_file():
        raise InputError(f"{folder} is absent or no zarr array: it has no .zarray.")
    try:
        fields = json.loads(header.read_text(encoding="utf-8"))
        shape, chunks = tuple(fields["shape"]), tuple(fields["chunks"])
        separator = fields.get("dimension_separator", ".")
        counts = [-(-a // b) for a, b in zip(shape, chunks, strict=True)]
        # Two bytes without a sign are the bits of a bfloat16.
        short = fields["dtype"] in ("bfloat16", "<u2")
        dtype = np.dtype(ml_dtypes.bfloat16 if short else fields["dtype"])
        dtype = dtype if short else dtype.newbyteorder("=")
    except (OSError, ValueError, TypeError, KeyError, ZeroDivisionError) as error:
        raise InputError(f"{header} is damaged ({error!r}).") from error
    for numbers in itertools.product(*map(range, counts)):
        chunk = folder / (separator.join(map(str, numbers)) or "0")
        if not chunk.is_file() or not chunk.stat().st_size:
            raise InputError(f"The chunk {chunk} is absent or empty.")
    return Tensor(
        shape,
        base.type_name(dtype),
        functools.partial(_read_zarr, folder, dtype),
    )


def _read_zarr(folder: pathlib.Path, dtype: np.dtype) -> np.ndarray:
    # Imported late: it takes a while, and comes with orbax.
    import tensorstore

    spec = {"driver": "zarr", "kvstore": {"driver": "file", "path": str(folder)}}
    try:
        array = tensorstore.open(spec, open=True, read=True).result().read().result()
    except (ValueError, OSError) as error:
        first = str(error).splitlines()[0]
        raise InputError(f"{folder} has a damaged chunk ({first[:200]}).") from error
    return np.asarray(array).view(dtype)
