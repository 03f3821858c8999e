"""Lenience's acceptance and the entropy term, from laws alone."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import metrics, theory_laws
from specjax.types import Law


def laws(seed, rows=6, tokens=5):
    return np.random.default_rng(seed).dirichlet(np.full(tokens, 0.7), size=rows)


def test_doctests():
    failed, tried = doctest.testmod(theory_laws)
    assert failed == 0
    assert tried >= 5


def test_at_one_it_is_the_overlap_that_is_measured():
    p, q = laws(0), laws(1)
    ours = theory_laws.lenient_acceptance(p, q, 1.0)
    measured = metrics.overlap(Law(jnp.asarray(p)), Law(jnp.asarray(q)))
    assert ours == pytest.approx(np.asarray(measured), abs=1e-6)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_acceptance_by_chance_of_each_draft(lenience):
    """Drawn from q, a token stands with probability min(1, p / (lenience q))."""
    p, q = laws(2), laws(3)
    by_token = (q * np.minimum(1, p / (lenience * q))).sum(-1)
    ours = theory_laws.lenient_acceptance(p, q, lenience)
    assert ours == pytest.approx(by_token, rel=1e-12)
    # Relaxing q, not p, is what the paper's table needs: this would change nothing.
    if lenience < 1:
        assert np.all(ours > np.minimum(p, q).sum(-1))
        assert np.all(ours <= 1)


def test_greedy_lenience():
    p = np.array([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3]])
    drafted = np.array([1, 2])
    stands = [
        theory_laws.lenient_greedy_acceptance(p, drafted, lenience).tolist()
        for lenience in (1.0, 0.55, 0.45)
    ]
    assert stands == [[False, False], [False, True], [True, True]]
    assert theory_laws.lenient_greedy_acceptance(p, p.argmax(-1), 1.0).all()


def test_entropy_term_of_a_uniform_law():
    """Over k tokens mu = log k and mu_2 = (log k)^2: log P / log k + log P."""
    for k in (2, 7):
        mu = np.log(k)
        term = theory_laws.entropy_leading_term(mu, mu**2, np.array([1, 64]))
        assert term == pytest.approx([0.0, np.log(64) * (1 / mu + 1)])
    # More uncertain, fewer tokens.
    few, many = (theory_laws.entropy_leading_term(mu, 2 * mu**2, 64) for mu in (2, 1))
    assert few < many


@pytest.mark.parametrize(
    "call, named",
    [
        (lambda: theory_laws.lenient_acceptance(laws(0), laws(1), 0.0), "lenience"),
        (lambda: theory_laws.lenient_acceptance(laws(0), laws(1), 1.5), "lenience"),
        (lambda: theory_laws.lenient_acceptance(laws(0) * 2, laws(1), 0.5), "p "),
        (lambda: theory_laws.lenient_acceptance(laws(0), laws(1) / 2, 0.5), "q sums"),
        (lambda: theory_laws.lenient_acceptance(np.array(0.5), laws(1), 1), "p is"),
        (
            lambda: theory_laws.lenient_acceptance(laws(0), laws(1, tokens=4), 0.5),
            "q has 4",
        ),
        (
            lambda: theory_laws.lenient_greedy_acceptance(laws(0, 1), np.array([5]), 1),
            "drafted",
        ),
        (lambda: theory_laws.lenient_greedy_acceptance(laws(0), 1, 1), "drafted has"),
        (
            lambda: theory_laws.lenient_greedy_acceptance(laws(0, 1), np.ones(1), 1),
            "drafted is",
        ),
        (lambda: theory_laws.entropy_leading_term(0.0, 1.0, 8), "entropy"),
        (lambda: theory_laws.entropy_leading_term(2.0, 3.9, 8), "log_moment"),
        (lambda: theory_laws.entropy_leading_term(2.0, 4.0, 0.5), "budget"),
    ],
)
def test_what_cannot_be_is_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_laws_of_float32_rows_are_laws():
    p = np.asarray(jax.nn.softmax(jnp.arange(4000, dtype=jnp.float32) * 1e-3))
    assert theory_laws.lenient_acceptance(p, p, 1.0) == pytest.approx(1, abs=1e-5)
