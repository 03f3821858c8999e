"""A smaller model that drafts a tree of a fixed shape, level by level."""

from __future__ import annotations

import functools
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax import trees
from specjax.drafters.base import Committed, node_keys
from specjax.drafters.model import ModelDrafter, ModelDraftState, catch_up
from specjax.errors import InputError
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling, draw_distinct, draw_law, fit_vocabulary
from specjax.types import SIBLINGS, DraftBlock, Law, Noise, Prefix


@struct.dataclass
class TreeDrafter:
    """Drafts several continuations at once, for a verifier of trees.

    Attributes:
        model: as of `ModelDrafter`; it decodes trees (`EncoderDecoder.decode`).
        parents: of each node, -1 at the root (see `specjax.trees`), numbered level by
            level (static).
        siblings: how the children of a node are drawn, one of `types.SIBLINGS`
            (static). "chosen" takes the most probable tokens and has no law. A greedy
            draft (a temperature of None) always does so; a traced temperature of 0
            leaves one token to draw, and other children are absent.
    """

    model: Any
    parents: tuple[int, ...] = struct.field(pytree_node=False)
    siblings: str = struct.field(pytree_node=False, default="distinct")

    taps: ClassVar[tuple[int, ...]] = ()
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    @property
    def has_law(self) -> bool:
        """Chosen tokens were drawn from no law."""
        return self.siblings != "chosen"

    def nodes(self, gamma: int) -> int:
        """All nodes of the tree but the root.

        Raises:
            InputError: the tree is none, is deeper than gamma, or has another way to
                draw than it says.
        """
        trees.check_parents(self.parents)
        if self.siblings not in SIBLINGS:
            raise InputError(
                f"siblings is {self.siblings!r}: it must be one of "
                f"{', '.join(SIBLINGS)}"
            )
        depth = trees.depth(self.parents)
        if depth > gamma:
            raise InputError(
                f"the tree is {depth} deep and gamma {gamma}: gamma is the deepest "
                "draft, so it must be at least as much"
            )
        branching = {parent for parent in self.parents[1:] if parent > 0}
        chains = len(branching) == sum(parent > 0 for parent in self.parents)
        if self.siblings == "paths" and not chains:
            raise InputError(
                "siblings is 'paths' and the tree branches below its root: paths part "
                "at the root alone"
            )
        return len(self.parents) - 1

    def init(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        prefix: Int[Array, "B P"],
        length: Int[Array, " B"],
        size: int,
    ) -> ModelDraftState:
        """As `ModelDrafter.init`."""
        chain = ModelDrafter(self.model)
        return chain.init(target, encoded, inputs, mask, prefix, length, size)

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: ModelDraftState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, ModelDraftState]:
        """Runs a pass of the model per level that has one below it."""
        batch, vocab_size = tokens.shape[0], target.vocab_size
        parents = jnp.broadcast_to(
            jnp.array(self.parents, jnp.int32), (batch, len(self.parents))
        )
        drafted = jnp.zeros((batch, len(self.parents) - 1), jnp.int32)
        laws: list[Law] = []

        first = catch_up(self.model, state, tokens, length)
        logits, cache = first.logits[:, None], first.memory
        levels = trees.levels(self.parents)
        for depth, (above, level) in enumerate(itertools.pairwise(levels), start=1):
            prefix = None
            if sampling.controls:  # they read the path down to each node
                texts, ends = jax.vmap(trees.write_paths)(
                    tokens, length, drafted, parents
                )
                own = slice(above.start, above.stop)
                prefix = Prefix(tokens=texts[:, own], length=ends[:, own])
            fitted = fit_vocabulary(logits, vocab_size)
            law = sampling.law(fitted, prefix)
            laws.append(law)
            chosen = self._children(noise, sampling, fitted, prefix, law, above, depth)
            drafted = drafted.at[:, level.start - 1 : level.stop - 1].set(chosen)
            if level is not levels[-1]:
                output, cache = self.model.decode(
                    chosen, cache, state.encoded, parents=parents, start=level.start
                )
                logits = output.logits
        block = DraftBlock(
            tokens=drafted,
            length=jnp.full_like(length, drafted.shape[1]),
            law=jax.tree.map(lambda *own: jnp.concatenate(own, axis=1), *laws)
            if self.has_law
            else None,
            parents=parents,
        )
        return block, state.replace(cache=cache)

    def _children(
        self,
        noise: Noise,
        sampling: Sampling,
        logits: Array,
        prefix: Prefix | None,
        law: Law,
        above: range,
        depth: int,
    ) -> Array:
        """Tokens of all nodes below one level, at `depth`, in order, ``[B, n]``."""
        vocab_size = logits.shape[-1]
        chooses = sampling.greedy or not self.has_law
        if chooses:
            ranked = sampling.replace(temperature=1.0).law(logits, prefix).probs
        found = []
        for place, node in enumerate(above):
            children = [n for n, parent in enumerate(self.parents) if parent == node]
            if not children:
                continue
            if chooses:
                ids = jax.lax.top_k(ranked[:, place], len(children))[1]
                found.append(ids.astype(jnp.int32))
            elif self.siblings == "distinct":
                keys = node_keys(noise, children[0], depth)
                draw = functools.partial(draw_distinct, count=len(children))
                found.append(jax.vmap(draw)(keys, law.probs[:, place]))
            else:
                draw_one = functools.partial(draw_law, row=place, vocab_size=vocab_size)
                for child in children:
                    token = jax.vmap(draw_one)(node_keys(noise, child, depth), law)
                    found.append(token[:, None])
        return jnp.concatenate(found, axis=1)

    def commit(self, state: ModelDraftState, committed: Committed) -> ModelDraftState:
        """Keeps the accepted path, then all but the last two committed tokens."""
        fed = trees.levels(self.parents)[-1].start  # nodes, the root among them
        cache = state.cache
        assert committed.path is not None  # this drafts trees
        cache = self.model.keep(cache, cache.length - fed, committed.path)
        return ModelDrafter(self.model).commit(state.replace(cache=cache), committed)


def chain_or_tree(
    model: Any, parents: tuple[int, ...], siblings: str | None
) -> ModelDrafter | TreeDrafter:
    """What drafts with a model in a shape: a chain where no siblings are drawn.

    Args:
        model: as of `ModelDrafter`.
        parents: as of `TreeDrafter`; not read of a chain, which gamma alone shapes.
        siblings: as of `TreeDrafter`; None: a chain.
    """
    if siblings is None:
        return ModelDrafter(model)
    return TreeDrafter(model, parents, siblings)
