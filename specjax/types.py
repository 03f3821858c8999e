"""The vocabulary of specjax: the axis legend and the records that cross modules.

Axes, in every shape below and in every docstring:

    B batch    S source length    L buffer length    T tokens fed in this call
    G gamma    V vocabulary       D model width      H heads    K head width
    N drafted nodes of a block (N = G for a chain)

Every array in a state or an output has B first, so that one ``tree_map`` shards, pads
or permutes rows. Rules that are written for one sequence see the same records without
B.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int, Key

# How the children of a tree's node are drawn: independently of one another; so, and in
# chains that part at the root alone; without replacement, in the order of their nodes;
# or chosen, with no draw at all.
SIBLINGS = ("independent", "paths", "distinct", "chosen")


@struct.dataclass
class Law:
    """Next-token laws over the target's V ids, dense or sparse.

    Attributes:
        probs: ``[..., N, V]`` probabilities, or ``[..., N, C]`` beside `ids`.
        ids: None when dense. Else the C ids that carry the mass; no mass elsewhere.
            C = 1 with probability 1 is a one-hot law (greedy and copied drafts).

    Rules read laws through `at`, `row` and `dense` alone, so that no form is special.
    """

    probs: Float[Array, "*N C"]
    ids: Int[Array, "*N C"] | None = None

    def at(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N"]:
        """Probability of `tokens[..., i]` under row i."""
        if self.ids is None:
            return jnp.take_along_axis(self.probs, tokens[..., None], axis=-1)[..., 0]
        return jnp.sum(jnp.where(self.ids == tokens[..., None], self.probs, 0.0), -1)

    def row(self, index: Int[Array, ""], vocab_size: int) -> Float[Array, " V"]:
        """Row `index` of one sequence's laws as a dense vector of `vocab_size` ids."""
        probs = jax.lax.dynamic_index_in_dim(self.probs, index, keepdims=False)
        if self.ids is None:
            return probs
        ids = jax.lax.dynamic_index_in_dim(self.ids, index, keepdims=False)
        return jnp.zeros(vocab_size, probs.dtype).at[ids].add(probs)

    def dense(self, vocab_size: int) -> Float[Array, "*N V"]:
        """All rows as dense vectors of `vocab_size` ids."""
        if self.ids is None:
            return self.probs
        ids = jnp.arange(vocab_size, dtype=self.ids.dtype)
        hits = self.ids[..., None] == jnp.expand_dims(ids, range(self.ids.ndim))
        return jnp.sum(jnp.where(hits, self.probs[..., None], 0.0), axis=-2)


@struct.dataclass
class DraftBlock:
    """What a drafter proposes: tokens, and the laws that they were drawn from.

    The last committed token counts as node 0, drafted token i (from 0) as node i + 1.

    Attributes:
        tokens: ``int32[B, N]`` drafted ids; N = G for a chain.
        length: ``int32[B]`` how many of them are real; 0 is legal.
        law: row i is the law that the children of node i were really drawn from, given
            the prefix and the path down to node i; in a chain that is the law of
            ``tokens[:, i]``. None: unknown.
        parents: ``int32[B, N + 1]`` of a tree (see `specjax.trees`), siblings in the
            order in which they were drawn; None: a chain.
    """

    tokens: Int[Array, "*B N"]
    length: Int[Array, "*B"]
    law: Law | None = None
    parents: Int[Array, "*B M"] | None = None


@struct.dataclass
class Prefix:
    """What precedes each position that a law is asked for.

    Position t of row b follows ``tokens[b, :length[b, t]]``, with the drafted block
    written in tentatively; in a tree each position has a path, and a buffer, of its
    own.

    Attributes:
        tokens: ``int32[B, L]`` the buffer; ``int32[B, T, L]`` where a tree was drafted.
        length: ``int32[B, T]`` how many of its tokens precede position t.
    """

    tokens: Int[Array, "B L"] | Int[Array, "B T L"]
    length: Int[Array, "B T"]


@struct.dataclass
class Noise:
    """Where the randomness of one step comes from: both schemes, in one place.

    ``by="step"``: the key of a node depends on the step and the node. Rejection rules
    need this one: a position that is drafted again must see fresh noise, or block
    verification is biased. ``by="position"``: the key depends on the absolute position
    alone, so that target and draft can share noise (coupled sampling).

    Attributes:
        keys: ``key[B]`` one per row, already folded with its purpose (and step).
        start: ``int32[B]`` index of the last committed token.
        by: "step" or "position" (static).
    """

    keys: Key[Array, "*B"]
    start: Int[Array, "*B"]
    by: str = struct.field(pytree_node=False, default="step")

    def key(self, node: int | Int[Array, ""], depth: int | Int[Array, ""]) -> Array:
        """The key of one sequence's node, which stands `depth` tokens past `start`."""
        if self.by == "position":
            return jax.random.fold_in(self.keys, self.start + depth)
        return jax.random.fold_in(self.keys, node)
