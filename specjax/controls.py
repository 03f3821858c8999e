"""Edits of one position's logits that depend on what precedes it.

They stand in `sampling.Sampling.controls` and run, in order, at every drafted position
and on both models, so that speculation writes what plain decoding under the same
controls writes. What stands already is the decoder's text, prefix and start token
included; the source is no part of it.

The numbers of a control are traced, so that a new value compiles nothing, and each may
be one for all rows or one per row. A ban that would leave no id at all bans nothing at
that position. First tokens are forced by the decoder prefix of the loops, not here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError
from specjax.types import Prefix

Number = float | int | Array
AnyControl = TypeVar("AnyControl")


class Control(Protocol):
    """A function of the prefix that edits one position's logits. A frozen pytree.

    One that has `settings` (name -> `Setting`, of every field that holds numbers) is
    checked before anything compiles, and its numbers may have a row each; `__call__`
    sees those of its own row.
    """

    def __call__(
        self, logits: Float[Array, " V"], tokens: Int[Array, " L"], length: Array
    ) -> Float[Array, " V"]:
        """Edited logits of the token that follows ``tokens[:length]``."""
        ...


class Setting(NamedTuple):
    """What a field of a control may hold.

    Attributes:
        holds: which values make sense, by entry or as a whole.
        wanted: the same in words.
        dtype: that it is computed with.
        rank: axes of one row's value.
        is_id: whether it holds ids, which the vocabulary must have (-1: none).
    """

    holds: Callable[[Any], Any]
    wanted: str
    dtype: DTypeLike = jnp.int32
    rank: int = 0
    is_id: bool = False


# Of a value for all rows, or for each.
_SHAPES = {
    0: "one number, or one per row",
    1: "[ids], or [rows, ids]",
    2: "[sequences, ids], or [rows, sequences, ids]",
}
_START = Setting(lambda x: x >= 0, "a place in the text, at least 0")


@struct.dataclass
class MinLength:
    """Rules out the end of sequence before a text has its least length.

    Stop sequences end a row all the same.

    Attributes:
        length: least tokens of a finished text, counted as ``max_length`` counts:
            prefix, start token and EOS included.
        eos_id: that ends a row.
    """

    length: Number
    eos_id: Number = 1

    settings: ClassVar[Mapping[str, Setting]] = {
        "length": Setting(lambda x: x >= 1, "tokens of a whole text, at least 1"),
        "eos_id": Setting(lambda x: x >= 0, "the id that ends a row", is_id=True),
    }

    def __call__(
        self, logits: Float[Array, " V"], tokens: Int[Array, " L"], length: Array
    ) -> Float[Array, " V"]:
        """Bans EOS where it would come too early."""
        ids = jnp.arange(len(logits), dtype=jnp.int32)
        return _without(logits, (ids == self.eos_id) & (length + 1 < self.length))


@struct.dataclass
class BannedTokens:
    """Never writes some ids.

    Attributes:
        ids: ``int32[K]``, or ``[B, K]``; -1 is none, so that fewer ids need no other
            program.
    """

    ids: Array

    settings: ClassVar[Mapping[str, Setting]] = {
        "ids": Setting(lambda x: x >= -1, "ids, or -1 for none", rank=1, is_id=True)
    }

    def __call__(
        self, logits: Float[Array, " V"], tokens: Int[Array, " L"], length: Array
    ) -> Float[Array, " V"]:
        """Bans them anywhere."""
        return _without(logits, _among(self.ids, self.ids >= 0, len(logits)))


@struct.dataclass
class BannedSequences:
    """Never completes some sequences of ids.

    A sequence may begin in the prefix. Text that another sequence of ids spells is not
    ruled out.

    Attributes:
        sequences: ``int32[K, M]``, or ``[B, K, M]``, padded with -1 on the right; of
            one id: that id. A row of -1 alone is none.
    """

    sequences: Array

    settings: ClassVar[Mapping[str, Setting]] = {
        "sequences": Setting(
            lambda x: (
                (x >= -1).all() and not ((x < 0)[..., :-1] & (x >= 0)[..., 1:]).any()
            ),
            "sequences of ids, padded with -1 on the right",
            rank=2,
            is_id=True,
        )
    }

    def __call__(
        self, logits: Float[Array, " V"], tokens: Int[Array, " L"], length: Array
    ) -> Float[Array, " V"]:
        """Bans the last id of each sequence whose others stand last in the text."""
        sizes = jnp.sum(self.sequences >= 0, axis=1, dtype=jnp.int32)[:, None]
        back = jnp.arange(1, self.sequences.shape[1], dtype=jnp.int32)[None]

        def from_end(places: Array) -> Array:
            places = jnp.maximum(places, 0)
            return jnp.take_along_axis(self.sequences, places, axis=1)

        looked = length - back
        stands = tokens[jnp.maximum(looked, 0)]
        fits = (from_end(sizes - 1 - back) == stands) & (looked >= 0)
        complete = jnp.all(fits | (back >= sizes), axis=1) & (sizes[:, 0] > 0)
        last = from_end(sizes - 1)[:, 0]
        return _without(logits, _among(last, complete, len(logits)))


@struct.dataclass
class RepetitionPenalty:
    """Makes ids that stand already less likely, however often they do.

    Attributes:
        penalty: above 1 against repeating, below 1 for it. A positive logit is divided
            by it, a negative one multiplied.
        start: tokens before this place do not count: 1 leaves out the start token, the
            length of the prefix all that was given.

    Source: Keskar et al. 2019 (CTRL, arXiv:1909.05858), section 4.1, where every logit
    is divided; dividing a negative one would make it likelier.
    """

    penalty: Number
    start: Number = 0

    settings: ClassVar[Mapping[str, Setting]] = {
        "penalty": Setting(lambda x: x > 0, "above 0", jnp.float32),
        "start": _START,
    }

    def __call__(
        self, logits: Float[Array, " V"], tokens: Int[Array, " L"], length: Array
    ) -> Float[Array, " V"]:
        """Divides or multiplies the logits of what stands."""
        stands = _counts(tokens, self.start, length, len(logits)) > 0
        away = jnp.where(logits > 0, logits / self.penalty, logits * self.penalty)
        return jnp.where(stands, away, logits)


@struct.dataclass
class CountPenalty:
    """Takes from the logit of an id for each time that it stands, and for standing.

    Attributes:
        frequency: taken once per occurrence. 0: off; negative: for repeating.
        presence: taken once from all that stand.
        start: as of `RepetitionPenalty`.

    Source: frequency and presence penalties of OpenAI's API, which count what was
    generated: a `start` at the length of the prefix.
    """

    frequency: Number = 0.0
    presence: Number = 0.0
    start: Number = 0

    settings: ClassVar[Mapping[str, Setting]] = {
        "frequency": Setting(np.isfinite, "a finite number", jnp.float32),
        "presence": Setting(np.isfinite, "a finite number", jnp.float32),
        "start": _START,
    }

    def __call__(
        self, logits: Float[Array, " V"], tokens: Int[Array, " L"], length: Array
    ) -> Float[Array, " V"]:
        """Subtracts both."""
        counts = _counts(tokens, self.start, length, len(logits))
        counts = counts.astype(logits.dtype)
        return logits - self.frequency * counts - self.presence * jnp.minimum(counts, 1)


@struct.dataclass
class NoRepeatNgram:
    """Never writes an n-gram twice.

    Attributes:
        size: n; 1: no id twice.
        start: as of `RepetitionPenalty`: n-grams that begin before it do not count.

    Source: Paulus, Xiong, Socher 2017 (arXiv:1705.04304), section 2.5, with trigrams.
    """

    size: Number
    start: Number = 0

    settings: ClassVar[Mapping[str, Setting]] = {
        "size": Setting(lambda x: x >= 1, "tokens of an n-gram, at least 1"),
        "start": _START,
    }

    def __call__(
        self, logits: Float[Array, " V"], tokens: Int[Array, " L"], length: Array
    ) -> Float[Array, " V"]:
        """Bans what followed the last n - 1 tokens wherever they stood before."""
        places = jnp.arange(len(tokens), dtype=jnp.int32)
        size = jnp.asarray(self.size, jnp.int32)

        def narrow(back: Array, follows: Array) -> Array:
            stood = tokens[jnp.maximum(places - back, 0)]
            return follows & (stood == tokens[jnp.maximum(length - back, 0)])

        first = self.start + size - 1  # place of the last token of the first n-gram
        follows = (places >= first) & (places < length)
        # An n-gram longer than the buffer has no place in it: nothing to compare.
        ends = jnp.where(size > len(tokens), 1, size)
        follows = jax.lax.fori_loop(jnp.int32(1), ends, narrow, follows)
        return _without(logits, _among(tokens, follows, len(logits)))


def apply_control(
    control: Control, logits: Float[Array, "B T V"], prefix: Prefix
) -> Float[Array, "B T V"]:
    """A control at every position of every row.

    Args:
        control: any.
        logits: of the token that follows each position.
        prefix: what precedes each.
    """
    own = 0 if prefix.tokens.ndim == 3 else None

    def of_row(control: Any, logits: Array, tokens: Array, length: Array) -> Array:
        return jax.vmap(control, in_axes=(0, own, 0))(logits, tokens, length)

    row = (logits, prefix.tokens, prefix.length)
    if not _settings(control):
        return jax.vmap(functools.partial(of_row, control))(*row)
    return jax.vmap(of_row)(by_row(control, logits.shape[0]), *row)


def by_row(control: AnyControl, batch: int, times: int = 1) -> AnyControl:
    """The control with a value of its own in each row, one with settings.

    Args:
        control: any; one without settings stays as it is.
        batch: rows.
        times: copies of each row, one after the other.
    """

    def spread(name: str, setting: Setting) -> Array:
        value = jnp.asarray(getattr(control, name))
        if value.ndim == setting.rank:
            value = jnp.broadcast_to(value[None], (batch, *value.shape))
        return jnp.repeat(value, times, axis=0) if times > 1 else value

    return _edited(control, spread)


def control_rows(control: AnyControl, rows: Int[Array, " K"]) -> AnyControl:
    """The control of some rows of a batch; what is one for all rows stays.

    Args:
        control: any; one without settings stays as it is.
        rows: numbers of rows.
    """

    def taken(name: str, setting: Setting) -> Array:
        value = jnp.asarray(getattr(control, name))
        return value if value.ndim == setting.rank else value[rows]

    return _edited(control, taken)


def with_fixed_types(control: AnyControl) -> AnyControl:
    """The control with numbers as arrays of fixed type, so that none retraces."""

    def fix(name: str, setting: Setting) -> Array:
        return jnp.asarray(getattr(control, name), setting.dtype)

    return _edited(control, fix)


def check_control(control: Any, name: str, batch_size: int | None = None) -> None:
    """Refuses numbers that mean nothing; of a control without settings, none.

    Args:
        control: with concrete numbers; traced ones pass.
        name: how the caller names the settings that it stands in.
        batch_size: rows, where numbers by row are to be checked against it.

    Raises:
        InputError: naming the field and what it must be.
    """
    for field, setting in _settings(control).items():
        value = getattr(control, field)
        if isinstance(value, jax.core.Tracer):
            continue
        title = f"{name}.controls: {type(control).__name__}.{field}"
        numbers = np.asarray(value)
        has_rows = numbers.ndim == setting.rank + 1
        if (
            numbers.ndim not in (setting.rank, setting.rank + 1)
            or not numbers.size
            or (has_rows and batch_size not in (None, numbers.shape[0]))
        ):
            rows = "" if batch_size is None else f" ({batch_size} rows)"
            raise InputError(
                f"{title} has shape {numbers.shape}: it must be {_SHAPES[setting.rank]}"
                f"{rows}"
            )
        fits = np.isfinite(numbers)
        if np.issubdtype(setting.dtype, np.integer):
            if not np.issubdtype(numbers.dtype, np.integer):
                raise InputError(f"{title} is {value}: it must be whole numbers")
            fits = np.abs(numbers.astype(np.float64)) < 2**31
        if not np.all(fits & setting.holds(numbers)):
            raise InputError(f"{title} is {value}: it must be {setting.wanted}")


def check_vocabulary(control: Any, name: str, vocab_size: int) -> None:
    """Refuses ids that the model does not have: a ban of them would be no ban.

    Args:
        control: with concrete numbers; traced ones pass.
        name: how the caller names the settings that it stands in.
        vocab_size: ids of the model.

    Raises:
        InputError: naming the first such id.
    """
    for field, setting in _settings(control).items():
        value = getattr(control, field)
        if not setting.is_id or isinstance(value, jax.core.Tracer):
            continue
        ids = np.asarray(value).ravel()
        if np.any(ids >= vocab_size):
            raise InputError(
                f"{name}.controls: {type(control).__name__}.{field} has the id "
                f"{ids[ids >= vocab_size][0]}: the target has ids 0 to {vocab_size - 1}"
            )


def _settings(control: Any) -> Mapping[str, Setting]:
    # Asked so, because a control may be any function.
    found: Mapping[str, Setting] = getattr(control, "settings", {})
    return found


def _edited(control: AnyControl, edit: Callable[[str, Setting], Array]) -> AnyControl:
    settings = _settings(control)
    if not settings:
        return control
    new = {name: edit(name, setting) for name, setting in settings.items()}
    return control.replace(**new)  # type: ignore[attr-defined]


def _without(
    logits: Float[Array, " V"], banned: Bool[Array, " V"]
) -> Float[Array, " V"]:
    """-inf at what is banned, unless nothing would be left."""
    left = jnp.where(banned, -jnp.inf, logits)
    return jnp.where(jnp.any(left > -jnp.inf), left, logits)


def _among(
    ids: Int[Array, " N"], counted: Bool[Array, " N"], vocab_size: int
) -> Bool[Array, " V"]:
    """Which ids of the vocabulary are among those that count."""
    where = jnp.where(counted, ids, vocab_size)
    return jnp.zeros(vocab_size, bool).at[where].set(True, mode="drop")


def _counts(
    tokens: Int[Array, " L"], start: Number, length: Array, vocab_size: int
) -> Int[Array, " V"]:
    """How often each id stands from `start` on."""
    places = jnp.arange(len(tokens), dtype=jnp.int32)
    where = jnp.where((places >= start) & (places < length), tokens, vocab_size)
    return jnp.zeros(vocab_size, jnp.int32).at[where].add(1, mode="drop")
