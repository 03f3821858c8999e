"""Autoregressive and speculative generation: init, a loop over one step, output.

One speculative step, for a row whose last committed token is t:

    tokens   [ ....... t | d_1  d_2  d_3 | ... ]     length counts up to and with t
    fed                t   d_1  d_2  d_3             one target pass, slots length-1 ...
    laws               p_0  p_1  p_2  p_3            p_i judges d_(i+1); p_3 gives the bonus

The invariant between steps is ``cache.length == length - 1``: the last committed token
has not been fed yet. A row is rolled back by setting its length.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import checks
from specjax.drafters.base import Committed, Drafter, DraftState
from specjax.models.base import Cache, Encoded, EncoderDecoder
from specjax.sampling import Sampling, draw_law, mask_dead_rows, with_arrays
from specjax.types import DraftBlock, Law, Noise, Prefix
from specjax.verify import Scored, Verifier, VerifyOutput, greedy_rule, token_verify

# Purposes that a row's key is folded with, so that no two uses share noise.
_SAMPLE, _DRAFT, _VERIFY = 0, 1, 2


@struct.dataclass
class Stats:
    """What a decode did, per row.

    Attributes:
        target_calls: ``int32[B]`` target passes while the row was unfinished.
        emitted: ``int32[B]`` tokens written, after the cut at EOS, stop or budget.
        drafted: ``int32[B, G]`` tokens drafted at each depth.
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
        tokens: ``int32[B, R, G]`` drafted ids of call r.
        p: ``float32[B, R, G]`` their target probability.
        q: ``float32[B, R, G]`` their draft probability (0 where unknown).
        length: ``int32[B, R]`` how many were drafted.
        num_accepted: ``int32[B, R]`` how many stood.
        next_token: ``int32[B, R]`` the corrected or bonus token.
    """

    tokens: Int[Array, "B R G"]
    p: Float[Array, "B R G"]
    q: Float[Array, "B R G"]
    length: Int[Array, "B R"]
    num_accepted: Int[Array, "B R"]
    next_token: Int[Array, "B R"]


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


def speculative_generate(
    target: EncoderDecoder,
    drafter: Drafter,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    keys: Key[Array, " B"],
    *,
    verifier: Verifier = token_verify,
    sampling: Sampling = Sampling(),  # noqa: B008 (a frozen record)
    draft_sampling: Sampling | None = None,
    gamma: int = 4,
    max_length: int = 128,
    budget: int | Array | None = None,
    prefix: Int[Array, "B P"] | None = None,
    prefix_length: Int[Array, " B"] | None = None,
    eos_id: int = 1,
    stop: Int[Array, "K M"] | None = None,
    log_probs: bool = False,
    trace: bool = False,
) -> DecodeOutput:
    """Decodes with a draft in front of the target; the output's law is the target's.

    Args:
        target: the model whose law the output follows.
        drafter: proposes tokens.
        inputs: source ids, padded on the right.
        mask: True at real source tokens.
        keys: one threefry key per row; a row's output depends on its own key alone.
        verifier: decides which drafted tokens stand.
        sampling: how the target's logits become a law.
        draft_sampling: the same for the draft; None: as `sampling`.
        gamma: most tokens drafted per target call, >= 1 (static).
        max_length: columns of the output, prefix included (static).
        budget: new tokens after the prefix, EOS included, one number or one per row;
            None: the rest of the buffer; 0: a padding row.
        prefix: decoder tokens that stand already; default: the start token 0.
        prefix_length: real tokens of each prefix; default: all.
        eos_id: ends a row.
        stop: token sequences, padded with -1, that end a row once it has written one in
            full; the sequence stays in the output.
        log_probs: also return the target's log-probabilities (static).
        trace: also return every target call (static).

    Raises:
        InputError: before anything compiles, for settings that mean nothing or do not fit
            together.

    Source: Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), per row of a batch.
    """
    draft_sampling = checks.check_speculation(
        drafter, verifier, sampling, draft_sampling, gamma, inputs.shape[0]
    )
    arguments = _arguments(
        inputs, mask, keys, sampling, max_length, budget, prefix, prefix_length, eos_id
    )
    return _speculative_loop(
        target,
        drafter,
        verifier=verifier,
        draft_sampling=with_arrays(draft_sampling),
        stop=checks.check_stop(stop),
        gamma=gamma,
        log_probs=log_probs,
        trace=trace,
        **arguments,
    )


def autoregressive_generate(
    target: EncoderDecoder,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    keys: Key[Array, " B"],
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (a frozen record)
    max_length: int = 128,
    budget: int | Array | None = None,
    prefix: Int[Array, "B P"] | None = None,
    prefix_length: Int[Array, " B"] | None = None,
    eos_id: int = 1,
    stop: Int[Array, "K M"] | None = None,
    log_probs: bool = False,
) -> DecodeOutput:
    """Decodes one token per target call: the baseline, with the same arguments.

    The token at buffer index i of a row is drawn as argmax(log p + Gumbel noise) with a
    key of that row and that index alone.
    """
    arguments = _arguments(
        inputs, mask, keys, sampling, max_length, budget, prefix, prefix_length, eos_id
    )
    return _autoregressive_loop(
        target, stop=checks.check_stop(stop), log_probs=log_probs, **arguments
    )


def _arguments(
    inputs: Array,
    mask: Array,
    keys: Array,
    sampling: Sampling,
    max_length: int,
    budget: int | Array | None,
    prefix: Array | None,
    prefix_length: Array | None,
    eos_id: int,
) -> dict[str, Any]:
    """Checks what both loops share and fixes its types, so that values never retrace."""
    batch = inputs.shape[0]
    if prefix is None:
        prefix = jnp.zeros((batch, 1), jnp.int32)
    if prefix_length is None:
        prefix_length = jnp.full(batch, prefix.shape[1], jnp.int32)
    if budget is None:
        budget = max_length
    checks.check_arguments(
        inputs, mask, keys, sampling, max_length, budget, prefix, prefix_length
    )
    return dict(
        inputs=jnp.asarray(inputs, jnp.int32),
        mask=jnp.asarray(mask, bool),
        keys=keys,
        sampling=with_arrays(sampling),
        max_length=max_length,
        budget=jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (batch,)),
        prefix=jnp.asarray(prefix, jnp.int32),
        prefix_length=jnp.asarray(prefix_length, jnp.int32),
        eos_id=jnp.asarray(eos_id, jnp.int32),
    )


@functools.partial(
    jax.jit, static_argnames=("gamma", "max_length", "log_probs", "trace")
)
def _speculative_loop(
    target: EncoderDecoder,
    drafter: Drafter,
    *,
    inputs: Array,
    mask: Array,
    keys: Array,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
    max_length: int,
    budget: Array,
    prefix: Array,
    prefix_length: Array,
    eos_id: Array,
    stop: Array | None,
    log_probs: bool,
    trace: bool,
) -> DecodeOutput:
    encoded, state = speculative_init(
        target,
        drafter,
        inputs,
        mask,
        gamma=gamma,
        max_length=max_length,
        budget=budget,
        prefix=prefix,
        prefix_length=prefix_length,
        log_probs=log_probs,
        trace=trace,
    )
    step = functools.partial(
        speculative_step,
        target,
        drafter,
        encoded,
        keys,
        verifier=verifier,
        sampling=sampling,
        draft_sampling=draft_sampling,
        gamma=gamma,
        eos_id=eos_id,
        stop=stop,
    )
    return _output(jax.lax.while_loop(_unfinished, step, state), max_length)


@functools.partial(jax.jit, static_argnames=("max_length", "log_probs"))
def _autoregressive_loop(
    target: EncoderDecoder,
    *,
    inputs: Array,
    mask: Array,
    keys: Array,
    sampling: Sampling,
    max_length: int,
    budget: Array,
    prefix: Array,
    prefix_length: Array,
    eos_id: Array,
    stop: Array | None,
    log_probs: bool,
) -> DecodeOutput:
    encoded = target.encode(inputs, mask)
    state = _init(
        target, encoded, prefix, prefix_length, budget, max_length, 0, log_probs
    )
    sample_keys = _fold(keys, _SAMPLE)

    def step(state: DecodeState) -> DecodeState:
        last = _last(state)
        output, cache = target.decode(last, state.cache, encoded)
        prefix = Prefix(tokens=state.tokens, length=state.length[:, None])
        law = sampling.law(output.logits, prefix)
        chosen = jax.vmap(lambda key, own: draw_law(key, own, 0, target.vocab_size))(
            _fold(sample_keys, state.length), law
        )
        block = DraftBlock(
            tokens=jnp.zeros((last.shape[0], 0), jnp.int32),
            length=jnp.zeros_like(state.length),
        )
        verdict = VerifyOutput(num_accepted=block.length, next_token=chosen)
        state = state.replace(cache=cache)
        return _commit(state, block, verdict, output.logits, sampling, eos_id, stop)

    return _output(jax.lax.while_loop(_unfinished, step, state), max_length)


def speculative_init(
    target: EncoderDecoder,
    drafter: Drafter,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    *,
    gamma: int,
    max_length: int,
    budget: Int[Array, " B"],
    prefix: Int[Array, "B P"],
    prefix_length: Int[Array, " B"],
    log_probs: bool = False,
    trace: bool = False,
) -> tuple[Encoded, DecodeState]:
    """Encodes the sources and feeds the prefixes: what comes before the loop.

    `speculative_generate` is this, a while loop over `speculative_step`, and the cut of
    the buffer to `max_length`; drive the step from Python to stream tokens or to look
    inside. Arguments are those of `speculative_generate`, all given.
    """
    encoded = target.encode(inputs, mask)
    state = _init(
        target, encoded, prefix, prefix_length, budget, max_length, gamma, log_probs
    )
    batch, size = state.tokens.shape
    draft_state = drafter.init(
        target, encoded, inputs, mask, prefix, prefix_length, size
    )
    if trace:
        calls = (batch, max_length)  # each call of an unfinished row writes a token
        block = calls + (gamma,)
        state = state.replace(
            trace=Trace(
                tokens=jnp.zeros(block, jnp.int32),
                p=jnp.zeros(block, jnp.float32),
                q=jnp.zeros(block, jnp.float32),
                length=jnp.zeros(calls, jnp.int32),
                num_accepted=jnp.zeros(calls, jnp.int32),
                next_token=jnp.zeros(calls, jnp.int32),
            )
        )
    return encoded, state.replace(draft_state=draft_state)


def speculative_step(
    target: EncoderDecoder,
    drafter: Drafter,
    encoded: Encoded,
    keys: Key[Array, " B"],
    state: DecodeState,
    *,
    verifier: Verifier = token_verify,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
    eos_id: int | Int[Array, ""] = 1,
    stop: Int[Array, "K M"] | None = None,
) -> DecodeState:
    """One draft, one target pass, one verdict per row: a pure function of the state."""
    draft_noise, verify_noise = _noises(keys, state, verifier)
    block, draft_state = drafter.draft(
        target,
        draft_noise,
        state.draft_state,
        state.tokens,
        state.length,
        gamma=gamma,
        sampling=draft_sampling,
    )
    fed = jnp.concatenate([_last(state), block.tokens], axis=1)
    output, cache = target.decode(fed, state.cache, encoded, taps=drafter.taps)
    law = sampling.law(output.logits, _block_prefix(state, block))
    if sampling.greedy and verifier.lossless:
        # Point masses turn every lossless rule into equality of ids.
        verdict = jax.vmap(greedy_rule)(law.ids[..., 0], block)
    else:
        scored = Scored(law=law, logits=output.logits)
        verdict = jax.vmap(verifier.rule, in_axes=(0, 0, 0, None))(
            verify_noise, block, scored, verifier.params
        )
    if state.trace is not None:
        state = state.replace(trace=_record(state, block, law, verdict))
    state = state.replace(cache=cache, draft_state=draft_state)
    state = _commit(state, block, verdict, output.logits, sampling, eos_id, stop)
    committed = Committed(
        tokens=state.tokens,
        length=state.length,
        num_accepted=verdict.num_accepted,
        features=output.features,
    )
    return state.replace(draft_state=drafter.commit(state.draft_state, committed))


def _init(
    target: EncoderDecoder,
    encoded: Encoded,
    prefix: Array,
    prefix_length: Array,
    budget: Array,
    max_length: int,
    gamma: int,
    log_probs: bool,
) -> DecodeState:
    batch, given = prefix.shape
    size = max_length + gamma + 1  # the last block never runs off the end
    cache = target.init_cache(batch, size)
    if given > 1:
        _, cache = target.decode(prefix, cache, encoded)
    real = jnp.arange(given)[None] < prefix_length[:, None]
    tokens = jnp.zeros((batch, size), jnp.int32)
    limit = jnp.minimum(prefix_length + budget, max_length)
    counts = jnp.zeros((batch, gamma), jnp.int32)
    return DecodeState(
        tokens=tokens.at[:, :given].set(jnp.where(real, prefix, 0)),
        length=prefix_length,
        start=prefix_length,
        limit=limit,
        done=limit <= prefix_length,
        cache=cache.replace(length=prefix_length - 1),
        draft_state=None,
        stats=Stats(
            target_calls=jnp.zeros(batch, jnp.int32),
            emitted=jnp.zeros(batch, jnp.int32),
            drafted=counts,
            accepted=counts,
        ),
        log_probs=jnp.zeros((batch, size), jnp.float32) if log_probs else None,
    )


def _unfinished(state: DecodeState) -> Array:
    return jnp.any(~state.done)


def _output(state: DecodeState, max_length: int) -> DecodeOutput:
    log_probs = state.log_probs
    return DecodeOutput(
        tokens=state.tokens[:, :max_length],
        length=state.length,
        stats=state.stats,
        log_probs=None if log_probs is None else log_probs[:, :max_length],
        trace=state.trace,
    )


def _fold(keys: Array, data: int | Array) -> Array:
    return jax.vmap(
        jax.random.fold_in, in_axes=(0, None if isinstance(data, int) else 0)
    )(keys, data)


def _noises(keys: Array, state: DecodeState, verifier: Verifier) -> tuple[Noise, Noise]:
    start = state.length - 1
    if verifier.noise == "position":
        # Both sides share the noise that the autoregressive sample would use.
        noise = Noise(keys=_fold(keys, _SAMPLE), start=start, by="position")
        return noise, noise.replace(keys=jax.random.clone(noise.keys))
    calls = state.stats.target_calls  # the row's own: independent of its neighbours
    return (
        Noise(keys=_fold(_fold(keys, _DRAFT), calls), start=start),
        Noise(keys=_fold(_fold(keys, _VERIFY), calls), start=start),
    )


def _last(state: DecodeState) -> Array:
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)


def _block_prefix(state: DecodeState, block: DraftBlock) -> Prefix:
    """The prefix of each scored position, with the block written in tentatively."""
    fed = jnp.arange(block.tokens.shape[1] + 1, dtype=jnp.int32)
    length = state.length[:, None] + fed[None]
    rows = jnp.arange(length.shape[0])[:, None]
    tokens = state.tokens.at[rows, length[:, :-1]].set(block.tokens, mode="drop")
    return Prefix(tokens=tokens, length=length)


def _commit(
    state: DecodeState,
    block: DraftBlock,
    verdict: VerifyOutput,
    logits: Array,
    sampling: Sampling,
    eos_id: Array,
    stop: Array | None,
) -> DecodeState:
    """Writes accepted tokens and the next one, cut at EOS, stop and budget; counts.

    A finished row writes nothing: its positions are sent past the end and dropped.
    """
    batch, gamma = block.tokens.shape
    size = state.tokens.shape[1]
    offset = jnp.arange(gamma + 1, dtype=jnp.int32)[None]
    num_accepted = verdict.num_accepted[:, None]
    drafted = jnp.pad(block.tokens, ((0, 0), (0, 1)))
    emitted = jnp.where(
        offset < num_accepted, drafted, verdict.next_token[:, None]
    ).astype(jnp.int32)
    place = state.length[:, None] + offset
    rows = jnp.arange(batch)[:, None]

    ends = emitted == eos_id
    if stop is not None:
        ends = ends | _ends_stop(state, emitted, place, rows, stop)
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
        masked = mask_dead_rows(logits, sampling.num_tokens)
        scores = jax.nn.log_softmax(masked, axis=-1)
        scores = jnp.take_along_axis(scores, emitted[..., None], axis=-1)[..., 0]
        log_probs = log_probs.at[rows, where].set(scores, mode="drop")

    active = (~state.done).astype(jnp.int32)
    depth = offset[:, :gamma]
    stats = Stats(
        target_calls=state.stats.target_calls + active,
        emitted=state.stats.emitted + count,
        drafted=state.stats.drafted
        + active[:, None] * (depth < block.length[:, None]).astype(jnp.int32),
        accepted=state.stats.accepted
        + active[:, None] * (depth < num_accepted).astype(jnp.int32),
    )
    return state.replace(
        tokens=state.tokens.at[rows, where].set(emitted, mode="drop"),
        length=length,
        done=done,
        cache=state.cache.replace(length=length - 1),
        stats=stats,
        log_probs=log_probs,
    )


def _ends_stop(
    state: DecodeState, emitted: Array, place: Array, rows: Array, stop: Array
) -> Array:
    """Whether a stop sequence, all of it after the prefix, is complete at each place."""
    tokens = state.tokens.at[rows, place].set(emitted, mode="drop")
    size = stop.shape[1]
    lengths = jnp.sum(stop >= 0, axis=1)  # [K]
    back = jnp.arange(size)[None]
    # Token `back` places before the end must be the sequence's own, counted from its end.
    wanted = jnp.take_along_axis(stop, jnp.maximum(lengths[:, None] - 1 - back, 0), 1)
    looked = place[:, :, None] - back[None]
    seen = tokens[rows[:, :, None], jnp.maximum(looked, 0)]
    new = looked >= state.start[:, None, None]
    equal = (seen[:, :, None] == wanted[None, None]) & new[:, :, None]
    equal = equal | (back >= lengths[:, None])[None, None]
    return jnp.any(jnp.all(equal, -1) & (lengths > 0)[None, None], -1)


def _record(
    state: DecodeState, block: DraftBlock, law: Law, verdict: VerifyOutput
) -> Trace:
    """Writes this step as the next call of each unfinished row."""
    trace = state.trace
    calls = jnp.where(state.done, trace.length.shape[1], state.stats.target_calls)
    rows = jnp.arange(calls.shape[0])
    judged = jnp.concatenate([block.tokens, block.tokens[:, -1:]], axis=1)
    now = Trace(
        tokens=block.tokens,
        p=law.at(judged)[:, :-1],
        q=jnp.zeros(block.tokens.shape)
        if block.law is None
        else block.law.at(block.tokens),
        length=block.length,
        num_accepted=verdict.num_accepted,
        next_token=verdict.next_token,
    )
    return jax.tree.map(
        lambda old, new: old.at[rows, calls].set(new, mode="drop"), trace, now
    )
