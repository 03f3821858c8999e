"""The loss against values computed by hand."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import losses

# One row, three positions, four ids; the last position is padding.
LOGITS = jnp.log(
    jnp.array([[[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]]])
)
TARGETS = jnp.array([[3, 1, 0]])
MASK = jnp.array([[True, True, False]])


def test_cross_entropy_by_hand():
    sums = losses.token_loss(LOGITS, TARGETS, MASK)
    expected = -math.log(0.4) - math.log(0.1)
    assert float(sums.loss) == pytest.approx(expected, rel=1e-6)
    assert float(sums.nll) == pytest.approx(expected, rel=1e-6)
    assert (float(sums.tokens), float(sums.correct)) == (2, 1)
    assert (float(sums.rows), float(sums.exact)) == (1, 0)


def test_label_smoothing_by_hand():
    sums = losses.token_loss(LOGITS, TARGETS, MASK, label_smoothing=0.2)
    laws = np.array([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1]])
    smoothed = 0.8 * np.eye(4)[[3, 1]] + 0.2 / 4
    assert float(sums.loss) == pytest.approx(-(smoothed * np.log(laws)).sum(), rel=1e-6)
    plain = -math.log(0.4) - math.log(0.1)
    assert float(sums.nll) == pytest.approx(plain, rel=1e-6)


def test_z_loss_by_hand():
    # Log normalisers of 0.5 and -2: the laws, and with them the rest, stay the same.
    shifted = LOGITS + jnp.array([0.5, -2.0, 7.0])[None, :, None]
    sums = losses.token_loss(shifted, TARGETS, MASK, label_smoothing=0.2, z_loss=0.1)
    plain = losses.token_loss(LOGITS, TARGETS, MASK, label_smoothing=0.2)
    assert float(sums.z_loss) == pytest.approx(0.1 * (0.25 + 4.0), rel=1e-5)
    assert float(sums.loss) == pytest.approx(float(plain.loss) + 0.425, rel=1e-5)
    assert float(sums.nll) == pytest.approx(float(plain.nll), rel=1e-5)
    assert float(plain.z_loss) == 0


def test_shift_of_logits_changes_nothing():
    shifted = losses.token_loss(LOGITS + 50.0, TARGETS, MASK, label_smoothing=0.1)
    plain = losses.token_loss(LOGITS, TARGETS, MASK, label_smoothing=0.1)
    assert float(shifted.loss) == pytest.approx(float(plain.loss), rel=1e-4)


def test_padding_weighs_nothing():
    garbage = LOGITS.at[0, 2].set(jnp.array([1e4, -1e4, 0.0, 3.0]))
    padded = losses.token_loss(garbage, TARGETS, MASK, label_smoothing=0.1)
    plain = losses.token_loss(LOGITS, TARGETS, MASK, label_smoothing=0.1)
    assert float(padded.loss) == float(plain.loss)
    counted = losses.token_loss(garbage, TARGETS, jnp.ones_like(MASK))
    assert float(counted.loss) != float(plain.loss)


def test_exact_rows_ignore_padding_and_filling_rows():
    logits = 10.0 * jnp.eye(4)[jnp.array([[3, 1, 2], [3, 0, 2], [0, 0, 0]])]
    targets = jnp.array([[3, 1, 0], [3, 1, 0], [0, 0, 0]])
    mask = jnp.array([[True, True, False], [True, True, False], [False] * 3])
    sums = losses.token_loss(logits, targets, mask)
    assert (float(sums.rows), float(sums.exact)) == (2, 1)


def test_shift_right():
    shifted = losses.shift_right(jnp.array([[5, 6, 1], [7, 1, 0]]))
    np.testing.assert_array_equal(shifted, [[0, 5, 6], [0, 7, 1]])
