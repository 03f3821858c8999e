"""Where the last tokens stand in stored texts, and what followed: for all that copies.

Texts stand one after another in one row of tokens. Beside each token stands its
position in its own text, from 0 on, or -1 where nothing is stored: so a token and the
one `n` places before it are of one text where its position is at least n.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.errors import InputError
from specjax.types import DraftBlock, Law


@struct.dataclass
class Sources:
    """The memory of a drafter that copies: nothing else is kept between steps.

    Attributes:
        inputs: ``int32[B, S]`` source ids.
        mask: ``bool[B, S]`` True at real source tokens.
    """

    inputs: Int[Array, "B S"]
    mask: Bool[Array, "B S"]


def check_longest(longest: int, name: str, size: int) -> None:
    """Refuses a match that no text of a decode can have.

    Args:
        longest: tokens of the longest match that is looked for.
        name: how the drafter names it.
        size: slots of the token buffer.

    Raises:
        InputError: it is below 1, or longer than the buffer.
    """
    if longest < 1:
        raise InputError(f"{name} is {longest}: it must be at least 1")
    if longest > size:
        raise InputError(
            f"{name} is {longest} and this decode holds {size} tokens: no match can be "
            "that long; lower it, or raise max_length"
        )


def source_and_output(
    inputs: Int[Array, " S"],
    mask: Bool[Array, " S"],
    tokens: Int[Array, " L"],
    length: Int[Array, ""],
) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """One request's own texts, and the positions of their tokens.

    The decoder's start token stands before the source too, so that a first draft is the
    source's own beginning.

        text       [start, source .............., start, output ...............]
        position    0      1 .. S                 0      1 .. length-1
    """
    source = jnp.arange(1, inputs.shape[0] + 1, dtype=jnp.int32)
    output = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    position = [
        jnp.zeros(1, jnp.int32),
        jnp.where(mask, source, -1),
        jnp.where(output < length, output, -1),
    ]
    return jnp.concatenate([tokens[:1], inputs, tokens]), jnp.concatenate(position)


def last_tokens(
    tokens: Int[Array, " L"], length: Int[Array, ""], count: int
) -> Int[Array, " M"]:
    """The `count` last tokens of a text, the latest first; -1 where it has no more."""
    place = length - 1 - jnp.arange(count, dtype=jnp.int32)
    return jnp.where(place >= 0, tokens[jnp.maximum(place, 0)], -1)


def match_lengths(
    text: Int[Array, " N"], position: Int[Array, " N"], recent: Int[Array, " M"]
) -> Int[Array, " N"]:
    """How many of the last tokens, counted backwards, stand up to each place.

    Args:
        text: stored tokens.
        position: of each in its own text.
        recent: see `last_tokens`.
    """
    matched = jnp.zeros_like(position)
    alive = position >= 0
    for back in range(recent.shape[0]):
        # Neither a token nor the -1 of `recent` is -2.
        earlier = jnp.pad(text, (back, 0), constant_values=-2)[: text.shape[0]]
        alive = alive & (earlier == recent[back]) & (position >= back)
        matched = matched + alive.astype(matched.dtype)
    return matched


def has_next(position: Int[Array, " N"]) -> Bool[Array, " N"]:
    """Whether a token of the same text follows each place."""
    return jnp.append(position[1:] > 0, False)


def what_followed(
    text: Int[Array, " N"],
    position: Int[Array, " N"],
    places: Int[Array, "*K"],
    count: int,
) -> Int[Array, "*K G"]:
    """The `count` tokens after each place; -1 from the end of its text on."""
    offset = jnp.arange(1, count + 1, dtype=jnp.int32)
    offset = jnp.expand_dims(offset, range(places.ndim))
    after = places[..., None] + offset
    inside = after < text.shape[0]
    after = jnp.minimum(after, text.shape[0] - 1)
    same = inside & (position[after] >= offset)
    return jnp.where(jnp.cumprod(same, axis=-1) > 0, text[after], -1)


def copied_block(tokens: Int[Array, "B G"], length: Int[Array, " B"]) -> DraftBlock:
    """A block whose law is one-hot: token x is accepted with the target's p(x)."""
    # What is not real must be an id all the same.
    ids = jnp.maximum(tokens, 0)[..., None]
    law = Law(probs=jnp.ones(ids.shape, jnp.float32), ids=ids)
    return DraftBlock(tokens=ids[..., 0], length=length, law=law)
