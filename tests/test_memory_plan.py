"""What a device holds, against what placed arrays take and against a compiler."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from specjax.errors import InputError
from specjax.memory_plan import TPU_LANES, Decode, plan, weight_bytes
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.roofline import memory_needed
from specjax.sharding import DECODING, REPLICATED, TRAINING, make_mesh, place
from tests.helpers import TINY_T5, tiny_t5

XXL, SMALL = (T5Config.preset(f"t5-v1_1-{size}") for size in ("xxl", "small"))
DECODE = Decode(batch=4, source=128, length=128, gamma=7)


@pytest.mark.parametrize("layout", [DECODING, TRAINING, REPLICATED])
def test_weights_are_those_of_the_placed_model(layout):
    mesh = make_mesh("data=2,model=4")
    model = place(tiny_t5(), mesh, layout)
    first = jax.devices()[0]
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(model)
        for shard in leaf.addressable_shards
        if shard.device == first
    )
    assert weight_bytes(TINY_T5, "float32", mesh.shape, layout) == held
    assert weight_bytes(TINY_T5, "bfloat16", mesh.shape, layout) == held // 2


def test_caches_are_those_of_the_models():
    sizes = {"data": 2, "model": 4}
    found = plan(TINY_T5, None, "float32", sizes, DECODE)
    model = tiny_t5()
    cache = jax.eval_shape(lambda: model.init_cache(DECODE.batch, DECODE.slots))
    inputs = jnp.zeros((DECODE.batch, DECODE.source), jnp.int32)
    encoded = jax.eval_shape(lambda: model.encode(inputs, inputs == 0))

    def size(tree):
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))

    assert found.self_attention == size(cache.memory) // 8
    assert found.cross_attention == size(encoded.cross) // 8
    assert found.hidden == size(encoded.hidden) // 2  # each device of a row has it all


def test_one_device_holds_what_the_roofline_counts():
    found = plan(XXL, SMALL, "bfloat16", {}, DECODE)
    known = memory_needed(
        [XXL, SMALL], "bfloat16", batch=4, slots=DECODE.slots, source=128
    )
    kept = found.bytes - found.laws - found.activations
    assert kept == known.bytes


def test_a_mesh_splits_the_target_and_the_draft_if_asked():
    four = {"data": 1, "model": 4}
    whole, on_four = (plan(XXL, SMALL, "bfloat16", n, DECODE) for n in ({}, four))
    assert on_four.target_weights == pytest.approx(whole.target_weights / 4, rel=1e-3)
    assert on_four.draft_weights == whole.draft_weights
    draft = T5Config.preset("t5-v1_1-base")  # of 12 heads
    split = plan(XXL, draft, "bfloat16", four, DECODE, split_draft=True)
    base = weight_bytes(draft, "bfloat16", four, REPLICATED)
    assert split.draft_weights == pytest.approx(base / 4, rel=1e-3)
    rows = plan(XXL, SMALL, "bfloat16", {"data": 4}, DECODE)
    assert rows.self_attention * 4 == whole.self_attention
    assert rows.target_weights == whole.target_weights


def test_a_tpu_lays_narrow_heads_out_wide():
    """d_kv is 64: half of each line of a cache is padding."""
    thin, wide = (
        plan(XXL, SMALL, "bfloat16", {}, DECODE, lanes=n) for n in (1, TPU_LANES)
    )
    assert wide.self_attention == 2 * thin.self_attention
    assert wide.target_weights == thin.target_weights


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(dtype="float16"), "dtype is 'float16': one of float32, bfloat16"),
        (dict(sizes={"data": 3}), "data=3 does not divide the 4 rows"),
        (
            dict(sizes={"model": 6}),
            "model=6 does not divide the 64 attention heads of the target",
        ),
        (dict(decode=Decode(0, 1, 2, 1)), "batch is 0: at least 1"),
        (dict(decode=Decode(1, 1, 2, -1)), "gamma is -1: at least 0"),
    ],
)
def test_what_means_nothing_is_refused(changes, message):
    given = dict(dtype="bfloat16", sizes={}, decode=DECODE) | changes
    with pytest.raises(InputError, match=message):
        plan(XXL, SMALL, **given)


def test_what_cannot_be_placed_cannot_be_planned():
    """66 ids on four devices: their number divides with the width, the ids do not."""
    config = dataclasses.replace(TINY_T5, vocab_size=66)
    with pytest.raises(InputError, match="model=4 does not divide the 66 units of"):
        weight_bytes(config, "float32", {"data": 1, "model": 4})


def test_the_skeleton_is_that_of_the_model():
    assert weight_bytes(TINY_T5, "float32", {"data": 1, "model": 1}) == sum(
        leaf.nbytes for leaf in jax.tree.leaves(T5(TINY_T5, jax.random.key(0)))
    )
