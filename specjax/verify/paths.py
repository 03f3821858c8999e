"""The best of several independent paths, judged as one block."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from specjax import trees
from specjax.types import DraftBlock, Law, Noise
from specjax.verify.base import (
    Scored,
    Verifier,
    VerifyOutput,
    draft_rows,
    normalised,
    real_nodes,
    tree_of,
)
from specjax.verify.chain import block_rule

Choice = Callable[[Array, Array, Array], tuple[Array, Array]]
Levels = tuple[Array, Array, Array, Array]


def best_path_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """Chooses one path level by level, then runs `block_rule` on it.

    The block is a tree of independent chains from the root. At each level the n paths
    that share what was chosen so far hold n independent draws of one law q; tokens are
    ranked by p / q, and the best ranked of the n is chosen. Its law is known,
    ``T(x)^n - T(next)^n`` with T(x) the mass of q ranked at x or below, and takes q's
    place in the block's test, which needs no more than that.

    The choice prefers what the target likes more than the draft does, so that its law
    is not the draft's: where the draft is nearly the target it is further from it, and
    more is rejected than of one path by `block_rule`.
    """
    vocab_size, nodes = scored.logits.shape[-1], block.tokens.shape[0]
    parents, p = tree_of(block), scored.law.dense(vocab_size)
    q = draft_rows(block, vocab_size)
    real, tokens = real_nodes(block), block.tokens
    ids = jnp.arange(1, nodes + 1, dtype=jnp.int32)

    def below(front: Array) -> Array:
        return front[parents[1:]] & real

    def level(choose: Choice, depth: Array, carry: Levels) -> Levels:
        """`front`: nodes that share the chosen prefix; the first of them speaks."""
        front, path, laws, after = carry
        at = jnp.argmax(front).astype(jnp.int32)
        able = below(front)
        count = jnp.sum(able, dtype=jnp.float32)
        ratio, law = choose(p[at], q[at], count)
        # The best of those drawn; of equal ones the lowest id.
        best = jnp.max(jnp.where(able, ratio[tokens], -jnp.inf))
        among = able & (ratio[tokens] == best)
        chosen = able & (tokens == jnp.min(jnp.where(among, tokens, vocab_size)))
        node = jnp.where(count > 0, ids[jnp.argmax(chosen)], 0)
        return (
            jnp.pad(chosen, (1, 0)),
            path.at[depth].set(node),
            laws.at[depth].set(law),
            after.at[depth].set(at),
        )

    start = (
        jnp.zeros(nodes + 1, bool).at[0].set(True),
        jnp.zeros(nodes, jnp.int32),
        jnp.zeros((nodes, vocab_size), q.dtype),
        jnp.zeros(nodes, jnp.int32),
    )
    deepest = jnp.max(trees.depths(parents))
    # Ranking sorts the vocabulary, which costs far more than all the rest: it is done
    # only down to where one path is left.
    depth, carry = jax.lax.while_loop(
        lambda state: (state[0] < deepest) & (jnp.sum(below(state[1][0])) > 1),
        lambda state: (state[0] + 1, level(best_of, *state)),
        (jnp.int32(0), start),
    )
    alone = functools.partial(level, only)
    _, path, laws, after = jax.lax.fori_loop(depth, deepest, alone, carry)
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
    """How good each token is, and the law of the best of n draws of q.

    Args:
        p: the target's law.
        q: the draft's.
        count: n; at 0 the law is empty.

    Returns:
        p / q by id, of which the greatest is the best (of equal ones the lowest id; -1
        where q is 0), and probabilities by id.
    """
    ratio = jnp.where(q > 0, p / jnp.where(q > 0, q, 1.0), -1.0)
    order = jnp.argsort(-ratio, stable=True)
    ranked = q[order]
    # From the worst up: sums of little things stay exact.
    below = jnp.cumsum(ranked[::-1])[::-1]
    below = below / jnp.where(below[0] > 0, below[0], 1.0)
    after = jnp.concatenate([below[1:], jnp.zeros(1, below.dtype)])

    def longer(_: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        total, power = sums[0], sums[1] * after
        return below * total + power, power

    # below^n - after^n = (below - after) sum of below^i after^(n - 1 - i): the plain
    # difference would cancel where a good token is rare.
    ones = jnp.ones_like(ranked)
    total, _ = jax.lax.fori_loop(1, count.astype(jnp.int32), longer, (ones, ones))
    won = jnp.where(count > 0, normalised(ranked) * total, 0.0)
    return ratio, jnp.zeros_like(q).at[order].set(won)


def only(
    p: Float[Array, " V"], q: Float[Array, " V"], count: Float[Array, ""]
) -> tuple[Array, Float[Array, " V"]]:
    """`best_of` where n is 1 or 0: nothing is ranked."""
    del p
    return jnp.zeros_like(q), jnp.where(count > 0, normalised(q), 0.0)


best_path_verify = Verifier(best_path_rule, trees=True, siblings=("paths",))
