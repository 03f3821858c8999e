"""The target in 8 bits as its draft: exact, few bytes, no second encoder."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    InputError,
    ModelDrafter,
    Sampling,
    TreeDrafter,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters.quantized import quantize, weight_bytes
from specjax.models import shared_encoder
from specjax.models.dense import Int8, dense
from specjax.models.embedding import look_up
from specjax.proof.tables import as_table
from specjax.training.draft_init import draft_from_target
from tests.drafters import laws
from tests.drafters.test_conformance import commit_and_draft
from tests.helpers import (
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

GREEDY = Sampling(temperature=None)
SOURCE = [2, 0, 3]


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0)


def table_of(model, source: list[int], depth: int):
    """A model's laws for one source as a table over prefixes."""
    size = model.vocab_size
    texts = np.array(list(itertools.product(range(size), repeat=depth)))
    fed = jnp.asarray(np.pad(texts, ((0, 0), (1, 0))), jnp.int32)
    inputs = jnp.broadcast_to(jnp.array([source]), (len(fed), len(source)))
    encoded = model.encode(inputs, jnp.ones(inputs.shape, bool))
    logits = model.decode(fed, None, encoded)[0].logits
    probs = np.asarray(jax.nn.softmax(logits), np.float64)
    rows = []
    for place in range(depth + 1):  # texts are in order: prefixes repeat
        rows.append(probs[:: size ** (depth - place), place])
    rows = np.concatenate(rows)
    return as_table(rows / rows.sum(-1, keepdims=True), depth)


def coarse(model):
    """The model with one great number in each row of its weights.

    Rounded to 8 bits what stands beside it is no more than a few steps, so that draft
    and target differ.
    """
    for block in model.decoder:
        for weight in (block.attention.out, block.cross.out, block.feed_forward.wo):
            weight[...] = weight[...].at[..., 0].set(40 * jnp.abs(weight[...]).max())
    model.head[...] = model.head[...].at[:, 0].set(8 * jnp.abs(model.head[...]).max())
    return model


@pytest.mark.slow
def test_joint_law():
    """Exact by both rules; a twin that reports the float law is not."""
    model = coarse(
        tiny_t5(
            4,
            vocab_size=4,
            d_model=8,
            d_kv=4,
            num_heads=2,
            d_ff=8,
            num_encoder_layers=1,
            num_decoder_layers=1,
        )
    )
    table = table_of(model, SOURCE, 3)
    drafter = ModelDrafter(quantize(model))
    laws.check_joint_law(model, table, drafter, model, 60_000, inputs=SOURCE)


def test_numbers():
    """Each output's greatest number is exact, others to half a step; zeros stay."""
    weight = jax.random.normal(jax.random.key(0), (3, 5, 16)).at[1, 2].set(0)
    whole = Int8.of(weight)
    assert whole.values.dtype == jnp.int8 and whole.scale.shape == (3, 5)
    back = np.float64(whole.values) * np.float64(whole.scale)[..., None]
    step = np.abs(weight).max(-1, keepdims=True) / 127
    assert (np.abs(back - weight) <= step / 2 + 1e-6).all()
    np.testing.assert_array_equal(back[1, 2], 0)
    # The product is that of these numbers, in each of its forms.
    for rows in ((1,), (4,), (5, 20)):
        x = jax.random.normal(jax.random.key(1), (*rows, 16))
        got = jax.jit(dense)(x, whole)
        np.testing.assert_allclose(
            got, np.tensordot(np.float64(x), back, axes=(-1, -1)), atol=1e-4
        )
    half = Int8.of(weight.astype(jnp.bfloat16))
    x = x.astype(jnp.bfloat16)
    assert half.dtype == jnp.bfloat16 and dense(x, half).dtype == jnp.bfloat16
    assert dense(x, half, jnp.float32).dtype == jnp.float32
    table = Int8.of(weight[0])
    ids = jnp.array([[1, 0], [4, 4]])
    np.testing.assert_allclose(look_up(table, ids), back[0][ids], atol=1e-6)


def test_bytes(target):
    """Every matrix of the decoder is whole numbers; the encoder is not there."""
    draft = quantize(target)
    small = [x for x in jax.tree.leaves(draft) if x.dtype != jnp.int8]
    matrices = [x for x in jax.tree.leaves(draft) if x.dtype == jnp.int8]
    buckets = target.config.num_buckets * target.config.num_heads
    assert max(x.size for x in small) == buckets
    # qkv, out; q, out; wi, wo of each of two layers; embedding and head.
    assert len(matrices) == 6 * 2 + 2
    wide = sum(x.size for x in matrices) * 4
    assert weight_bytes(draft) < 0.6 * weight_bytes(target.decoder)
    assert weight_bytes(draft) == wide // 4 + sum(x.nbytes for x in small)
    assert len(draft.encoder) == 0
    # The target is as it was.
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(target))


def decode_memory(model, steps: int) -> int:
    """Bytes beside its arguments that a loop of decode steps needs."""
    batch, size = 1, 8
    encoded = jax.eval_shape(lambda model: target_encoded(model, batch), wide_t5())

    def loop(model, cache, encoded):
        def step(_, carry):
            cache, token = carry
            cache = cache.replace(length=jnp.minimum(cache.length, size - 1))
            output, cache = model.decode(token, cache, encoded)
            return cache, jnp.argmax(output.logits, -1).astype(jnp.int32)

        token = jnp.zeros((batch, 1), jnp.int32)
        return jax.lax.fori_loop(0, steps, step, (cache, token))

    cache = jax.eval_shape(lambda model: model.init_cache(batch, size), model)
    compiled = jax.jit(loop).lower(model, cache, encoded).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def target_encoded(model, batch: int):
    inputs = jnp.zeros((batch, 4), jnp.int32)
    return model.encode(inputs, jnp.ones(inputs.shape, bool))


def wide_t5():
    """Layers that are too large to be multiplied lane by lane."""
    return jax.eval_shape(
        lambda: tiny_t5(
            0,
            vocab_size=2048,
            d_model=256,
            d_kv=64,
            d_ff=2048,
            num_encoder_layers=1,
            num_decoder_layers=4,
        )
    )


@pytest.mark.slow
def test_weights_stay_whole_numbers_in_a_loop():
    """No loop keeps wide copies: what it needs is one matrix at a time."""
    model = wide_t5()
    draft = jax.eval_shape(quantize, model)
    wide = sum(4 * x.size for x in jax.tree.leaves(draft) if x.dtype == jnp.int8)
    largest = max(4 * x.size for x in jax.tree.leaves(draft) if x.dtype == jnp.int8)
    assert decode_memory(draft, 20) < 2 * largest < wide / 4

    def hoisted(weight, x, dtype):
        """A wrong twin: it says nothing of the loop."""
        scale = jnp.expand_dims(weight.scale, tuple(range(x.ndim - 1)))
        return dense(x, weight.values.astype(x.dtype), dtype) * scale

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Int8, "multiply", hoisted)
        assert decode_memory(draft, 20) > wide / 2


@pytest.mark.slow
def test_greedy_text_is_the_targets(target):
    inputs, mask = ragged_sources(0, 6, 9)
    arguments = (inputs, mask, row_keys(0, 6))
    options = dict(sampling=GREEDY, max_length=16, eos_id=-1)
    plain = autoregressive_generate(target, *arguments, **options)
    # In 8 bits, but of other weights: so little is rounded off that all would stand.
    draft = quantize(perturbed(target, 1, 0.05))
    for drafter in (ModelDrafter(draft), TreeDrafter(draft, (-1, 0, 0, 1))):
        fast = speculative_generate(target, drafter, *arguments, gamma=3, **options)
        np.testing.assert_array_equal(fast.tokens, plain.tokens)
        assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()
    fast = speculative_generate(
        target, ModelDrafter(quantize(target)), *arguments, gamma=3, **options
    )
    assert 10 * fast.stats.accepted.sum() > 9 * fast.stats.drafted.sum()


@pytest.mark.slow
def test_commit_keeps_the_memory_in_step(target):
    commit_and_draft(ModelDrafter(quantize(target)), GREEDY, target, 64, atol=1e-5)


@pytest.mark.slow
def test_rows_stand_alone(target):
    laws.check_rows(target, ModelDrafter(quantize(target)), atol=1e-6)


def test_no_encoder_is_run(target):
    """The set-up multiplies nothing: keys and values are the target's."""
    drafter = ModelDrafter(quantize(target))
    inputs, mask = ragged_sources(0, 4, 5)
    encoded = jax.eval_shape(target.encode, inputs, mask)

    def init(drafter, target, encoded):
        one = jnp.ones(4, jnp.int32)
        return drafter.init(target, encoded, inputs, mask, inputs[:, :1], one, 16)

    lowered = jax.jit(init).trace(drafter, target, encoded).lower()
    assert "dot_general" not in lowered.as_text()


def test_what_it_cannot_read_is_refused(target):
    draft = quantize(target)
    encoded = target_encoded(target, 1)
    assert draft.encode_shared(encoded) is encoded
    assert shared_encoder.whole(draft, target).vocab_size == 64
    with pytest.raises(InputError, match="there are none"):
        draft.encode_shared(encoded.replace(cross=None))
    with pytest.raises(InputError, match="width 16, .* width is 24"):
        draft.encode_shared(encoded.replace(hidden=jnp.zeros((1, 4, 24))))
    with pytest.raises(InputError, match="not trained"):
        draft.encode_shared(encoded, dropout_key=jax.random.key(0))
    with pytest.raises(InputError, match="no encoder of its own"):
        draft.encode(jnp.zeros((1, 3), jnp.int32), jnp.ones((1, 3), bool))
    for model in (draft, draft_from_target(target, (), (0,))):
        with pytest.raises(InputError, match="so it is no target"):
            quantize(model)
