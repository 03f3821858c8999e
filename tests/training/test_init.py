"""The laws of mimetic initialisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import errors
from specjax.models import t5, t5_config
from specjax.training import init

CONFIG = t5_config.T5Config(
    vocab_size=40,
    d_model=32,
    d_kv=8,
    num_heads=4,
    d_ff=32,
    num_encoder_layers=2,
    num_decoder_layers=2,
    dropout_rate=0.0,
)


@pytest.fixture(scope="module")
def models() -> tuple[t5.T5, t5.T5]:
    plain = t5.T5(CONFIG, jax.random.key(0))
    return plain, init.mimetic_init(plain)


def attentions(model: t5.T5):
    """(q, k, v, o) of each attention."""
    for block in (*model.encoder, *model.decoder):
        yield (*block.attention.qkv[...], block.attention.out[...])
    for block in model.decoder:
        yield (block.cross.q[...], *block.cross.kv[...], block.cross.out[...])


def test_attention_laws(models):
    for (_, k0, v0, _), (q, k, v, o) in zip(*map(attentions, models), strict=True):
        np.testing.assert_array_equal(o, v.T)
        np.testing.assert_allclose(q, 1.5 * k / np.sqrt(CONFIG.d_kv), rtol=1e-6)
        np.testing.assert_array_equal(k, k0)
        np.testing.assert_array_equal(v, v0)


def test_the_model_given_is_unchanged(models):
    again = t5.T5(CONFIG, jax.random.key(0))
    for old, new in zip(jax.tree.leaves(models[0]), jax.tree.leaves(again)):  # noqa: B905
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize(
    ("side", "head", "offsets", "strength"),
    [
        ("encoder", 0, (-1,), 5.0),
        ("encoder", 1, (1,), 5.0),
        ("encoder", 2, (-1, 1), 3.0),
        ("encoder", 3, (), 0.0),
        ("decoder", 0, (-1,), 5.0),
        ("decoder", 1, (-2,), 5.0),
        ("decoder", 2, (-1, 0), 3.0),
        ("decoder", 3, (), 0.0),
    ],
)
def test_bias_by_offset(models, side, head, offsets, strength):
    table = getattr(models[1], side)[0].attention.bias[...]
    around = np.arange(-6, 7 if side == "encoder" else 1)
    buckets = t5.relative_position_bucket(around, bidirectional=side == "encoder")
    expected = np.where(np.isin(around, offsets), strength, 0.0)
    np.testing.assert_array_equal(np.asarray(table)[buckets, head], expected)


def test_head_starts_from_the_embedding(models):
    model = models[1]
    expected = model.embedding[...] * CONFIG.d_model**-0.5
    np.testing.assert_allclose(model.head[...], expected, rtol=1e-6)


def cross_hits(model: t5.T5) -> float:
    """How often the first cross-attention looks hardest at a source token's like."""
    tokens = jax.random.permutation(jax.random.key(1), 40)[None, :16]
    x = model.embedding[...][tokens]
    block = model.decoder[0].cross
    norm = block.norm(x)[0]
    heads = (-1, CONFIG.num_heads, CONFIG.d_kv)
    q = (norm @ block.q[...].T).reshape(heads)
    k = (norm @ block.kv[...][0].T).reshape(heads)
    scores = jnp.einsum("thk,lhk->htl", q, k)
    return float(jnp.mean(jnp.argmax(scores, -1) == jnp.arange(16)[None]))


def test_a_token_looks_for_its_like(models):
    plain, aligned = map(cross_hits, models)
    assert aligned > 0.7
    assert plain < 0.3


def test_too_few_heads_is_an_error():
    few = t5_config.T5Config(8, 8, 4, 2, 8, 1, 1)
    with pytest.raises(errors.InputError, match="num_heads >= 4"):
        init.mimetic_init(t5.T5(few, jax.random.key(0)))
