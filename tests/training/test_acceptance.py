"""The head that predicts acceptance: its labels, its loss, and that it learns."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import Sampling
from specjax.drafters import files
from specjax.drafters.acceptance_head import AcceptanceHead, head_inputs
from specjax.errors import InputError
from specjax.training import acceptance
from specjax.training.draft_init import draft_from_target
from tests.helpers import (
    perturbed,
    quick_compile,  # noqa: F401
    tiny_t5,
)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_examples_are_what_decoding_meets(shared):
    """Inputs and acceptance of both models' own passes, at every place of a text."""
    target = tiny_t5(0)
    draft = perturbed(
        draft_from_target(target, (), (0, 1)) if shared else target, 1, 0.3
    )
    generator = np.random.default_rng(0)
    inputs = jnp.asarray(generator.integers(2, 64, (2, 5)), jnp.int32)
    mask = jnp.array([[True] * 5, [True] * 3 + [False] * 2])
    fed = jnp.asarray(generator.integers(2, 64, (2, 4)), jnp.int32).at[:, 0].set(0)
    encoded = target.encode(inputs, mask)
    own = draft.encode_shared(encoded) if shared else draft.encode(inputs, mask)
    p, _ = target.decode(fed, None, encoded)
    q, _ = draft.decode(fed, None, own, taps=(-1,))
    p, soft = jax.nn.softmax(p.logits), jax.nn.softmax(q.logits)
    made = acceptance.acceptance_examples(
        target, draft, inputs, mask, fed, Sampling(temperature=1.0)
    )
    np.testing.assert_allclose(made.acceptance, np.minimum(p, soft).sum(-1), atol=1e-5)
    assert 0.05 < made.acceptance.min() < made.acceptance.max() < 0.99
    np.testing.assert_allclose(made.inputs[..., :-2], q.features[0], atol=1e-5)
    np.testing.assert_allclose(made.inputs[..., -2], np.log(soft.max(-1)), atol=1e-5)
    entropy = -np.sum(soft * np.log(soft), axis=-1)
    np.testing.assert_allclose(made.inputs[..., -1], -entropy, atol=1e-4)
    # Greedily a token is accepted or not; how sure the draft is stays what it was.
    greedy = acceptance.acceptance_examples(
        target, draft, inputs, mask, fed, Sampling(temperature=None)
    )
    same = p.argmax(-1) == soft.argmax(-1)
    np.testing.assert_array_equal(greedy.acceptance, same.astype(np.float32))
    np.testing.assert_allclose(greedy.inputs, made.inputs, atol=1e-5)


def test_loss_by_hand():
    p, q = jnp.array([[0.1, 0.6, 0.3]]), jnp.array([[0.5, 0.3, 0.2]])
    assert acceptance.acceptance(p, q).tolist() == pytest.approx([0.6])
    head = AcceptanceHead.create(
        None, {"features": 1, "hidden": 2, "draft": ""}, jax.random.key(0)
    ).replace(outer_bias=jnp.array(np.log(4.0), jnp.float32))  # it says 0.8
    inputs = head_inputs(jnp.ones((1, 1)), q)
    loss = acceptance.acceptance_loss(head, inputs, p, q)
    wanted = -0.6 * np.log(0.8) - 0.4 * np.log(0.2)
    np.testing.assert_allclose(loss, [wanted], rtol=1e-5)
    # It is least where the head says what is true.
    right = head.replace(outer_bias=jnp.array(np.log(1.5), jnp.float32))
    assert acceptance.acceptance_loss(right, inputs, p, q)[0] < loss[0]


def test_it_learns_and_is_kept(tmp_path, standard_promotion):
    generator = np.random.default_rng(0)
    hidden = generator.normal(3.0, 5.0, (4000, 3))
    sure = generator.uniform(0.2, 1, 4000)
    score = (hidden[:, 0] - 3) / 5 + 2 * np.log(sure) + 1
    wanted = 1 / (1 + np.exp(-2 * score))
    inputs = np.concatenate([hidden, np.log(sure)[:, None], np.zeros((4000, 1))], 1)
    inputs, wanted = jnp.asarray(inputs, jnp.float32), jnp.asarray(wanted, jnp.float32)
    head = acceptance.fit_head(
        inputs[:3000], wanted[:3000], jax.random.key(0), steps=400, draft="d" * 64
    )

    def loss(logits):
        return float(jnp.mean(acceptance.cross_entropy(logits, wanted[3000:])))

    mean = jnp.mean(wanted)
    constant = loss(jnp.full(1000, jnp.log(mean / (1 - mean))))
    least = loss(jax.scipy.special.logit(wanted[3000:]))
    assert loss(head.logits(inputs[3000:])) < least + 0.3 * (constant - least)
    files.save_drafter(head, tmp_path, "t" * 64)
    read = files.load_drafter(AcceptanceHead, tmp_path, None, "t" * 64, "float32")
    assert read.draft == "d" * 64
    np.testing.assert_allclose(read.logits(inputs), head.logits(inputs), atol=0.05)


def test_what_means_nothing_is_refused():
    key, nothing = jax.random.key(0), jnp.zeros((0, 4))
    with pytest.raises(InputError, match="0 places"):
        acceptance.fit_head(nothing, jnp.zeros(0), key)
    for settings, sentence in (
        ({"features": 0, "hidden": 2, "draft": ""}, "features of an acceptance head"),
        ({"features": 2, "hidden": 1.5, "draft": ""}, "hidden of an acceptance head"),
        ({"features": 2}, "it takes features, hidden and draft"),
    ):
        with pytest.raises(InputError, match=sentence):
            AcceptanceHead.create(None, settings, key)
