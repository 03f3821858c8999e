"""Drafting a block in one pass against drafting token by token."""

import doctest

import numpy as np
import pytest

from specjax import theory, theory_blocks


def test_doctests():
    failed, tried = doctest.testmod(theory_blocks)
    assert failed == 0
    assert tried >= 8


# alpha, c; speedups with the best gamma up to 16: token by token, then in one pass of
# which acceptance falls by a factor of 1, 0.9, 0.8, 0.7 from slot to slot.
ONE_PASS = [
    (0.60, 0.02, 2.17, (2.45, 2.15, 2.00, 1.91)),
    (0.60, 0.33, 1.20, (1.88, 1.65, 1.54, 1.46)),
    (0.75, 0.10, 2.19, (3.61, 2.61, 2.30, 2.12)),
]


@pytest.mark.parametrize("alpha, c, one_by_one, one_pass", ONE_PASS)
def test_one_pass_against_token_by_token(alpha, c, one_by_one, one_pass):
    gammas = range(1, 17)
    chains = [theory.iid_survival(alpha, gamma) for gamma in gammas]
    speeds = [theory.speedup_from_survival(chain, c) for chain in chains]
    assert f"{max(speeds):.2f}" == f"{one_by_one:.2f}"
    best = chains[int(np.argmax(speeds))]
    for decay, wanted in zip((1.0, 0.9, 0.8, 0.7), one_pass, strict=True):
        blocks = [
            theory_blocks.decaying_survival(alpha, decay, gamma) for gamma in gammas
        ]
        gain = max(theory_blocks.one_pass_gain(block, best, c, c) for block in blocks)
        assert gain * max(speeds) == pytest.approx(wanted, abs=0.005)
    # Where both draft one token in the same pass, they break even.
    one = theory.iid_survival(alpha, 1)
    assert theory_blocks.one_pass_gain(one, one, c, c, 1.3) == pytest.approx(1)
    assert theory_blocks.one_pass_gain(one, one, c, c, 1.3, 2.6) > 1.5


@pytest.mark.parametrize("alpha, gamma, c", [(0.9, 7, 0.3), (0.6, 4, 0.1)])
def test_at_the_break_even_decay_both_ways_are_as_fast(alpha, gamma, c):
    """And on either side of it, the one or the other."""
    v, chain = 1.4, theory.iid_survival(alpha, 3)
    other = theory.speedup_from_survival(chain, c, v)
    decay = theory_blocks.break_even_decay(alpha, gamma, c, v, other)
    assert 0.1 < decay < 0.95
    for shift in (-0.05, 0.0, 0.05):
        block = theory_blocks.decaying_survival(alpha, decay + shift, gamma)
        gain = theory_blocks.one_pass_gain(block, chain, c, c, v)
        if shift:
            assert (gain > 1) == (shift > 0)
        else:
            assert gain == pytest.approx(1)


def test_decays_that_no_slots_have():
    assert theory_blocks.decay_of(0.75, 0.75, 7) == pytest.approx(0, abs=1e-9)
    assert theory_blocks.decay_of(0.75, theory.iid_survival(0.75, 7).sum(), 7) == 1
    assert theory_blocks.break_even_decay(0.75, 7, 0.1, 1.0, 4.0) == np.inf
    assert theory_blocks.break_even_decay(0.75, 7, 0.1, 1.0, 0.1) == 0
    with pytest.raises(ValueError, match="accepted"):
        theory_blocks.decay_of(0.75, -1, 7)


def test_one_pass_refuses_what_is_no_survival():
    with pytest.raises(ValueError, match="survival"):
        theory_blocks.one_pass_gain([0.5, 0.6], [0.5], 0.1, 0.1)
    with pytest.raises(ValueError, match="decay"):
        theory_blocks.decaying_survival(0.5, 1.5, 3)
