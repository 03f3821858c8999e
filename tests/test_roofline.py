"""Bytes and operations of passes, against real arrays and sums by hand."""

import dataclasses
import doctest
import math

import jax
import jax.numpy as jnp
import pytest

from specjax import roofline
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config, num_parameters
from specjax.training import flops

# Every number differs from the others, so that none can stand in another's place.
TINY = T5Config(
    vocab_size=50,
    d_model=12,
    d_kv=5,
    num_heads=3,
    d_ff=22,
    num_encoder_layers=2,
    num_decoder_layers=4,
)
SHAPES = {
    "gated": TINY,
    "plain, tied": dataclasses.replace(
        TINY, gated=False, activation="relu", tied_head=True
    ),
    "a bias per layer": dataclasses.replace(TINY, bias_per_layer=True),
    "shared encoder": dataclasses.replace(TINY, num_encoder_layers=0, encoder_width=9),
}
XXL = T5Config.preset("t5-v1_1-xxl")
V4 = roofline.Device.preset("TPU v4")
USUAL = {"written": 64, "source": 128}


def abstract(config, dtype="float32"):
    """The model without its numbers."""
    model = jax.eval_shape(lambda: T5(config, jax.random.key(0)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), model)


def count(tree):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def nbytes(tree):
    return sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)
    )


def test_doctests():
    failed, tried = doctest.testmod(roofline)
    assert failed == 0
    assert tried >= 15


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_parameters_of_a_real_model(config):
    """All arrays; those of a decoder pass; those of the pass of the source."""
    model = abstract(config)
    cross = sum(count(block.cross.kv) for block in model.decoder)
    head = count(model.embedding if model.head is None else model.head)
    decoder = count((model.decoder, model.decoder_norm)) - cross + head
    assert roofline.decoder_parameters(config) == decoder
    step = roofline.decoder_pass(config, "float32", written=7, source=9)
    assert step.weights == 4 * decoder
    encoder = count((model.encoder, model.encoder_norm, model.projection)) + cross
    assert roofline.encoder_pass(config, "bfloat16", source=9).weights == 2 * encoder
    need = roofline.memory_needed([config], "float32", slots=8, source=9)
    assert need.weights == 4 * count(model)
    # What neither pass reads: the embedding, of which some rows are looked up.
    spare = 0 if config.tied_head else config.vocab_size * config.d_model
    assert decoder + encoder + spare == count(model) == num_parameters(config)


@pytest.mark.parametrize(
    ("size", "millions"),
    [
        ("small", 38.5),
        ("base", 123.8),
        ("large", 391.6),
        ("xl", 1424.9),
        ("xxl", 5567.7),
    ],
)
def test_parameters_of_a_step_of_the_published_shapes(size, millions):
    config = T5Config.preset(f"t5-v1_1-{size}")
    assert round(roofline.decoder_parameters(config) / 1e6, 1) == millions


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_caches_of_a_real_model(dtype):
    batch, slots, source = 3, 16, 9
    model = abstract(TINY, dtype)
    inputs = jax.ShapeDtypeStruct((batch, source), jnp.int32)
    mask = jax.ShapeDtypeStruct((batch, source), bool)
    encoded = jax.eval_shape(lambda m, x, y: m.encode(x, y), model, inputs, mask)
    cache = jax.eval_shape(lambda m: m.init_cache(batch, slots), model)
    sizes = {"batch": batch, "source": source}
    need = roofline.memory_needed([TINY], dtype, slots=slots, **sizes)
    assert need.self_attention == nbytes(cache.memory)
    assert need.cross_attention == nbytes(encoded.cross)
    assert need.hidden == nbytes(encoded.hidden)
    assert need.bytes == nbytes((model, cache.memory, encoded.cross, encoded.hidden))
    # A pass reads the cross cache, which the encoder wrote, and the slots it is told.
    work = roofline.decoder_pass(TINY, dtype, tokens=2, written=slots - 2, **sizes)
    assert work.self_attention == nbytes(cache.memory)
    assert work.cross_attention == nbytes(encoded.cross)
    assert roofline.encoder_pass(TINY, dtype, **sizes).cross_attention == nbytes(
        encoded.cross
    )
    pair = roofline.memory_needed([TINY, TINY], dtype, slots=slots, **sizes)
    assert pair.bytes == 2 * need.bytes


@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_operations_are_those_of_teacher_forcing(config):
    """Which the compiler's own count confirms: see the tests of `training.flops`."""
    rows, source, fed = 3, 9, 4
    whole = roofline.encoder_pass(config, "float32", batch=rows, source=source).flops
    whole += roofline.decoder_pass(
        config, "float32", tokens=fed, batch=rows, written=0, source=source
    ).flops
    assert whole == flops.forward_flops(config, rows, source, fed)


def test_operations_of_a_step_with_a_cache():
    """What 7 slots add to 2 tokens: scores and mixture, in each of 4 layers."""
    inner = TINY.num_heads * TINY.d_kv
    step = roofline.decoder_pass(TINY, "float32", tokens=2, written=7, source=9)
    bare = roofline.decoder_pass(TINY, "float32", tokens=2, written=0, source=9)
    assert step.flops - bare.flops == 2 * 2 * 4 * (2 * 7 * inner)


def test_activations_by_hand():
    """One layer of width 2, one head of 1, 3 hidden units, 5 tokens; in bfloat16."""
    config = T5Config(
        vocab_size=5,
        d_model=2,
        d_kv=1,
        num_heads=1,
        d_ff=3,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    qkv, self_attention, out = 2 + 3, 3 + 1, 1 + 2
    q, cross_attention, cross_out = 2 + 1, 1 + 1, 1 + 2
    wi, wo = 2 + 6, 3 + 2
    own = qkv + self_attention + out + wi + wo
    layer = own + q + cross_attention + cross_out
    looked_up, head, logits = 2, 2, 2 * 5
    scores = 2 * (7 + 4 + 9)
    work = roofline.decoder_pass(
        config, "bfloat16", tokens=4, batch=3, written=7, source=9
    )
    narrow, wide = layer + looked_up + head, scores + logits
    assert work.activations == 3 * 4 * (2 * narrow + 4 * wide)
    caches = work.self_attention + work.cross_attention
    assert work.bytes == work.weights + caches + work.activations
    # The encoder's layer, the embedding, and what the cross-attention's keys read.
    work = roofline.encoder_pass(config, "bfloat16", batch=3, source=9)
    assert work.activations == 3 * 9 * (2 * (own + looked_up + 2) + 4 * 2 * 9)
    assert work.self_attention == 0


def test_more_of_anything_is_more():
    def step(**changes):
        arguments = {"tokens": 2, "batch": 2, "written": 8, "source": 9} | changes
        return roofline.decoder_pass(TINY, "bfloat16", **arguments)

    for name in ("tokens", "batch", "written", "source"):
        works = [step(**{name: value}) for value in (10, 11, 40)]
        assert works[0].bytes < works[1].bytes < works[2].bytes
        assert works[0].flops < works[1].flops < works[2].flops
        assert len({work.weights for work in works}) == 1
    wide = roofline.decoder_pass(
        TINY, "float32", tokens=2, batch=2, written=8, source=9
    )
    assert wide.weights == 2 * step().weights and wide.flops == step().flops


def test_a_pass_takes_the_longer_of_both():
    work = roofline.Work(60, 20, 15, 5, flops=1000)
    slow = roofline.Device("slow memory", 10.0, {"float32": 1000.0}, 1e9)
    weak = roofline.Device("weak products", 1000.0, {"float32": 10.0}, 1e9)
    assert work.bytes == 100
    assert work.seconds(slow, "float32") == 10
    assert work.seconds(weak, "float32") == 100
    with pytest.raises(ValueError, match="slow memory has no peak"):
        work.seconds(slow, "bfloat16")


def test_c_on_the_papers_hardware_is_a_floor_of_the_papers():
    """Leviathan et al. 2023, Table 4: measured on a TPU v4, batch 1."""
    found = {}
    for size, printed in {"small": 0.02, "base": 0.04, "large": 0.11}.items():
        draft = T5Config.preset(f"t5-v1_1-{size}")
        found[size] = roofline.cost_ratio(XXL, draft, V4, "bfloat16", **USUAL)
        assert 1 < printed / found[size] < 3
    assert found["small"] < found["base"] < found["large"] < 1
    assert roofline.cost_ratio(XXL, XXL, V4, "bfloat16", **USUAL) == 1


def test_verification_of_the_papers_blocks_is_free_at_batch_1():
    """On every chip, as the paper's formula assumes."""
    for name in roofline.Device.presets():
        chip = roofline.Device.preset(name)
        assert (
            1 < roofline.verify_ratio(XXL, chip, "bfloat16", tokens=8, **USUAL) < 1.01
        )
        assert roofline.verify_ratio(XXL, chip, "bfloat16", tokens=1, **USUAL) == 1


def test_free_batch_is_where_v_leaves_1():
    h200 = roofline.Device.preset("H200")

    def v(batch, gamma=7):
        return roofline.verify_ratio(
            XXL, h200, "bfloat16", tokens=gamma + 1, batch=batch, **USUAL
        )

    rows = roofline.free_batch(XXL, h200, "bfloat16", gamma=7, **USUAL)
    assert v(rows) <= 1.1 < v(rows + 1)
    # peak / bandwidth = 206 tokens of the bare weights: batch 25 at gamma 7.
    assert 15 < rows < 30
    assert all(v(batch) <= v(batch + 1) for batch in range(1, 200))
    batches = [
        roofline.free_batch(XXL, h200, "bfloat16", gamma=gamma, **USUAL)
        for gamma in (0, 1, 3, 15)
    ]
    assert batches[0] == math.inf
    assert batches[1] > batches[2] > rows > batches[3]
    # So much longer than a step that not even one row is free.
    many = {"gamma": 999, "written": 8, "source": 8}
    assert roofline.free_batch(XXL, h200, "bfloat16", **many) == 0
    # Long caches keep the memory busy at any batch; scores are what 7 drafts add.
    long = {"gamma": 7, "written": 64, "source": 60_000}
    assert roofline.free_batch(XXL, h200, "bfloat16", **long, slack=0.25) == math.inf
    assert roofline.free_batch(XXL, h200, "bfloat16", **long, slack=0.1) < 1


def test_what_fits():
    """The paper's pair fits its chip in bfloat16, and no chip of 16 GB."""
    pair = [XXL, T5Config.preset("t5-v1_1-small")]
    need = {
        dtype: roofline.memory_needed(pair, dtype, slots=136, source=512).bytes
        for dtype in ("bfloat16", "float32")
    }
    v5e = roofline.Device.preset("TPU v5e")
    assert v5e.memory < need["bfloat16"] < V4.memory < need["float32"]


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: roofline.decoder_pass(TINY, "int4", **USUAL), "dtype"),
        (lambda: roofline.decoder_pass(TINY, "float32", tokens=0, **USUAL), "tokens"),
        (lambda: roofline.decoder_pass(TINY, "float32", batch=0, **USUAL), "batch"),
        (
            lambda: roofline.decoder_pass(TINY, "float32", written=-1, source=9),
            "written",
        ),
        (
            lambda: roofline.decoder_pass(TINY, "float32", written=0, source=0),
            "source",
        ),
        (lambda: roofline.encoder_pass(TINY, "float32", source=0), "source"),
        (lambda: roofline.encoder_pass(TINY, "float64", source=1), "dtype"),
        (
            lambda: roofline.memory_needed([TINY], "float32", slots=0, source=1),
            "slots",
        ),
        (lambda: roofline.memory_needed([], "float32", slots=1, source=1), "configs"),
        (lambda: roofline.Device.preset("TPU v9"), "device is 'TPU v9'"),
        (lambda: roofline.Device("x", 0.0, {"float32": 1.0}, 1.0), "bandwidth of x"),
        (lambda: roofline.Device("x", 1.0, {"float32": math.nan}, 1.0), "peak"),
        (lambda: roofline.Device("x", 1.0, {"float32": 1.0}, -1), "memory of x"),
        (
            lambda: roofline.verify_ratio(XXL, V4, "bfloat16", tokens=0, **USUAL),
            "tokens",
        ),
        (
            lambda: roofline.free_batch(XXL, V4, "bfloat16", gamma=-1, **USUAL),
            "gamma",
        ),
        (
            lambda: roofline.free_batch(
                XXL, V4, "bfloat16", gamma=1, slack=0.0, **USUAL
            ),
            "slack",
        ),
    ],
)
def test_what_cannot_be_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()
