"""Laws against a reference written anew, and draws against laws."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import InputError, Sampling
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import reference_law
from specjax.sampling import (
    check_sampling,
    draw,
    draw_law,
    fit_vocabulary,
    mask_dead_rows,
    residual,
    with_arrays,
)
from specjax.types import Law, Prefix
from tests.helpers import (
    quick_compile,  # noqa: F401
    row_keys,
)

VOCAB = 11


def random_logits(kind: str, shape=(6, 5)) -> jax.Array:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(*shape, VOCAB)) * 3
    if kind == "ties":
        logits = np.round(logits / 3)
    if kind == "holes":
        logits = np.where(generator.random(logits.shape) < 0.3, -np.inf, logits)
        logits[..., 4] = 0.0
    return jnp.asarray(logits, jnp.float32)


def law(logits, **settings) -> np.ndarray:
    return np.asarray(Sampling(**settings).law(logits).dense(VOCAB))


def expected(logits, **settings) -> np.ndarray:
    return np.apply_along_axis(lambda row: reference_law(row, **settings), -1, logits)


@pytest.mark.parametrize("kind", ["plain", "ties", "holes"])
def test_law_equals_the_reference(kind):
    logits = random_logits(kind)
    grid = itertools.product(
        (0.3, 1.0, 2.0), (None, 1, 3, VOCAB), (None, 0.11, 0.53, 0.97, 1.0), (None, 8)
    )
    for temperature, top_k, top_p, num_tokens in grid:
        settings = dict(
            temperature=temperature, top_k=top_k, top_p=top_p, num_tokens=num_tokens
        )
        got, wanted = law(logits, **settings), expected(logits, **settings)
        np.testing.assert_allclose(got, wanted, atol=2e-6, err_msg=str(settings))
        np.testing.assert_array_equal(got > 0, wanted > 0, err_msg=str(settings))


@pytest.mark.parametrize("kind", ["plain", "ties", "holes"])
def test_every_way_to_be_greedy_is_the_same(kind):
    """None, a traced 0, top-k of 1 and a tiny top-p: the lowest best id, exactly."""
    logits = random_logits(kind)
    greedy = law(logits, temperature=None)
    best = np.argmax(np.asarray(logits), axis=-1)
    np.testing.assert_array_equal(np.argmax(greedy, -1), best)
    np.testing.assert_array_equal(greedy.sum(-1), 1)
    for settings in (
        {"temperature": 0.0},
        {"temperature": 0.0, "top_k": 4, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 1},
        {"temperature": 2.0, "top_p": 1e-6},
    ):
        np.testing.assert_array_equal(law(logits, **settings), greedy, str(settings))
    assert Sampling(temperature=None).law(logits).ids.shape[-1] == 1


def test_nearly_equal_logits_at_high_temperature():
    """Two logits one ulp apart stay apart under top-k."""
    high = np.nextafter(np.float32(1), np.float32(2))
    logits = jnp.zeros((1, 1, VOCAB)).at[0, 0, :2].set(jnp.array([1.0, high]))
    got = law(logits, temperature=3.0, top_k=1)
    np.testing.assert_array_equal(got[0, 0], np.eye(VOCAB)[1])


def test_small_temperatures_stay_finite():
    logits = jnp.full((1, 1, VOCAB), -jnp.inf)
    logits = logits.at[0, 0, :3].set(jnp.array([50.0, 100.0, 3.0]))
    for temperature in (1e-3, 1e-20, 1e-38):
        got = law(logits, temperature=temperature)
        np.testing.assert_array_equal(got[0, 0], np.eye(VOCAB)[1], str(temperature))


def test_top_p_of_one_is_off():
    """Rounding in the running sum must not cut the tail of a large vocabulary."""
    logits = jax.random.normal(jax.random.key(0), (1, 1, 32128)) * 3
    rows = Sampling(top_p=jnp.array([1.0, 0.5])).law(jnp.repeat(logits, 2, 0)).probs
    np.testing.assert_array_equal(rows[0], Sampling().law(logits).probs[0])
    assert (rows[0] > 0).all() and (rows[1] == 0).sum() > 16000


def test_settings_by_row():
    logits = random_logits("plain")
    settings = [(0.0, 3, 0.9), (0.5, 1, 1.0), (1.0, VOCAB, 0.4), (2.0, 4, 0.8)]
    settings += [(1.0, 10**6, 1.0), (0.3, 2, 0.99)]
    temperature, top_k, top_p = (jnp.array(x) for x in zip(*settings, strict=True))
    got = law(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    for row, (t, k, p) in enumerate(settings):
        wanted = expected(logits[row], temperature=t, top_k=k, top_p=p)
        np.testing.assert_allclose(got[row], wanted, atol=2e-6)


def test_order_of_transforms():
    """Controls, temperature, top-k, top-p; this p tells each order apart."""
    p = np.array([0.4, 0.3, 0.2, 0.1])
    logits = jnp.asarray(np.log(p), jnp.float32)[None, None]

    def one(**settings) -> np.ndarray:
        return np.asarray(Sampling(**settings).law(logits, prefix).dense(4))[0, 0]

    prefix = Prefix(tokens=jnp.zeros((1, 3), jnp.int32), length=jnp.ones((1, 1), int))
    # top-k first: of (4/7, 3/7) the first alone reaches .5; of p itself it does not.
    np.testing.assert_array_equal(one(top_k=2, top_p=0.5) > 0, [1, 0, 0, 0])
    np.testing.assert_array_equal(one(top_p=0.5) > 0, [1, 1, 0, 0])
    # temperature before top-p: flattened, .45 needs two ids.
    np.testing.assert_array_equal(one(temperature=9.0, top_p=0.45) > 0, [1, 1, 0, 0])
    np.testing.assert_array_equal(one(top_p=0.35) > 0, [1, 0, 0, 0])
    # controls before everything: the best id is banned, so top-k keeps others.
    banned = (lambda logits, tokens, length: logits.at[0].set(-jnp.inf),)
    got = one(controls=banned, top_k=2)
    np.testing.assert_allclose(got, [0, 0.6, 0.4, 0], atol=1e-6)


def test_controls_see_each_position_and_its_own_prefix():
    def bump(logits, tokens, length):
        last = tokens[length - 1]
        return logits.at[last].add(100.0)

    prefix = Prefix(
        tokens=jnp.array([[1, 2, 3, 4], [5, 6, 7, 8]], jnp.int32),
        length=jnp.array([[1, 2], [2, 4]], jnp.int32),
    )
    sampling = Sampling(temperature=None, controls=(bump,))
    got = sampling.law(jnp.zeros((2, 2, VOCAB)), prefix).ids[..., 0]
    np.testing.assert_array_equal(got, [[1, 2], [6, 8]])
    with pytest.raises(InputError, match="controls read the prefix"):
        sampling.law(jnp.zeros((2, 2, VOCAB)))


def test_dead_rows():
    logits = jnp.zeros((1, 1, VOCAB)).at[..., 9].set(50.0)
    for settings in ({"temperature": None}, {}, {"top_k": 3}, {"top_p": 0.9}):
        got = law(logits, num_tokens=9, **settings)
        assert (got[..., 9:] == 0).all() and np.isclose(got.sum(), 1)
    np.testing.assert_array_equal(law(logits, temperature=None)[0, 0].argmax(), 9)
    np.testing.assert_array_equal(
        mask_dead_rows(jnp.zeros(3), 2), jnp.array([0, 0, -jnp.inf])
    )


def test_fit_vocabulary():
    logits = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_array_equal(fit_vocabulary(logits, 2), logits[:, :2])
    padded = fit_vocabulary(logits, 5)
    np.testing.assert_array_equal(padded[:, :3], logits)
    assert (padded[:, 3:] == -jnp.inf).all()
    assert Sampling().law(padded[None]).probs[0, :, 3:].sum() == 0


def test_draw_follows_its_weights():
    """Weights need not sum to 1; id 0 is drawn like any other; weight 0 never is."""
    weights = jnp.array([0.8, 0.0, 0.4, 2.0, 0.0])
    drawn = jax.vmap(lambda key: draw(key, weights))(row_keys(0, 200_000))
    p = np.asarray(weights) / 3.2
    assert chi_square_p(np.asarray(drawn)[:, None], p) > 1e-3
    assert chi_square_p(np.asarray(drawn)[:, None], np.roll(p, 1)) == 0
    only = jnp.zeros(32128).at[31000].set(1e-30)
    drawn = jax.vmap(lambda key: draw(key, only))(row_keys(1, 50))
    assert (drawn == 31000).all()


def test_draw_is_the_gumbel_argmax():
    """Over a large vocabulary with probabilities of every size."""
    weights = jax.nn.softmax(jax.random.normal(jax.random.key(1), (32128,)) * 8)
    keys = jax.random.split(jax.random.key(0), 300)
    drawn = jax.vmap(draw, in_axes=(0, None))(keys, weights)
    bits = jax.vmap(lambda key: jax.random.bits(key, weights.shape, jnp.uint32))(keys)
    passed = (np.asarray(bits, np.float64) + 0.5) / 2**32
    noise = -np.log(-np.log1p(-passed))
    expected = np.argmax(np.log(np.asarray(weights, np.float64))[None] + noise, axis=-1)
    assert (drawn == expected).all() and len(np.unique(drawn)) > 20


@pytest.mark.slow
def test_a_long_tail_of_rare_ids_is_drawn_as_often_as_it_should():
    """Two hundred thousand ids of 3e-8 each, which a clock of 23 bits would lose."""
    size, share = 200_000, 0.006
    weights = jnp.full(size, share / (size - 8)).at[:8].set((1 - share) / 8)

    @functools.partial(jax.jit, static_argnums=1)
    def rare(keys, clocks):
        if clocks == "ours":
            return jnp.sum(jax.vmap(draw, in_axes=(0, None))(keys, weights) >= 8)
        coarse = jax.vmap(lambda key: jax.random.uniform(key, weights.shape))(keys)
        return jnp.sum(jnp.argmax(weights[None] / -jnp.log(coarse), axis=-1) >= 8)

    drawn = {
        clocks: sum(int(rare(row_keys(seed, 50), clocks)) for seed in range(20))
        for clocks in ("ours", "coarse")
    }
    expected = 20 * 50 * share  # 6
    assert expected / 2 < drawn["ours"] < 2 * expected, drawn
    assert drawn["coarse"] < expected / 4, drawn  # the twin that is caught


def test_draw_never_leaves_the_support():
    """Where every weight but one is 0, even if that one is as small as can be."""
    tiny = jnp.finfo(jnp.float32).tiny
    for weight in (tiny, 1e-30, 1.0, 1e30):
        weights = jnp.zeros(5).at[3].set(weight)
        keys = jax.random.split(jax.random.key(0), 50)
        assert (jax.vmap(draw, in_axes=(0, None))(keys, weights) == 3).all(), weight


def test_draw_law_of_one_hot_ignores_the_key():
    point = Law(probs=jnp.ones((2, 1)), ids=jnp.array([[3], [1]], jnp.int32))
    dense = Law(probs=point.dense(5))
    for row, token in enumerate((3, 1)):
        for seed in range(3):
            key = jax.random.key(seed)
            assert draw_law(key, point, row, 5) == token
            assert draw_law(key, dense, row, 5) == token


def test_residual_by_hand():
    p, q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.5, 0.3])
    weights = residual(p, q)
    np.testing.assert_allclose(weights / weights.sum(), [1, 0, 0], atol=1e-7)
    # A softmax of what is positive already is another law.
    assert jax.nn.softmax(weights)[1] > 0.2
    np.testing.assert_array_equal(residual(p, p), p)
    np.testing.assert_array_equal(residual(p, jnp.zeros(3)), p)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": 2.5}, "top_k is 2.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.5}, "top_p is 1.5"),
        ({"num_tokens": 0}, "num_tokens is 0"),
        ({"temperature": jnp.ones(3)}, "temperature has shape"),
        ({"top_k": jnp.ones((2, 1), jnp.int32)}, "top_k has shape"),
        ({"top_p": jnp.array([0.5, 0.0])}, "top_p is"),
    ],
)
def test_refusals(settings, named):
    with pytest.raises(InputError, match=rf"sampling\.{named}"):
        check_sampling(Sampling(**settings), "sampling", 2)


def test_what_is_allowed():
    check_sampling(Sampling(temperature=0.0, top_k=1, top_p=1.0), "sampling", 2)
    rows = Sampling(temperature=jnp.array([0.0, 2.0]), top_k=jnp.array([1, 10**6]))
    check_sampling(rows, "sampling", 2)
    fixed = with_arrays(Sampling(temperature=1, top_k=3))
    assert fixed.temperature.dtype == jnp.float32 and fixed.top_k.dtype == jnp.int32
    assert fixed.top_p is None and with_arrays(Sampling(temperature=None)).greedy
