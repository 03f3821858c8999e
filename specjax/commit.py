"""What follows a verdict: tokens are written, cut and counted, row by row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array

from specjax import trees
from specjax.decode_state import DecodeState, Stats, Trace
from specjax.rows import put, take
from specjax.sampling import mask_dead_rows
from specjax.types import DraftBlock, Law
from specjax.verify import VerifyOutput


def commit(
    state: DecodeState,
    block: DraftBlock,
    verdict: VerifyOutput,
    logits: Array,
    num_tokens: int | None,
    eos_id: int | Array,
    stop: Array | None,
) -> DecodeState:
    """Writes accepted tokens and the next one, cut at EOS, stop and budget; counts.

    A finished row writes nothing: its positions are sent past the end and dropped.

    Args:
        state: before the step, but for the target's cache and the drafter's state.
        block: what was drafted.
        verdict: what stands of it.
        logits: the target's, after each fed token.
        num_tokens: ids with a meaning, for the log-probabilities.
        eos_id: ends a row.
        stop: sequences that end a row.
    """
    batch, gamma = state.stats.drafted.shape
    size = state.tokens.shape[1]
    offset = jnp.arange(gamma + 1, dtype=jnp.int32)[None]
    num_accepted = verdict.num_accepted[:, None]
    drafted, nodes = block.tokens, jnp.broadcast_to(offset, (batch, gamma + 1))
    if verdict.path is not None:
        drafted = jnp.take_along_axis(drafted, verdict.path - 1, axis=1, mode="clip")
        nodes = jnp.pad(verdict.path, ((0, 0), (1, 0)))
    drafted = jnp.pad(drafted, ((0, 0), (0, 1)))
    emitted = jnp.where(
        offset < num_accepted, drafted, verdict.next_token[:, None]
    ).astype(jnp.int32)
    place = state.length[:, None] + offset

    ends = emitted == eos_id
    if stop is not None:
        ends = ends | _ends_stop(state, emitted, place, stop)
    endings = ends.astype(jnp.int32)
    ended_before = jnp.cumsum(endings, axis=1) > endings
    keep = (offset <= num_accepted) & ~ended_before & (place < state.limit[:, None])
    keep = keep & ~state.done[:, None]
    where = jnp.where(keep, place, size)
    count = jnp.sum(keep, axis=1, dtype=jnp.int32)
    length = state.length + count
    done = state.done | jnp.any(ends & keep, axis=1) | (length >= state.limit)

    log_probs = state.log_probs
    if log_probs is not None:
        # Of the target after each node of the path.
        logits = jnp.take_along_axis(logits, nodes[..., None], axis=1)
        masked = mask_dead_rows(logits, num_tokens)
        scores = jax.nn.log_softmax(masked, axis=-1)
        scores = jnp.take_along_axis(scores, emitted[..., None], axis=-1)[..., 0]
        log_probs = put(log_probs, where, scores)

    active = (~state.done).astype(jnp.int32)
    depth, deepest = offset[:, :gamma], _deepest(block)
    stats = Stats(
        target_calls=state.stats.target_calls + active,
        emitted=state.stats.emitted + count,
        drafted=state.stats.drafted
        + active[:, None] * (depth < deepest[:, None]).astype(jnp.int32),
        accepted=state.stats.accepted
        + active[:, None] * (depth < num_accepted).astype(jnp.int32),
    )
    return state.replace(
        tokens=put(state.tokens, where, emitted),
        length=length,
        done=done,
        cache=state.cache.replace(length=length - 1),
        stats=stats,
        log_probs=log_probs,
    )


def _deepest(block: DraftBlock) -> Array:
    """Depth of each row's deepest real drafted token; 0 where there is none."""
    if block.parents is None:
        return block.length
    depth = jax.vmap(trees.depths)(block.parents)
    node = jnp.arange(depth.shape[1], dtype=jnp.int32)[None]
    return jnp.max(jnp.where(node <= block.length[:, None], depth, 0), axis=1)


def _ends_stop(state: DecodeState, emitted: Array, place: Array, stop: Array) -> Array:
    """Whether a stop sequence, all after the prefix, is complete at each place."""
    tokens = put(state.tokens, place, emitted)
    size = stop.shape[1]
    lengths = jnp.sum(stop >= 0, axis=1)  # [K]
    back = jnp.arange(size)[None]
    # Token `back` places before the end must be the sequence's own, counted from its
    # end.
    wanted = jnp.take_along_axis(stop, jnp.maximum(lengths[:, None] - 1 - back, 0), 1)
    looked = place[:, :, None] - back[None]
    seen = take(tokens, jnp.maximum(looked, 0))
    new = looked >= state.start[:, None, None]
    equal = (seen[:, :, None] == wanted[None, None]) & new[:, :, None]
    equal = equal | (back >= lengths[:, None])[None, None]
    return jnp.any(jnp.all(equal, -1) & (lengths > 0)[None, None], -1)


def record(
    trace: Trace,
    state: DecodeState,
    block: DraftBlock,
    law: Law,
    verdict: VerifyOutput,
) -> Trace:
    """Writes this step as the next call of each unfinished row."""
    calls = jnp.where(state.done, trace.length.shape[1], state.stats.target_calls)
    unknown = jnp.zeros(block.tokens.shape)
    now = Trace(
        tokens=block.tokens,
        p=_drawn_at(law, block),
        q=unknown if block.law is None else _drawn_at(block.law, block),
        length=block.length,
        num_accepted=verdict.num_accepted,
        next_token=verdict.next_token,
        parents=block.parents,
        path=verdict.path,
    )
    return jax.tree.map(lambda old, new: put(old, calls, new), trace, now)


def _drawn_at(law: Law, block: DraftBlock) -> Array:
    """Probability of each drafted token after the token above it, ``[B, N]``."""
    count = block.tokens.shape[1]
    if block.parents is None:
        return law.replace(
            probs=law.probs[:, :count],
            ids=None if law.ids is None else law.ids[:, :count],
        ).at(block.tokens)
    above = block.parents[:, 1:, None]
    return jax.tree.map(lambda x: jnp.take_along_axis(x, above, axis=1), law).at(
        block.tokens
    )
