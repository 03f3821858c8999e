"""Recursive rejection: the children of a node are tried one after the other.

SpecInfer (Miao et al. 2024, arXiv:2305.09781) draws them independently; Sequoia (Chen
et al. 2024, arXiv:2402.12374) and RSD (Jeon et al. 2024, arXiv:2402.14160) without
replacement, which always accepts as often or more often. In a chain both are
`token_rule`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax.sampling import residual
from specjax.types import DraftBlock, Noise
from specjax.verify.base import (
    Scored,
    Verifier,
    VerifyOutput,
    judged,
    normalised,
    verdict,
)


def independent_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """For children that were drawn independently from one law."""
    return _rule(noise, block, scored, distinct=False)


def distinct_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """For children that were drawn without replacement, in the order of their nodes."""
    return _rule(noise, block, scored, distinct=True)


def _rule(
    noise: Noise, block: DraftBlock, scored: Scored, distinct: bool
) -> VerifyOutput:
    """One walk over the nodes: siblings stand in the order in which they were drawn,
    and a node after its parent, so that each is met after all that it depends on."""
    parents, p, q, present, coins = judged(noise, block, scored)

    def visit(
        carry: tuple[Array, Array, Array], node: Array
    ) -> tuple[tuple[Array, Array, Array], Array]:
        # Where the walk stands; what is left of the target's law; the next child's law.
        at, left, law = carry
        token = block.tokens[node - 1]
        tried = present[node - 1] & (parents[node] == at)
        accepted = tried & (coins[node - 1] * law[token] < left[token])
        rejected = tried & ~accepted
        rest = normalised(residual(left, law))
        left = jnp.where(accepted, p[node], jnp.where(rejected, rest, left))
        if distinct:
            fewer = normalised(law.at[token].set(0.0))
            law = jnp.where(rejected, fewer, law)
        law = jnp.where(accepted, q[node], law)
        return (jnp.where(accepted, node, at), left, law), accepted

    start = (jnp.int32(0), p[0], q[0])
    ids = jnp.arange(1, len(parents), dtype=jnp.int32)
    (_, left, _), accepted = jax.lax.scan(visit, start, ids)
    return verdict(noise, block, accepted, left)


recursive_verify = Verifier(
    independent_rule, trees=True, siblings=("independent", "paths")
)
recursive_distinct_verify = Verifier(distinct_rule, trees=True, siblings=("distinct",))
