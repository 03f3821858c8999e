"""Copies what most often followed the last tokens, here and in earlier outputs.

SuffixDecoding (Oliaro et al. 2024, arXiv:2411.04975), whose suffix trees are replaced
by comparing the last tokens with all that is stored: an accelerator, and a CPU's vector
unit, compare a table of 64k tokens sooner than they walk a tree. Nothing is hashed.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import Committed, check_known
from specjax.drafters.matching import (
    Sources,
    check_longest,
    copied_block,
    has_next,
    last_tokens,
    match_lengths,
    source_and_output,
    what_followed,
)
from specjax.errors import InputError
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise

_CAPACITY = 65_536


@struct.dataclass
class Finished:
    """Outputs of earlier calls, the oldest first, the latest at the end.

    Attributes:
        tokens: ``int32[C]``; the first of each output is the decoder's start token.
        position: ``int32[C]`` of each token in its output; -1: not filled yet.
    """

    tokens: Int[Array, " C"]
    position: Int[Array, " C"]

    @classmethod
    def empty(cls, capacity: int = _CAPACITY) -> Finished:
        """A table that has learned nothing.

        Args:
            capacity: tokens that it holds, start tokens included.

        Raises:
            InputError: it is below 1.
        """
        if not isinstance(capacity, int | np.integer) or capacity < 1:
            raise InputError(
                f"capacity is {capacity!r}: tokens of the global table, a whole "
                "number, at least 1"
            )
        return cls(
            tokens=jnp.zeros(capacity, jnp.int32),
            position=jnp.full(capacity, -1, jnp.int32),
        )


@struct.dataclass
class SuffixDrafter:
    """Drafts the continuation of the last tokens that came most often before.

    There are two stores: the request's own source and output so far, with the start
    token standing before the source, and a global table of finished outputs, which is
    part of this frozen record: no call changes it, `learn` makes another drafter.

    For each match length m, 1 .. `max_match`: of all places of a store at which the
    last m tokens stand and something follows, the most frequent next token is drafted,
    then of the places that went on so the most frequent one after that, and so on.
    Among equals it is the one of the longest, then latest match. Each token's estimate
    is the product of the shares (count of the token / count of all that followed) down
    to it. The draft ends before the first token whose estimate is below `threshold`,
    and after ``floor(factor * m + offset)`` tokens. The draft with the greatest sum of
    estimates is proposed; among equals the request's own, then the longer match's.

    Its law is one-hot, so that a rejection rule accepts a copied token x with
    probability p(x). A store's `places` longest, then latest matches alone are counted:
    more of them than that make the shares those of the closest matches.

    Attributes:
        finished: the global table; None: there is none.
        max_match: tokens of the longest match that is looked for (static).
        factor: drafted tokens for each matched one (static).
        offset: drafted tokens besides (static).
        threshold: least estimate of a drafted token (static).
        places: matches of a store that are counted (static).

    A step costs comparisons of ``max_match`` times the table's capacity for each row.
    """

    finished: Finished | None = None
    max_match: int = struct.field(pytree_node=False, default=8)
    factor: float = struct.field(pytree_node=False, default=1.0)
    offset: float = struct.field(pytree_node=False, default=0.0)
    threshold: float = struct.field(pytree_node=False, default=0.1)
    places: int = struct.field(pytree_node=False, default=32)

    kind: ClassVar[str] = "suffix"
    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> SuffixDrafter:
        """One that has learned nothing.

        Args:
            target: any; nothing of it is read.
            settings: of the class, and `capacity` of the global table (None: no table;
                by default 65,536).
            key: unused.

        Raises:
            InputError: a setting that is not known or means nothing.
        """
        check_known(settings, cls().settings(), cls.kind)
        own = dict(settings)
        capacity = own.pop("capacity", _CAPACITY)
        made = cls(None if capacity is None else Finished.empty(capacity), **own)
        made.check()
        return made

    def settings(self) -> dict[str, Any]:
        """All settings, by name."""
        table = self.finished
        return {
            "capacity": None if table is None else table.tokens.shape[0],
            "max_match": self.max_match,
            "factor": self.factor,
            "offset": self.offset,
            "threshold": self.threshold,
            "places": self.places,
        }

    def check(self) -> None:
        """Refuses settings that mean nothing.

        Raises:
            InputError: naming the first of them.
        """
        for name in ("max_match", "places"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise InputError(
                    f"{name} is {value!r}: it must be a whole number, at least 1"
                )
        for name in ("factor", "offset"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(
                    f"{name} is {getattr(self, name)}: it must be a number, at least 0"
                )
        if self._limit(self.max_match) < 1:
            raise InputError(
                f"factor is {self.factor} and offset {self.offset}: no match of up to "
                f"{self.max_match} tokens would draft one; raise either"
            )
        if not 0 <= self.threshold <= 1:
            raise InputError(
                f"threshold is {self.threshold}: the least estimate of a drafted "
                "token, from 0 to 1"
            )
        stored = 0 if self.finished is None else self.finished.tokens.shape[0]
        if stored * (self.max_match + 1) > 2**24:
            raise InputError(
                f"capacity is {stored} and max_match {self.max_match}: at most "
                f"{2**24 // (self.max_match + 1)} tokens can be ranked by such matches"
            )

    def learn(
        self, tokens: Int[Array, "B L"], length: Int[Array, " B"]
    ) -> SuffixDrafter:
        """A drafter whose global table holds these outputs too; this one stays.

        The table has a fixed capacity: what was learned first leaves first, token by
        token, so that of the oldest output the end may be left.

        Args:
            tokens: finished outputs, start token first, as of `DecodeOutput`; later
                rows count as later.
            length: valid tokens of each; 0: a row that is not learned.

        Raises:
            InputError: there is no table, or a length is not one of its row's.
        """
        if self.finished is None:
            raise InputError(
                "this SuffixDrafter has no global table to learn into: make it with "
                "finished=Finished.empty(capacity)"
            )
        batch, size = tokens.shape
        if not isinstance(length, jax.core.Tracer):
            wrong = (np.asarray(length) < 0) | (np.asarray(length) > size)
            if wrong.any():
                row = int(wrong.argmax())
                raise InputError(
                    f"length[{row}] is {int(length[row])}: a row has 0 to {size} tokens"
                )
        place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), (batch, size))
        position = jnp.where(place < length[:, None], place, -1)
        texts = jnp.concatenate([self.finished.tokens, tokens.reshape(-1)])
        positions = jnp.concatenate([self.finished.position, position.reshape(-1)])
        # What is not filled goes to the front, all else keeps its order.
        order = jnp.argsort(positions >= 0, stable=True)
        kept = order[-self.finished.tokens.shape[0] :]
        return self.replace(finished=Finished(texts[kept], positions[kept]))

    def nodes(self, gamma: int) -> int:
        """A chain."""
        return gamma

    def init(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        prefix: Int[Array, "B P"],
        length: Int[Array, " B"],
        size: int,
    ) -> Sources:
        """Keeps the sources.

        Raises:
            InputError: settings that mean nothing, or a `max_match` that is longer than
                any text can get.
        """
        self.check()
        check_longest(self.max_match, "max_match", size)
        return Sources(inputs=inputs, mask=mask)

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: Sources,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, Sources]:
        """Copies up to `gamma` tokens; draws nothing."""

        def row(
            inputs: Array, mask: Array, tokens: Array, length: Array
        ) -> tuple[Array, Array]:
            recent = last_tokens(tokens, length, self.max_match)
            stores = [source_and_output(inputs, mask, tokens, length)]
            if self.finished is not None:
                stores.append((self.finished.tokens, self.finished.position))
            drafts = [self._candidates(*store, recent, gamma) for store in stores]
            copied, score = (
                jnp.concatenate(part) for part in zip(*drafts, strict=True)
            )
            # Of equals the first: the own text, then the longest match.
            chosen = copied[jnp.argmax(score)]
            return chosen, jnp.sum(chosen >= 0, dtype=jnp.int32)

        drafted = jax.vmap(row)(state.inputs, state.mask, tokens, length)
        return copied_block(*drafted), state

    def commit(self, state: Sources, committed: Committed) -> Sources:
        """Nothing to bring in step."""
        return state

    def _candidates(
        self,
        text: Int[Array, " N"],
        position: Int[Array, " N"],
        recent: Int[Array, " M"],
        gamma: int,
    ) -> tuple[Int[Array, "M G"], Float[Array, " M"]]:
        """A store's drafts, -1 past their end, and scores by match, longest first."""
        stored = text.shape[0]
        matched = jnp.where(
            has_next(position), match_lengths(text, position, recent), 0
        )
        rank = matched * stored + jnp.arange(stored, dtype=jnp.int32)
        # A float32 holds them exactly (`check`); XLA's CPU backend sorts whole numbers.
        top = jax.lax.top_k(rank.astype(jnp.float32), min(self.places, stored))[1]
        followed = what_followed(text, position, top, gamma)  # [K, G]
        same = followed[:, None] == followed[None]  # [K, K, G]

        wanted = list(range(self.max_match, 0, -1))
        limit = jnp.array([math.floor(self._limit(m)) for m in wanted])
        live = matched[top][None] >= jnp.array(wanted)[:, None]  # [M, K]
        estimate, score = jnp.ones(self.max_match), jnp.zeros(self.max_match)
        copied = []
        for depth in range(gamma):
            live = live & (followed[:, depth] >= 0)[None]
            equal = live[:, None] & same[None, :, :, depth]
            counts = jnp.where(live, jnp.sum(equal, axis=-1), 0)
            most, best = jnp.max(counts, axis=1), jnp.argmax(counts, axis=1)
            followers = jnp.maximum(jnp.sum(live, axis=1), 1)
            estimate = estimate * (most / followers)
            going = (most > 0) & (depth < limit) & (estimate >= self.threshold)
            token = followed[best, depth]
            copied.append(jnp.where(going, token, -1))
            score = score + jnp.where(going, estimate, 0)
            live = live & (followed[:, depth][None] == token[:, None])
        return jnp.stack(copied, axis=1), score

    def _limit(self, matched: int) -> float:
        """Most tokens after a match, not rounded."""
        return self.factor * matched + self.offset + 1e-6  # 0.1 * 10 is below 1
