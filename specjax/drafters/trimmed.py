"""A draft model with a cheaper head: cut to the frequent tokens, or of low rank.

At every step a small draft reads its head, which for a large vocabulary is much of what
it reads. Neither cut biases the output: what the head cannot say has draft probability
0, and the rule of verification makes up for it.

FR-Spec (Zhao et al. 2025, arXiv:2502.14856): frequent tokens alone. SlimSpec
(arXiv:2605.10453): low rank.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int64

from specjax.errors import InputError, is_whole
from specjax.models.dense import Weight, dense
from specjax.models.t5 import T5

# The logit of an id that is not kept. Not -inf: where a control bans all ids that are
# kept, some law must be left to draft from.
_ABSENT = -1e30
_SENTINEL = re.compile(r"▁?<extra_id_\d+>")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@struct.dataclass
class KeptRows(Weight):
    """Some rows of a head; all other ids have a probability of 0.

    Attributes:
        rows: ``[K, D]`` those that are kept.
        places: ``int32[V]`` which row each id has; K: none.
    """

    rows: Float[Array, "K D"]
    places: Int[Array, " V"]

    def multiply(self, x: Float[Array, "*rows D"], dtype: DTypeLike) -> Array:
        """Logits of all V ids."""
        kept = dense(x, self.rows, dtype)
        padding = [(0, 0)] * (kept.ndim - 1) + [(0, 1)]
        # A look-up: XLA's CPU backend writes a scatter number by number.
        padded = jnp.pad(kept, padding, constant_values=_ABSENT)
        return jnp.take(padded, self.places, axis=-1, mode="clip")


@struct.dataclass
class LowRank(Weight):
    """A head as a product of two thin ones.

    Attributes:
        up: ``[V, R]``.
        down: ``[R, D]``.
    """

    up: Float[Array, "V R"]
    down: Float[Array, "R D"]

    def multiply(self, x: Float[Array, "*rows D"], dtype: DTypeLike) -> Array:
        """Logits of all V ids."""
        return dense(dense(x, self.down), self.up, dtype)


def trim_head(model: T5, kept: Sequence[int] | Int[np.ndarray, " K"]) -> T5:
    """The model with a head that knows some ids alone.

    Without the end of sequence among them the draft never proposes to end, which costs
    speed and nothing else; see `frequent_tokens`.

    Args:
        model: any draft; it shares its other arrays with the result.
        kept: ids, in any order.

    Raises:
        InputError: there is none, one comes twice, or the model lacks one.
    """
    ids, size = np.sort(np.asarray(kept, np.int64)), model.vocab_size
    if ids.size == 0:
        raise InputError("no id is kept: a draft must be able to say something")
    if ids[0] < 0 or ids[-1] >= size:
        wrong = ids[0] if ids[0] < 0 else ids[-1]
        raise InputError(f"id {wrong} is kept: the draft has ids 0 to {size - 1}")
    twice = ids[1:][ids[1:] == ids[:-1]]
    if twice.size:
        raise InputError(f"id {twice[0]} is kept twice")
    places = np.full(size, ids.size, np.int32)
    places[ids] = np.arange(ids.size)
    rows = _head(model)[jnp.asarray(ids)]
    return _with_head(model, KeptRows(rows, jnp.asarray(places)))


def low_rank_head(model: T5, rank: int) -> T5:
    """The model with its head replaced by the nearest one of a rank.

    Args:
        model: any draft; it shares its other arrays with the result.
        rank: from 1 to below the model's width.

    Raises:
        InputError: another rank.
    """
    head = _head(model)
    width = head.shape[1]
    if not is_whole(rank) or not 0 < rank < width:
        raise InputError(
            f"the head's rank is {rank!r}: a whole number from 1 to {width - 1}, below "
            "the draft's width"
        )
    # The right singular vectors, of a matrix that is [D, D] and not [V, D].
    wide = np.asarray(head.astype(jnp.float32), np.float64)
    down = np.linalg.eigh(wide.T @ wide)[1][:, ::-1][:, :rank].T
    up = wide @ down.T
    return _with_head(
        model, LowRank(jnp.asarray(up, head.dtype), jnp.asarray(down, head.dtype))
    )


def head_bytes(model: T5) -> int:
    """Bytes that a decoding step reads of the head.

    Of V ids, width D and b bytes a number: V D b; with K ids kept K D b and 4 V (which
    row each id has); of rank R: R (V + D) b.
    """
    weight = model.embedding if model.head is None else model.head
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weight))


def frequent_tokens(
    rows: Iterable[Iterable[int]], keep: Iterable[int], size: int, num_tokens: int
) -> Int64[np.ndarray, " K"]:
    """The ids that outputs hold most often, and those that are always kept.

    Args:
        rows: outputs as token ids: of the target, on the task.
        keep: ids that stay whatever the counts say; see `always_kept`.
        size: how many ids to keep.
        num_tokens: ids that have a meaning. Among ids that are equally frequent, the
            lower ones are kept first: in a unigram vocabulary they are the likelier.

    Returns:
        `size` ids, in order.

    Raises:
        InputError: an id that has no meaning, or `size` does not hold those of `keep`,
            or is not below `num_tokens`.
    """
    kept = set(keep)
    counts = collections.Counter(int(token) for row in rows for token in row)
    for index in kept | counts.keys():
        if not 0 <= index < num_tokens:
            raise InputError(
                f"id {index} is to be kept or counted: ids are 0 to {num_tokens - 1}"
            )
    if not len(kept) <= size < num_tokens:
        raise InputError(
            f"{size} ids are to be kept: from {len(kept)} (what ends a text, digits, "
            f"punctuation, sentinels) to {num_tokens - 1}, below the vocabulary's own "
            "number"
        )
    others = (index for index in range(num_tokens) if index not in kept)
    ranked = sorted(others, key=lambda index: -counts[index])
    return np.sort(np.array([*kept, *ranked[: size - len(kept)]], np.int64))


def always_kept(pieces: Sequence[str], eos_id: int) -> tuple[int, ...]:
    """Ids that no draft should lose: EOS, sentinels, and what has no letter.

    Digits, punctuation and spaces are rare one by one, and a text that needs one needs
    that one.

    Args:
        pieces: the vocabulary's spelling of each id, in order.
        eos_id: of the end of sequence.
    """
    return tuple(
        index
        for index, piece in enumerate(pieces)
        if index == eos_id or _SENTINEL.fullmatch(piece) or _has_no_letter(piece)
    )


def _has_no_letter(piece: str) -> bool:
    byte = _BYTE.fullmatch(piece)
    if byte:
        value = int(byte[1], 16)
        return value < 128 and not chr(value).isalpha()
    return not any(character.isalpha() for character in piece)


def _head(model: T5) -> jax.Array:
    """The head as plain numbers.

    Raises:
        InputError: it is cut already.
    """
    weight = (model.embedding if model.head is None else model.head)[...]
    if isinstance(weight, Weight):
        raise InputError("the draft's head is cut already: cut the model's own")
    return weight


def _with_head(model: T5, weight: Weight) -> T5:
    copy = nnx.merge(*nnx.split(model))
    copy.config = dataclasses.replace(model.config, tied_head=False)
    # A tied head is None, which is no data until told so.
    copy.head = nnx.data(nnx.Param(weight))
    return copy
