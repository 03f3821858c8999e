"""The best of several independent paths, judged as one block."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax.types import DraftBlock, Law, Noise
from specjax.verify.base import (
    Scored,
    Verifier,
    VerifyOutput,
    draft_rows,
    real_nodes,
    tree_of,
)
from specjax.verify.chain import block_rule


def best_path_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """Chooses one path level by level, then runs `block_rule` on it.

    The block is a tree of independent chains from the root. At each level the n paths
    that share what was chosen so far hold n independent draws of one law q; tokens are
    ranked by p / q, and the best ranked of the n is chosen. Its law is known,
    ``T(x)^n - T(next)^n`` with T(x) the mass of q ranked at x or below, and takes q's
    place in the block's test, which needs no more than that.
    """
    vocab_size, nodes = scored.logits.shape[-1], block.tokens.shape[0]
    parents, p = tree_of(block), scored.law.dense(vocab_size)
    q = draft_rows(block, vocab_size)
    real, tokens = real_nodes(block), block.tokens
    ids = jnp.arange(1, nodes + 1, dtype=jnp.int32)

    def level(front: Array, _: None) -> tuple[Array, tuple[Array, Array, Array]]:
        """`front`: nodes that share the chosen prefix; the first of them speaks."""
        at = jnp.argmax(front).astype(jnp.int32)
        below = front[parents[1:]] & real
        count = jnp.sum(below, dtype=jnp.float32)
        order, law = best_of(p[at], q[at], count)
        rank = jnp.zeros(vocab_size, jnp.int32).at[order].set(jnp.arange(vocab_size))
        place = jnp.where(below, rank[tokens], vocab_size)
        first = jnp.argmin(place)
        chosen = below & (tokens == tokens[first])
        node = jnp.where(count > 0, ids[jnp.argmax(chosen)], 0)
        return jnp.pad(chosen, (1, 0)), (node, law, at)

    start = jnp.zeros(nodes + 1, bool).at[0].set(True)
    # As deep as a tree of so many nodes can be; past the end no path goes on.
    _, (path, laws, after) = jax.lax.scan(level, start, None, length=nodes)
    length = jnp.sum(path > 0, dtype=jnp.int32)
    last = jnp.where(length > 0, path[jnp.maximum(length - 1, 0)], 0)
    places = jnp.arange(nodes + 1, dtype=jnp.int32)
    rows = jnp.where(places < length, jnp.pad(after, (0, 1)), last)
    chain = DraftBlock(
        tokens=tokens[jnp.maximum(path - 1, 0)], length=length, law=Law(probs=laws)
    )
    judged = Scored(law=Law(probs=p[rows]), logits=scored.logits[rows])
    result = block_rule(noise, chain, judged, params)
    return result.replace(path=None if block.parents is None else path)


def best_of(
    p: Float[Array, " V"], q: Float[Array, " V"], count: Float[Array, ""]
) -> tuple[Array, Float[Array, " V"]]:
    """Tokens from the best down, and the law of the best of n draws of q.

    Args:
        p: the target's law.
        q: the draft's.
        count: n; at 0 the law is empty.

    Returns:
        The ids in order of p / q, and probabilities by id.
    """
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), -1.0)
    order = jnp.argsort(-ratio, stable=True)
    ranked = q[order]
    # From the worst up: sums of little things stay exact.
    below = jnp.cumsum(ranked[::-1])[::-1]
    below = below / jnp.where(below[0] > 0, below[0], 1.0)
    after = jnp.concatenate([below[1:], jnp.zeros(1, below.dtype)])
    won = jnp.where(ranked > 0, below**count - after**count, 0.0)
    won = jnp.where(count > 0, won, 0.0)
    return order, jnp.zeros_like(q).at[order].set(won)


best_path_verify = Verifier(best_path_rule, trees=True, siblings=("paths",))
