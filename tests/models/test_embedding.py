"""Rows are looked up, and their gradients do not stop growing in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import embedding

IDS = jnp.concatenate([jnp.zeros(2000, jnp.int32), jnp.arange(8, dtype=jnp.int32)])


def slope(look_up, dtype) -> np.ndarray:
    table = jnp.ones((8, 4), dtype)

    def total(table):
        # 1.01 has more bits than a bfloat16.
        return jnp.sum(look_up(table, IDS).astype(jnp.float32)) * 1.01

    return np.asarray(jax.grad(total)(table), np.float64)


def test_rows():
    table = jnp.arange(12, dtype=jnp.float32).reshape(4, 3)
    ids = jnp.array([[3, 0], [1, 1]])
    np.testing.assert_array_equal(embedding.look_up(table, ids), table[ids])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gradients_are_whole(dtype):
    right = 1.01 * np.bincount(IDS)[:, None] * np.ones((1, 4))
    got = slope(embedding.look_up, dtype)
    np.testing.assert_allclose(got, right, rtol=1e-2)


def test_plain_indexing_loses_most_of_a_frequent_row():
    plain = slope(lambda table, ids: table[ids], jnp.bfloat16)
    assert plain[0, 0] < 0.5 * 1.01 * 2001
