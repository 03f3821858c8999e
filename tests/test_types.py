"""Laws read alike in every form; no two uses of noise share a key."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding
from specjax.types import Law, Noise
from specjax.verify import Verifier, token_verify
from tests.helpers import row_keys


@pytest.fixture
def forms() -> tuple[Law, Law]:
    """The same laws over 7 ids, sparse and dense; ids may be unsorted."""
    generator = np.random.default_rng(0)
    ids = np.stack([generator.permutation(7)[:3] for _ in range(8)]).reshape(2, 4, 3)
    probs = generator.dirichlet(np.ones(3), (2, 4))
    dense = np.zeros((2, 4, 7))
    np.put_along_axis(dense, ids, probs, axis=-1)
    sparse = Law(probs=jnp.asarray(probs, jnp.float32), ids=jnp.asarray(ids, jnp.int32))
    return sparse, Law(probs=jnp.asarray(dense, jnp.float32))


def test_sparse_and_dense_agree(forms):
    sparse, dense = forms
    np.testing.assert_array_equal(sparse.dense(7), dense.dense(7))
    for token in range(7):
        tokens = jnp.full((2, 4), token)
        np.testing.assert_array_equal(sparse.at(tokens), dense.at(tokens))
        assert sparse.at(tokens).shape == (2, 4)


def test_rows_of_one_sequence(forms):
    sparse, dense = (jax.tree.map(lambda x: x[1], law) for law in forms)
    for row in range(4):
        index = jnp.int32(row)
        np.testing.assert_array_equal(sparse.row(index, 7), dense.row(index, 7))
        np.testing.assert_array_equal(dense.row(index, 7), dense.probs[row])


def test_one_hot():
    law = Law(probs=jnp.ones((1, 2, 1)), ids=jnp.array([[[2], [0]]], jnp.int32))
    np.testing.assert_array_equal(law.dense(3), [[[0, 0, 1], [1, 0, 0]]])
    np.testing.assert_array_equal(law.at(jnp.array([[2, 1]])), [[1.0, 0.0]])


def test_noise_by_step_ignores_the_place_and_by_position_ignores_the_node():
    keys = row_keys(0, 1)[0]

    def data(by: str, start: int, node: int, depth: int) -> tuple[int, ...]:
        noise = Noise(keys=keys, start=jnp.int32(start), by=by)
        return tuple(np.asarray(jax.random.key_data(noise.key(node, depth))).tolist())

    assert data("step", 3, 2, 1) == data("step", 9, 2, 5)
    assert data("step", 3, 2, 1) != data("step", 3, 1, 1)
    assert data("position", 3, 2, 4) == data("position", 5, 0, 2)
    assert data("position", 3, 2, 4) != data("position", 3, 2, 3)


def _all_keys(verifier: Verifier, calls: int, gamma: int) -> np.ndarray:
    """Every key that one decode of three rows may use: drafts, tests and draws."""
    keys, used = row_keys(0, 3), []
    for call in range(calls):
        zeros = jnp.zeros(3, jnp.int32)
        stats = decoding.Stats(
            target_calls=jnp.full(3, call), emitted=zeros, drafted=None, accepted=None
        )
        state = decoding.DecodeState(
            tokens=None,
            length=jnp.full(3, 1 + call),
            start=zeros,
            limit=zeros,
            done=zeros,
            cache=None,
            draft_state=None,
            stats=stats,
        )
        draft, verify = decoding._noises(keys, state, verifier)
        for noise, nodes in ((draft, range(1, gamma + 1)), (verify, range(gamma + 1))):
            for node in nodes:
                own = jax.vmap(lambda row, node=node: row.key(node, node))(noise)
                used.append(np.asarray(jax.random.key_data(own)))
    return np.concatenate(used)


def test_no_two_uses_share_a_key():
    """The key-reuse checker cannot see two folds of the same number; this can."""
    used = _all_keys(token_verify, calls=6, gamma=3)
    assert len(used) == 3 * 6 * (3 + 4)
    assert len(np.unique(used, axis=0)) == len(used)
    # A rule that shares noise with the drafter does so on purpose.
    shared = _all_keys(Verifier(token_verify.rule, noise="position"), calls=6, gamma=3)
    assert len(np.unique(shared, axis=0)) < len(shared)
