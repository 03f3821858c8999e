"""Tensors of small T5s by their published names, and whether a model holds them."""

from __future__ import annotations

import dataclasses

import numpy as np

from specjax.models.t5_config import T5Config

SHAPE = {"vocab_size": 40, "d_model": 16, "d_kv": 4, "num_heads": 3, "d_ff": 24}
SHAPE |= {"num_encoder_layers": 2, "num_decoder_layers": 3}
UNTIED = T5Config(**SHAPE)
TIED = dataclasses.replace(
    UNTIED, gated=False, activation="relu", tied_head=True, scaled_head=True
)
CONFIGS = {
    "tied": TIED,
    "untied": UNTIED,
    "per_layer": dataclasses.replace(UNTIED, bias_per_layer=True),
}


def random_tensors(config, seed=0):
    """Every tensor that a checkpoint of this shape holds, by its published name."""
    width, inner = config.d_model, config.num_heads * config.d_kv
    shapes = {"shared": (config.vocab_size, width)}
    if not config.tied_head:
        shapes["lm_head"] = (config.vocab_size, width)
    stacks = {
        "encoder": (config.num_encoder_layers, ["SelfAttention"]),
        "decoder": (config.num_decoder_layers, ["SelfAttention", "EncDecAttention"]),
    }
    for stack, (num_layers, attentions) in stacks.items():
        shapes[f"{stack}.final_layer_norm"] = (width,)
        for i in range(num_layers):
            layer = f"{stack}.block.{i}.layer"
            for j, kind in enumerate(attentions):
                for letter in "qkv":
                    shapes[f"{layer}.{j}.{kind}.{letter}"] = (inner, width)
                shapes[f"{layer}.{j}.{kind}.o"] = (width, inner)
                shapes[f"{layer}.{j}.layer_norm"] = (width,)
            if i == 0 or config.bias_per_layer:
                name = f"{layer}.0.SelfAttention.relative_attention_bias"
                shapes[name] = (config.num_buckets, config.num_heads)
            last = f"{layer}.{len(attentions)}"
            for wi in ("wi_0", "wi_1") if config.gated else ("wi",):
                shapes[f"{last}.DenseReluDense.{wi}"] = (config.d_ff, width)
            shapes[f"{last}.DenseReluDense.wo"] = (width, config.d_ff)
            shapes[f"{last}.layer_norm"] = (width,)
    rng = np.random.default_rng(seed)
    return {
        f"{name}.weight": rng.normal(size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }


def assert_holds(model, config, tensors, dtype=np.float32):
    """Each parameter of the model is what the published name says."""
    parts = {name.removesuffix(".weight"): v for name, v in tensors.items()}

    def same(param, *names, axis=True):
        arrays = [parts[name] for name in names]
        expected = np.stack(arrays) if axis else arrays[0]
        actual = np.asarray(param[...])
        assert actual.dtype == dtype
        np.testing.assert_array_equal(actual, expected.astype(dtype))

    same(model.embedding, "shared", axis=False)
    if config.tied_head:
        assert model.head is None
    else:
        same(model.head, "lm_head", axis=False)
    for stack in ("encoder", "decoder"):
        norm = getattr(model, f"{stack}_norm").scale
        same(norm, f"{stack}.final_layer_norm", axis=False)
        for i, block in enumerate(getattr(model, stack)):
            layer = f"{stack}.block.{i}.layer"
            attention = f"{layer}.0.SelfAttention"
            same(block.attention.qkv, *(f"{attention}.{x}" for x in "qkv"))
            same(block.attention.out, f"{attention}.o", axis=False)
            same(block.attention.norm.scale, f"{layer}.0.layer_norm", axis=False)
            if i == 0 or config.bias_per_layer:
                bias = f"{attention}.relative_attention_bias"
                same(block.attention.bias, bias, axis=False)
            else:
                assert block.attention.bias is None
            last = f"{layer}.1"
            if stack == "decoder":
                cross, last = f"{layer}.1.EncDecAttention", f"{layer}.2"
                same(block.cross.q, f"{cross}.q", axis=False)
                same(block.cross.kv, f"{cross}.k", f"{cross}.v")
                same(block.cross.out, f"{cross}.o", axis=False)
                same(block.cross.norm.scale, f"{layer}.1.layer_norm", axis=False)
            wi = ("wi_0", "wi_1") if config.gated else ("wi",)
            dense = f"{last}.DenseReluDense"
            same(block.feed_forward.wi, *(f"{dense}.{x}" for x in wi))
            same(block.feed_forward.wo, f"{dense}.wo", axis=False)
            same(block.feed_forward.norm.scale, f"{last}.layer_norm", axis=False)
