"""Rules that draw the target's own token at every node and keep what equals it.

They read no draft law, so they are exact for a draft of *unknown* law: the token that
is written is always the one that was drawn from the target's.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from specjax import trees
from specjax.sampling import draw
from specjax.types import DraftBlock, Noise
from specjax.verify.base import Scored, Verifier, VerifyOutput, greedy_rule, tree_of


def match_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: None
) -> VerifyOutput:
    """Walks down from the root to the child that holds the token drawn at its parent.

    With noise of the *step* this is the exact-match rule: a child x of node i stands
    with probability p_i(x), whatever it was drafted from.

    With noise of the *position* it is coupled sampling (Daliri, Musco, Suresh 2024,
    arXiv:2408.07978): drafter and target draw position t from the same noise, so that
    similar laws draw the same token, and what is written is token for token the
    autoregressive sample of the same key. Sharing noise by position is right here
    alone: no token is ever drawn but from the target, and noise of a position is used
    up once that token is written. A rule of rejection draws a residual after it has
    looked at the draft, which the same noise has made: that would be biased.
    """
    del params
    vocab_size, nodes = scored.logits.shape[-1], block.tokens.shape[0]
    ids = jnp.arange(nodes + 1, dtype=jnp.int32)
    # A node's number tells siblings apart, its depth says which position follows it.
    keys = jax.vmap(noise.key)(ids, trees.depths(tree_of(block)) + 1)
    own = jax.vmap(draw)(keys, scored.law.dense(vocab_size))
    return greedy_rule(own, block, nodes)


exact_match_verify = Verifier(match_rule, needs_law=False, trees=True)
# From shared noise, independent siblings would all be the same token.
coupled_verify = Verifier(
    match_rule,
    needs_law=False,
    trees=True,
    noise="position",
    siblings=("distinct", "chosen"),
)
