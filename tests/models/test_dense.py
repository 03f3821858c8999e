"""Every form of the product gives the product."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import dense


@pytest.mark.parametrize("rows", [(1,), (2,), (1, 2), (2, 4), (8,), (9,), (3, 20)])
@pytest.mark.parametrize("out", [(5,), (3, 16)])
@pytest.mark.parametrize("width", [8, 20, 48, 264])
def test_the_product(rows, out, width):
    x = jax.random.normal(jax.random.key(0), (*rows, width))
    weight = jax.random.normal(jax.random.key(1), (*out, width))
    expected = np.tensordot(np.float64(x), np.float64(weight), axes=(-1, -1))
    got = jax.jit(dense.dense)(x, weight)
    assert got.shape == rows + out and got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, atol=1e-4)
    half = jax.jit(dense.dense, static_argnums=2)(
        x.astype(jnp.bfloat16), weight.astype(jnp.bfloat16), jnp.float32
    )
    assert half.dtype == jnp.float32
    np.testing.assert_allclose(half, expected, atol=0.02 * width**0.5 + 0.1)


def test_gradients_of_the_unrolled_form():
    x = jax.random.normal(jax.random.key(0), (4, 24))
    weight = jax.random.normal(jax.random.key(1), (6, 24))
    assert dense._small(x, weight)

    def total(function):
        return jax.grad(lambda x, w: jnp.sum(function(x, w) ** 2), argnums=(0, 1))

    mine = total(dense.dense)(x, weight)
    theirs = total(lambda x, w: x @ w.T)(x, weight)
    for ours, plain in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-4)


def test_what_is_unrolled():
    """Two to eight rows of float32, of a weight that is small and divides."""
    weight = jnp.zeros((16, 64))

    def small(rows, weight=weight, dtype=jnp.float32):
        return dense._small(jnp.zeros((rows, weight.shape[1]), dtype), weight)

    assert [rows for rows in range(1, 12) if small(rows)] == list(range(2, 9))
    assert not small(4, jnp.zeros((4096, 256))) and not small(4, jnp.zeros((16, 20)))
    assert not small(4, weight.astype(jnp.bfloat16), jnp.bfloat16)


def half(x) -> np.ndarray:
    """Rounded to bfloat16, and wide again."""
    return np.array(jnp.asarray(x).astype(jnp.bfloat16), np.float64)


@pytest.mark.usefixtures("standard_promotion")
def test_rounded_products_round_their_factors_alone():
    x = jax.random.normal(jax.random.key(0), (3, 5, 16))
    weight = jax.random.normal(jax.random.key(1), (4, 6, 16))
    gradient = jax.random.normal(jax.random.key(2), (3, 5, 4, 6))
    rounded = dense.Rounded(weight)
    assert rounded.dtype == jnp.float32 and dense.dense(x, rounded[1:]).shape[2] == 3

    product, back = jax.vjp(dense.dense, x, rounded)
    of_x, of_weight = back(gradient)
    # Sums, and what goes on, are float32: closer than bfloat16 could say.
    exact = np.einsum("btd,hkd->bthk", half(x), half(weight))
    np.testing.assert_allclose(product, exact, rtol=1e-5, atol=1e-5)
    exact = np.einsum("bthk,hkd->btd", half(gradient), half(weight))
    np.testing.assert_allclose(of_x, exact, rtol=1e-5, atol=1e-5)
    exact = np.einsum("bthk,btd->hkd", half(gradient), half(x))
    np.testing.assert_allclose(of_weight.values, exact, rtol=1e-5, atol=1e-5)
    assert np.abs(np.array(product) - np.array(dense.dense(x, weight))).max() > 1e-3

    bfloat16 = dense.dense(x.astype(jnp.bfloat16), rounded, jnp.bfloat16)
    assert bfloat16.dtype == jnp.bfloat16


def test_what_is_rounded():
    tree = {"wi": jnp.ones((2, 3)), "scale": jnp.ones(3), "ids": jnp.ones((2, 2), int)}
    kinds = {name: type(leaf) for name, leaf in dense.rounded(tree).items()}
    assert kinds.pop("wi") is dense.Rounded
    assert dense.Rounded not in kinds.values()


def has_matrix_units() -> bool:
    path = pathlib.Path("/proc/cpuinfo")
    return path.is_file() and "amx_bf16" in path.read_text()


@pytest.mark.skipif(
    not has_matrix_units() or jax.__version_info__ < (0, 10),
    reason="this processor, or jax's CPU backend, cannot multiply bfloat16 factors",
)
@pytest.mark.parametrize(
    "form, rows", [("dense", 1), ("dense", 2), ("dense", 5), ("twin", 1)]
)
def test_a_loop_keeps_no_wide_copy_of_its_weights(form, rows):
    """The twin multiplies to a bfloat16 result, as one would write it."""
    weights = [
        jnp.ones((512, 512), jnp.bfloat16),
        jnp.ones((2, 256, 512), jnp.bfloat16),
    ]

    def product(x, weight):
        if form == "dense":
            return dense.dense(x, weight)
        flat = weight.reshape(-1, weight.shape[-1])
        return jax.lax.dot_general(x, flat, (((1,), (1,)), ((), ())))

    def loop(x, weights):
        def body(_, x):
            for weight in weights:
                x = product(x, weight).reshape(x.shape) * jnp.bfloat16(0.01)
            return x

        return jax.lax.fori_loop(0, 9, body, x)

    x = jnp.ones((rows, 512), jnp.bfloat16)
    kept = jax.jit(loop).lower(x, weights).compile().memory_analysis()
    stored = sum(weight.nbytes for weight in weights)
    assert (kept.temp_size_in_bytes < stored / 2) == (form == "dense")
