"""The records of a decode: counters, trace, the loop's carry, the result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import trees
from specjax.drafters.base import DraftState
from specjax.models.base import Cache
from specjax.types import DraftBlock, Prefix

# Purposes that a row's key is folded with, so that no two uses share noise.
SAMPLE, DRAFT, VERIFY = 0, 1, 2


def fold_rows(keys: Key[Array, " B"], data: int | Int[Array, " B"]) -> Key[Array, " B"]:
    """Each row's key folded with one number for all of them, or with its own."""
    axis = None if isinstance(data, int) else 0
    return jax.vmap(jax.random.fold_in, in_axes=(0, axis))(keys, data)


@struct.dataclass
class Stats:
    """What a decode did, per row.

    Attributes:
        target_calls: ``int32[B]`` target passes while the row was unfinished.
        emitted: ``int32[B]`` tokens written, after the cut at EOS, stop or budget.
        drafted: ``int32[B, G]`` target calls for which a token was drafted at each
            depth (in a tree: one or several).
        accepted: ``int32[B, G]`` of these, accepted; verdicts before the cut.
    """

    target_calls: Int[Array, " B"]
    emitted: Int[Array, " B"]
    drafted: Int[Array, "B G"]
    accepted: Int[Array, "B G"]


@struct.dataclass
class Trace:
    """Every target call of a decode, for pictures and debugging.

    Attributes:
        tokens: ``int32[B, R, N]`` drafted ids of call r.
        p: ``float32[B, R, N]`` their target probability.
        q: ``float32[B, R, N]`` their draft probability (0 where unknown).
        length: ``int32[B, R]`` how many were drafted.
        num_accepted: ``int32[B, R]`` how many stood.
        next_token: ``int32[B, R]`` the corrected or bonus token.
        parents: ``int32[B, R, N + 1]`` of a tree; None: chains.
        path: ``int32[B, R, G]`` nodes that stood, of a tree; None: chains.
    """

    tokens: Int[Array, "B R N"]
    p: Float[Array, "B R N"]
    q: Float[Array, "B R N"]
    length: Int[Array, "B R"]
    num_accepted: Int[Array, "B R"]
    next_token: Int[Array, "B R"]
    parents: Int[Array, "B R M"] | None = None
    path: Int[Array, "B R G"] | None = None


@struct.dataclass
class DecodeState:
    """The loop's carry.

    Attributes:
        tokens: ``int32[B, L]`` the buffer; pad past `length`.
        length: ``int32[B]`` valid tokens, prefix included.
        start: ``int32[B]`` length of the prefix.
        limit: ``int32[B]`` the length at which the row ends for want of budget.
        done: ``bool[B]`` finished rows write and count nothing.
        cache: the target's memory.
        draft_state: the drafter's memory; None when autoregressive.
        stats: counters.
        log_probs: ``float32[B, L]`` or None.
        trace: or None.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    start: Int[Array, " B"]
    limit: Int[Array, " B"]
    done: Bool[Array, " B"]
    cache: Cache
    draft_state: DraftState
    stats: Stats
    log_probs: Float[Array, "B L"] | None = None
    trace: Trace | None = None


@struct.dataclass
class DecodeOutput:
    """The result of a decode.

    Attributes:
        tokens: ``int32[B, max_length]`` prefix, then output, EOS included, then pad.
        length: ``int32[B]`` valid tokens.
        stats: counters.
        log_probs: ``float32[B, max_length]`` log-softmax of the raw target logits (dead
            rows masked) at each emitted token; 0 at the prefix and past the end.
        trace: every target call, where asked for.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    stats: Stats
    log_probs: Float[Array, "B L"] | None = None
    trace: Trace | None = None


def block_prefix(state: DecodeState, block: DraftBlock) -> Prefix:
    """The prefix of each scored position, with the block written in tentatively."""
    if block.parents is not None:
        tokens, length = jax.vmap(trees.write_paths)(
            state.tokens, state.length, block.tokens, block.parents
        )
        return Prefix(tokens=tokens, length=length)
    fed = jnp.arange(block.tokens.shape[1] + 1, dtype=jnp.int32)
    length = state.length[:, None] + fed[None]
    rows = jnp.arange(length.shape[0])[:, None]
    tokens = state.tokens.at[rows, length[:, :-1]].set(block.tokens, mode="drop")
    return Prefix(tokens=tokens, length=length)
