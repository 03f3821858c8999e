"""Drafts from counts of a corpus: how often a token comes, or comes after another.

The trivial drafts of Leviathan et al. 2023 (arXiv:2211.17192, Table 3): a step of
theirs costs next to nothing, so that even a small alpha pays.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import Committed, check_known
from specjax.drafters.chain import (
    LengthState,
    Pass,
    commit_length,
    draft_chain,
    init_length,
)
from specjax.errors import InputError
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise

_SUCCESSORS = 32


@struct.dataclass
class TableDraftState:
    """Nothing but what a rule of the length remembers; None without a rule."""

    rule: LengthState | None


class _TableDrafter(abc.ABC):
    """What the two share: a law for the next token that reads the last one at most."""

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    rule: Any

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Ids that the tables know."""

    @abc.abstractmethod
    def probs(self, last: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The law of the token that follows each of these, before any sampling."""

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
    ) -> TableDraftState:
        """No memory: a table reads no more than the last token.

        Raises:
            InputError: the tables are of another vocabulary, or the rule reads hidden
                states, which a table has not.
        """
        if self.vocab_size != target.vocab_size:
            raise InputError(
                f"{type(self).__name__} has counts of {self.vocab_size} ids and the "
                f"target {target.vocab_size}: count with the target's tokenizer"
            )
        if self.rule is not None and self.rule.reads_hidden:
            raise InputError(
                f"the rule {type(self.rule).__name__} reads hidden states and "
                f"{type(self).__name__} has none: use a rule that reads the law"
            )
        return TableDraftState(rule=init_length(self.rule, inputs.shape[0]))

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: TableDraftState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, TableDraftState]:
        """Draws token after token: the logits are the logarithms of the table's law."""

        def advance(token: Array, memory: None) -> Pass:
            return Pass(jnp.log(self.probs(token)), None, memory)

        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        block, _, rule = draft_chain(
            advance(last, None),
            advance,
            noise=noise,
            tokens=tokens,
            length=length,
            gamma=gamma,
            sampling=sampling,
            vocab_size=target.vocab_size,
            rule=self.rule,
            state=state.rule,
        )
        return block, state.replace(rule=rule)

    def commit(self, state: TableDraftState, committed: Committed) -> TableDraftState:
        """Tells the rule of the length, if there is one."""
        return state.replace(rule=commit_length(self.rule, state.rule, committed))


@struct.dataclass
class UnigramDrafter(_TableDrafter):
    """Drafts every token from one law, whatever stands before it.

    With n(x) the corpus's count of x, N their sum, D the number of ids that come in it
    (at least 1) and V the vocabulary, ``q(x) = (n(x) + D / V) / (N + D)``: Witten and
    Bell's rule (1991), by which a new id is as likely as new ids were in the corpus.

    Attributes:
        counts: ``int32[V]``.
        rule: ends a row's draft early (`chain.LengthRule`); None: none does.
    """

    counts: Int[Array, " V"]
    rule: Any = None

    kind: ClassVar[str] = "unigram"

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> UnigramDrafter:
        """One that has counted nothing, of the target's vocabulary.

        Args:
            target: has a `vocab_size`.
            settings: empty.
            key: unused.

        Raises:
            InputError: there is a setting.
        """
        check_known(settings, (), cls.kind)
        return cls(jnp.zeros(target.vocab_size, jnp.int32))

    def settings(self) -> dict[str, Any]:
        """It has none."""
        return {}

    @property
    def vocab_size(self) -> int:
        """Ids that the table knows."""
        return self.counts.shape[0]

    def probs(self, last: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The one law, for each row."""
        counts = self.counts.astype(jnp.float32)
        distinct = jnp.maximum(jnp.sum(counts > 0), 1).astype(jnp.float32)
        law = (counts + distinct / self.vocab_size) / (jnp.sum(counts) + distinct)
        return jnp.broadcast_to(law, (last.shape[0], self.vocab_size))


@struct.dataclass
class BigramDrafter(_TableDrafter):
    """Drafts each token from the counts of what follows the token before it.

    With n(x, y) the corpus's count of y right after x, N(x) their sum over y, D(x) the
    number of ids that follow x (at least 1), and u the law of `UnigramDrafter`,
    ``q(y | x) = (k(x, y) + r(x) u(y)) / (N(x) + D(x))``: Witten and Bell's rule (1991),
    where k is n for the K most frequent followers of x (of equals the lower ids) and 0
    for all others, and ``r(x) = N(x) + D(x) - sum_y k(x, y)`` is what they leave.

    Attributes:
        unigram: the law that it backs off to.
        ids: ``int32[V, K]`` the followers of each id.
        counts: ``int32[V, K]`` k of them; 0: no follower.
        total: ``int32[V]`` N.
        distinct: ``int32[V]`` ids that follow.
        rule: ends a row's draft early (`chain.LengthRule`); None: none does.
    """

    unigram: UnigramDrafter
    ids: Int[Array, "V K"]
    counts: Int[Array, "V K"]
    total: Int[Array, " V"]
    distinct: Int[Array, " V"]
    rule: Any = None

    kind: ClassVar[str] = "bigram"

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> BigramDrafter:
        """One that has counted nothing, of the target's vocabulary.

        Args:
            target: has a `vocab_size`.
            settings: `successors`, K; by default 32.
            key: unused.

        Raises:
            InputError: another setting, or K below 1.
        """
        check_known(settings, ("successors",), cls.kind)
        successors = settings.get("successors", _SUCCESSORS)
        return count_tables([], target.vocab_size, successors=successors)

    def settings(self) -> dict[str, Any]:
        """How many followers each id has."""
        return {"successors": self.ids.shape[1]}

    @property
    def vocab_size(self) -> int:
        """Ids that the tables know."""
        return self.ids.shape[0]

    def probs(self, last: Int[Array, " B"]) -> Float[Array, "B V"]:
        """The law after each of these tokens."""
        kept = self.counts[last].astype(jnp.float32)
        distinct = jnp.maximum(self.distinct[last], 1)
        mass = (self.total[last] + distinct).astype(jnp.float32)[:, None]
        left = mass - jnp.sum(kept, axis=1, keepdims=True)
        law = left / mass * self.unigram.probs(last)
        return jax.vmap(lambda own, ids, more: own.at[ids].add(more))(
            law, self.ids[last], kept / mass
        )


def count_tables(
    rows: Iterable[Sequence[int] | Int[np.ndarray, " T"]],
    vocab_size: int,
    *,
    successors: int = _SUCCESSORS,
    start_id: int = 0,
) -> BigramDrafter:
    """Counts a corpus; the drafter's `unigram` is the other drafter.

    Args:
        rows: the token ids of each text, as a decoder writes them: without the start
            token, and with the end of sequence where the text ends there.
        vocab_size: of the target, padding of its embedding included.
        successors: K, how many followers of each id are kept.
        start_id: the decoder's start token, which the first of each row follows.

    Raises:
        InputError: an id outside the vocabulary, K below 1, or more tokens than an
            int32 counts.
    """
    if not isinstance(successors, int | np.integer) or successors < 1:
        raise InputError(
            f"successors is {successors!r}: followers kept for each id, a whole "
            "number, at least 1"
        )
    texts = [np.asarray(row, np.int64) for row in rows]
    for number, text in enumerate(texts):
        wrong = (text < 0) | (text >= vocab_size)
        if wrong.any():
            place = int(wrong.argmax())
            raise InputError(
                f"rows[{number}][{place}] is {text[place]}: the vocabulary has ids 0 "
                f"to {vocab_size - 1}"
            )
    after = np.concatenate([np.zeros(0, np.int64), *texts])
    if len(after) >= 2**31:
        raise InputError(f"the rows have {len(after)} tokens: at most 2**31 - 1")
    start = np.array([start_id], np.int64)
    before = np.concatenate(
        [np.zeros(0, np.int64)]
        + [np.append(start, text)[: len(text)] for text in texts]
    )
    pairs, found = np.unique(before * vocab_size + after, return_counts=True)
    first, second = pairs // vocab_size, pairs % vocab_size
    order = np.lexsort((second, -found, first))
    first, second, found = first[order], second[order], found[order]
    distinct = np.bincount(first, minlength=vocab_size)
    place = np.arange(len(first)) - (np.cumsum(distinct) - distinct)[first]
    kept = place < successors
    ids = np.zeros((vocab_size, successors), np.int32)
    counts = np.zeros_like(ids)
    ids[first[kept], place[kept]] = second[kept]
    counts[first[kept], place[kept]] = found[kept]

    def whole(array: np.ndarray) -> Array:
        return jnp.asarray(array, jnp.int32)

    return BigramDrafter(
        unigram=UnigramDrafter(whole(np.bincount(after, minlength=vocab_size))),
        ids=whole(ids),
        counts=whole(counts),
        total=whole(np.bincount(before, minlength=vocab_size)),
        distinct=whole(distinct),
    )
