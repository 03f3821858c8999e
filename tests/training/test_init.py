"""The laws of mimetic initialisation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import errors
from specjax.models import t5, t5_config
from specjax.training import alignment, init

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


def shuffled_code(rows: int = 400, seed: int = 0) -> list[tuple[list[int], list[int]]]:
    """Sources of ids 2 .. 19, whose targets have each id + 20, in another order."""
    generator = np.random.default_rng(seed)
    sources = [
        generator.choice(np.arange(2, 20), 5, replace=False) for _ in range(rows)
    ]
    return [(s.tolist(), (generator.permutation(s) + 20).tolist()) for s in sources]


@pytest.fixture(scope="module")
def links() -> alignment.Links:
    return alignment.align(shuffled_code(), 40)


def test_alignment_finds_a_code(links):
    for target in range(22, 40):
        own = links.target == target
        share = links.count[own] / links.count[own].sum()
        best = np.argmax(share)
        assert links.source[own][best] == target - 20 and share[best] > 0.9
        assert links.count[own].sum() == pytest.approx(
            links.target_count[target], abs=0.1
        )
    assert links.source_count[:20].sum() == links.target_count[20:].sum() == 2000
    # One round of counting sees no more than that all five are as likely.
    once = alignment.align(shuffled_code(), 40, iterations=1)
    own = once.target == 22
    assert once.count[own].max() / once.count[own].sum() < 0.5


def test_alignment_leaves_out_what_is_long():
    short, long = ([2, 3], [22, 23]), ([4] * 30, [24] * 30)
    links = alignment.align([short, long], 40)
    assert set(links.target) == {22, 23}
    with pytest.raises(errors.InputError, match="24 tokens or fewer"):
        alignment.align([long], 40)


def test_dictionary_init(models, links):
    plain, mimetic = models
    model = init.dictionary_init(plain, links, jax.random.key(3))
    table, before = (np.asarray(m.embedding[...]) for m in (model, plain))
    size = np.linalg.norm(before, axis=1)
    np.testing.assert_allclose(np.linalg.norm(table, axis=1), size, rtol=1e-5)
    # Sources, and what was never seen, stay; targets are near what they translate.
    np.testing.assert_allclose(table[:20], before[:20], rtol=1e-5)
    np.testing.assert_allclose(table[20:22], before[20:22], rtol=1e-5)
    unit = table / size[:, None]
    for target in range(22, 40):
        assert np.argmax(unit[:22] @ unit[target]) == target - 20
        assert 0.8 < unit[target - 20] @ unit[target] < 0.99
    # The head writes targets alone; the attentions are those of mimetic_init.
    head = np.asarray(model.head[...])
    assert (head[:22] == 0).all()
    np.testing.assert_allclose(head[22:], table[22:] * 32**-0.5, rtol=1e-5, atol=1e-7)
    for ours, theirs in zip(*map(attentions, (model, mimetic)), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(plain.embedding[...], before)


def test_a_piece_of_both_languages_is_in_between(models, links):
    both = np.array(links.target_count)
    both[2:20] = links.source_count[2:20]  # as often a target, which nothing explains
    mixed = init.dictionary_init(
        models[0],
        alignment.Links(
            np.append(links.source, 5),
            np.append(links.target, 2),
            np.append(links.count, 50.0),
            links.source_count,
            both,
        ),
        jax.random.key(3),
    )
    table = np.asarray(mixed.embedding[...])
    unit = table / np.linalg.norm(table, axis=1, keepdims=True)
    plain = np.asarray(models[0].embedding[...])
    plain = plain / np.linalg.norm(plain, axis=1, keepdims=True)
    assert 0.5 < unit[2] @ plain[2] < 0.9 and unit[2] @ plain[5] > 0.4
