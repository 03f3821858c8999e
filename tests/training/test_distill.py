"""Each divergence by hand, its gradient, and where it is least."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import errors
from specjax.training import distill

P = np.array([0.5, 0.3, 0.2, 0.0])
Q = np.array([0.25, 0.25, 0.4, 0.1])
TEXT = jnp.zeros((1, 1), jnp.int32)  # only "sequence" reads it
ALPHA = 0.25 + 0.25 + 0.2
FORWARD = 0.5 * np.log(2) + 0.3 * np.log(1.2) + 0.2 * np.log(0.5)


def jsd(beta: float) -> float:
    m = beta * P + (1 - beta) * Q
    real = P > 0
    forward = np.sum(P[real] * np.log(P[real] / m[real]))
    return beta * forward + (1 - beta) * np.sum(Q * np.log(Q / m))


WEIGHT = np.exp(-3 * ALPHA)
BY_HAND = {
    "forward_kl": FORWARD,
    "jsd": jsd(0.5),
    "total_variation": 1 - ALPHA,
    "lk": -np.log(ALPHA),
    "lk_hybrid": WEIGHT * FORWARD + (1 - WEIGHT) * (1 - ALPHA),
}


def logits_of(law) -> jax.Array:
    """Far below all others where the law is 0, and not normalised."""
    law = np.asarray(law)
    logs = np.where(law > 0, np.log(np.maximum(law, 1e-30)), -200.0) + 3.0
    return jnp.asarray(logs, jnp.float32)[None, None]


def loss_of(p, q, **settings) -> distill.DistillLoss:
    divergence = distill.Divergence(**settings)
    mask = jnp.ones((1, 1), bool)
    return distill.distill_loss(logits_of(p), logits_of(q), TEXT, mask, divergence)


@pytest.mark.parametrize("name", BY_HAND)
def test_by_hand(name):
    got = loss_of(P, Q, name=name)
    assert got.loss == pytest.approx(BY_HAND[name], rel=1e-5)
    assert got.alpha == pytest.approx(ALPHA, rel=1e-5) and got.tokens == 1


def test_reverse_kl_and_the_mixtures_weight():
    assert loss_of(Q, P, name="reverse_kl").loss == pytest.approx(FORWARD, rel=1e-5)
    assert loss_of(P, Q, name="jsd", beta=0.1).loss == pytest.approx(jsd(0.1), rel=1e-4)


DIVERGENCES = [name for name in distill.NAMES if name != distill.SEQUENCE]


def test_sequence_level_is_the_cross_entropy_of_the_text():
    text = jnp.array([[2]])
    mask = jnp.ones((1, 1), bool)
    how = distill.Divergence(name=distill.SEQUENCE)
    got = distill.distill_loss(logits_of(P), logits_of(Q), text, mask, how)
    assert got.loss == pytest.approx(-np.log(Q[2]), rel=1e-5)
    assert got.alpha == pytest.approx(ALPHA, rel=1e-5)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_least_where_the_laws_are_equal(name):
    """Zero there, with no gradient; a step down it from elsewhere raises alpha."""
    same = loss_of(Q, Q, name=name)
    assert same.loss == pytest.approx(0.0, abs=1e-5)
    assert same.alpha == pytest.approx(1.0, abs=1e-5)

    def loss(logits, target=P):
        mask = jnp.ones((1, 1), bool)
        out = distill.distill_loss(
            logits_of(target), logits, TEXT, mask, distill.Divergence(name=name)
        )
        return out.loss, out.alpha

    (_, alpha), slope = jax.value_and_grad(loss, has_aux=True)(logits_of(Q))
    assert float(jnp.abs(slope).max()) > 0.01
    _, better = loss(logits_of(Q) - 0.05 * slope)
    assert better > alpha


def test_direct_gradients():
    """Total variation's gradient over alpha is lk's: of a law far off, far larger."""
    far = np.array([0.01, 0.01, 0.01, 0.97])

    def slope(name):
        def loss(logits):
            mask = jnp.ones((1, 1), bool)
            how = distill.Divergence(name=name)
            return distill.distill_loss(logits_of(P), logits, TEXT, mask, how).loss

        return jax.grad(loss)(logits_of(far))

    np.testing.assert_allclose(
        slope("lk"), slope("total_variation") / 0.03, rtol=1e-3, atol=1e-6
    )


def test_no_gradient_reaches_the_target():
    def loss(logits):
        mask = jnp.ones((1, 1), bool)
        return distill.distill_loss(
            logits, logits_of(Q), TEXT, mask, distill.Divergence("jsd")
        ).loss

    assert (jax.grad(loss)(logits_of(P)) == 0).all()


def test_masks_temperatures_and_padding_of_the_vocabulary():
    p = jnp.concatenate([logits_of(P), logits_of(Q)], axis=1)
    q = jnp.concatenate([logits_of(Q), logits_of(P)], axis=1)
    mask, text = jnp.array([[True, False]]), jnp.zeros((1, 2), jnp.int32)
    how = distill.Divergence("total_variation")
    only = distill.distill_loss(p, q, text, mask, how)
    assert only.tokens == 1 and only.loss == pytest.approx(1 - ALPHA, rel=1e-5)
    # The draft has two rows more, which are nobody's.
    wide = jnp.pad(q, ((0, 0), (0, 0), (0, 2)), constant_values=50.0)
    same = distill.distill_loss(p, wide, text, mask, how)
    assert same.loss == pytest.approx(float(only.loss))
    # Twice the temperature is the square root of the law, normalised.
    root = np.sqrt(Q) / np.sqrt(Q).sum()
    warm = loss_of(root, Q, name="forward_kl", draft_temperature=2.0)
    assert warm.loss == pytest.approx(0.0, abs=1e-5)
    cold = loss_of(Q, root, name="forward_kl", target_temperature=2.0)
    assert cold.loss == pytest.approx(0.0, abs=1e-5)
    # What is accepted is drawn at temperature 1.
    assert warm.alpha == pytest.approx(np.minimum(root, Q).sum(), rel=1e-5)
    assert cold.alpha == pytest.approx(np.minimum(root, Q).sum(), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "kl"}, "d.name is 'kl': it must be one of forward_kl"),
        ({"beta": 1.0}, "d.beta is 1.0"),
        ({"decay": -1.0}, "d.decay is -1.0"),
        ({"decay": float("inf"), "name": "lk_hybrid"}, "d.decay is inf: a number"),
        ({"target_temperature": float("inf")}, "d.target_temperature is inf: a numb"),
        ({"beta": 0.3}, "d.beta is 0.3, and d.name forward_kl does not read it"),
        ({"decay": 1.0, "name": "jsd"}, "d.decay is 1.0, and d.name jsd does not"),
        (
            {"target_temperature": 2.0, "name": "sequence"},
            "d.target_temperature is 2.0, and d.name sequence does not read it",
        ),
        ({"draft_temperature": 0.0}, "d.draft_temperature is 0.0: a number above 0"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(errors.InputError, match=message):
        distill.check_divergence(distill.Divergence(**settings), "d")
