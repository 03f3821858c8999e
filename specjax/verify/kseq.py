"""K-SEQ: k independent drafts of one token, each accepted on a relaxed ratio."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.types import DraftBlock, Noise
from specjax.verify.base import (
    Scored,
    Verifier,
    VerifyOutput,
    judged,
    verdict,
)

# Halvings of [1, k]: float32 has no more to tell apart.
_HALVINGS = 26


def kseq_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """SpecTr's sequential selection (Sun et al. 2023, arXiv:2310.15141), node by node.

    A child x of a node with k of them stands with probability min(1, p(x) / (rho q(x)))
    for the rho in [1, k] at which the k tries together accept no token more often than
    the target allows. For children that were drawn independently from one law.
    """
    del params
    parents, p, q, present, coins = judged(noise, block, scored)
    ids = jnp.arange(1, len(parents), dtype=jnp.int32)

    def step(carry: tuple[Array, Array, Array, Array]) -> Any:
        at, _, accepted, _ = carry
        children = present & (parents[1:] == at)
        count = jnp.sum(children, dtype=jnp.float32)
        rho = relaxation(p[at], q[at], count)
        ratio = rho * coins * q[at][block.tokens] < p[at][block.tokens]
        passed = children & ratio
        found = jnp.any(passed)
        child = ids[jnp.argmax(passed)]
        left = remainder(p[at], q[at], count, rho)
        accepted = accepted | (found & (ids == child))
        return jnp.where(found, child, at), found, accepted, left

    start = (jnp.int32(0), jnp.bool_(True), jnp.zeros(len(ids), bool), p[0])
    _, _, accepted, left = jax.lax.while_loop(lambda carry: carry[1], step, start)
    return verdict(noise, block, accepted, left)


def relaxation(
    p: Float[Array, " V"], q: Float[Array, " V"], count: Float[Array, ""]
) -> Float[Array, ""]:
    """The least rho in [1, k] whose k tries leave a residual without negative weights.

    With beta = sum min(q, p / rho) that is ``1 - (1 - beta)^k <= rho beta``; the left
    side falls with rho and the right side grows.

    Args:
        p: the target's law.
        q: the law of the k drafts.
        count: k; at 0 the result is 1.
    """

    def halve(_: Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = 0.5 * (low + high)
        beta = jnp.sum(jnp.minimum(q, p / middle))
        fits = 1.0 - (1.0 - beta) ** count <= middle * beta
        return jnp.where(fits, low, middle), jnp.where(fits, middle, high)

    bounds = (jnp.float32(1.0), jnp.maximum(count, 1.0))
    return jax.lax.fori_loop(0, _HALVINGS, halve, bounds)[1]


def remainder(
    p: Float[Array, " V"],
    q: Float[Array, " V"],
    count: Float[Array, ""],
    rho: Float[Array, ""],
) -> Float[Array, " V"]:
    """What the target's law has left after k failed tries, unnormalised; p if empty."""
    each = jnp.minimum(q, p / rho)
    beta = jnp.sum(each)
    tries = 1.0 - jnp.maximum(1.0 - beta, 0.0) ** count
    # As beta goes to 0, k tries accept k times as often as one.
    scale = jnp.where(beta > 0, tries / jnp.where(beta > 0, beta, 1.0), count)
    left = jnp.maximum(p - each * scale, 0.0)
    return jnp.where(jnp.sum(left) > 0, left, p)


kseq_verify = Verifier(kseq_rule, trees=True, siblings=("independent", "paths"))
