"""Autoregressive and speculative generation: init, a loop over one step, output.

One speculative step, for a row whose last committed token is t:

    tokens   [ ....... t | d_1  d_2  d_3 | ... ]     length counts up to and with t
    fed                t   d_1  d_2  d_3             one target pass, slots length-1 ...
    laws               p_0  p_1  p_2  p_3            p_i judges d_(i+1); p_3 gives the
    bonus

The invariant between steps is ``cache.length == length - 1``: the last committed token
has not been fed yet. A row is rolled back by setting its length.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Key

from specjax import checks
from specjax.commit import commit, record
from specjax.decode_state import (
    DRAFT,
    SAMPLE,
    VERIFY,
    DecodeOutput,
    DecodeState,
    Stats,
    Trace,
    block_prefix,
    fold_rows,
)
from specjax.drafters.base import Committed, Drafter
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling, draw_law, with_arrays
from specjax.types import DraftBlock, Noise, Prefix
from specjax.verify import Scored, Verifier, VerifyOutput, greedy_rule, token_verify


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
        InputError: before anything compiles, for settings that mean nothing or do not
            fit together.

    Source: Leviathan, Kalman, Matias 2023 (arXiv:2211.17192), per row of a batch.
    """
    draft_sampling = checks.check_speculation(
        drafter, verifier, sampling, draft_sampling, gamma, inputs.shape[0]
    )
    arguments = checks.decode_arguments(
        target,
        inputs,
        mask,
        keys,
        sampling,
        max_length,
        budget,
        prefix,
        prefix_length,
        eos_id,
    )
    return _speculative_loop(
        target,
        drafter,
        verifier=verifier,
        draft_sampling=with_arrays(draft_sampling),
        stop=checks.check_stop(stop),
        gamma=int(gamma),  # numpy's 3 would compile apart from Python's
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

    The token at buffer index i of a row is drawn (`sampling.draw`) with a key of that
    row and that index alone.
    """
    arguments = checks.decode_arguments(
        target,
        inputs,
        mask,
        keys,
        sampling,
        max_length,
        budget,
        prefix,
        prefix_length,
        eos_id,
    )
    return _autoregressive_loop(
        target, stop=checks.check_stop(stop), log_probs=log_probs, **arguments
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
    encoded, state = speculative_init(
        target,
        None,
        inputs,
        mask,
        gamma=0,
        max_length=max_length,
        budget=budget,
        prefix=prefix,
        prefix_length=prefix_length,
        log_probs=log_probs,
    )
    step = functools.partial(
        autoregressive_step,
        target,
        encoded,
        keys,
        sampling=sampling,
        eos_id=eos_id,
        stop=stop,
    )
    return _output(jax.lax.while_loop(_unfinished, step, state), max_length)


def speculative_init(
    target: EncoderDecoder,
    drafter: Drafter | None,
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
    inside. Arguments are those of `speculative_generate`, all given. Without a drafter
    and with gamma 0 it is what comes before `autoregressive_step`.
    """
    encoded = target.encode(inputs, mask)
    nodes = 0 if drafter is None else drafter.nodes(gamma)
    state = _init(
        target,
        encoded,
        prefix,
        prefix_length,
        budget,
        max_length,
        gamma,
        max_length + nodes + 1,  # the last block never runs off the end
        log_probs,
    )
    if drafter is None:
        return encoded, state
    batch, size = state.tokens.shape
    draft_state = drafter.init(
        target, encoded, inputs, mask, prefix, prefix_length, size
    )
    if trace:
        calls = (batch, max_length)  # each call of an unfinished row writes a token
        block = calls + (nodes,)
        state = state.replace(
            trace=Trace(
                tokens=jnp.zeros(block, jnp.int32),
                p=jnp.zeros(block, jnp.float32),
                q=jnp.zeros(block, jnp.float32),
                length=jnp.zeros(calls, jnp.int32),
                num_accepted=jnp.zeros(calls, jnp.int32),
                next_token=jnp.zeros(calls, jnp.int32),
                parents=jnp.zeros(calls + (nodes + 1,), jnp.int32)
                if drafter.trees
                else None,
                path=jnp.zeros(calls + (gamma,), jnp.int32) if drafter.trees else None,
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
    # Whoever drives the step by hand has not been through the checks of generate.
    checks.check_block(drafter, verifier, sampling, block)
    fed = jnp.concatenate([_last(state), block.tokens], axis=1)
    base = state.cache.length
    output, cache = target.decode(
        fed, state.cache, encoded, parents=block.parents, taps=drafter.taps
    )
    prefix = block_prefix(state, block) if sampling.controls else None
    law = sampling.law(output.logits, prefix)
    if law.ids is not None and verifier.lossless:
        # A greedy target: point masses turn every lossless rule into equality of ids.
        rule = functools.partial(greedy_rule, gamma=gamma)
        verdict = jax.vmap(rule)(law.ids[..., 0], block)
    else:
        scored = Scored(law=law, logits=output.logits)
        verdict = jax.vmap(verifier.rule, in_axes=(0, 0, 0, None))(
            verify_noise, block, scored, verifier.params
        )
        if verdict.path is not None:  # rules know no more than that it fits the tree
            path = jnp.pad(verdict.path, ((0, 0), (0, gamma)))[:, :gamma]
            verdict = verdict.replace(path=path)
    if state.trace is not None:
        state = state.replace(trace=record(state.trace, state, block, law, verdict))
    features = output.features
    assert cache is not None  # only teacher forcing keeps nothing
    if verdict.path is not None:
        cache = target.keep(cache, base, verdict.path)
        nodes = jnp.pad(verdict.path, ((0, 0), (1, 0)))[..., None]
        features = tuple(jnp.take_along_axis(x, nodes, axis=1) for x in features)
    state = state.replace(cache=cache, draft_state=draft_state)
    state = commit(
        state, block, verdict, output.logits, sampling.num_tokens, eos_id, stop
    )
    committed = Committed(
        tokens=state.tokens,
        length=state.length,
        num_accepted=verdict.num_accepted,
        features=features,
        path=verdict.path,
        done=state.done,
    )
    return state.replace(draft_state=drafter.commit(state.draft_state, committed))


def autoregressive_step(
    target: EncoderDecoder,
    encoded: Encoded,
    keys: Key[Array, " B"],
    state: DecodeState,
    *,
    sampling: Sampling,
    eos_id: int | Int[Array, ""] = 1,
    stop: Int[Array, "K M"] | None = None,
) -> DecodeState:
    """One target pass and one token per row, as `speculative_step` without a draft."""
    last = _last(state)
    output, cache = target.decode(last, state.cache, encoded)
    prefix = Prefix(tokens=state.tokens, length=state.length[:, None])
    law = sampling.law(output.logits, prefix)
    sample_keys = fold_rows(fold_rows(keys, SAMPLE), state.length)
    chosen = jax.vmap(lambda key, own: draw_law(key, own, 0, target.vocab_size))(
        sample_keys, law
    )
    block = DraftBlock(
        tokens=jnp.zeros((last.shape[0], 0), jnp.int32),
        length=jnp.zeros_like(state.length),
    )
    verdict = VerifyOutput(num_accepted=block.length, next_token=chosen)
    state = state.replace(cache=cache)
    return commit(
        state, block, verdict, output.logits, sampling.num_tokens, eos_id, stop
    )


def _init(
    target: EncoderDecoder,
    encoded: Encoded,
    prefix: Array,
    prefix_length: Array,
    budget: Array,
    max_length: int,
    gamma: int,
    size: int,
    log_probs: bool,
) -> DecodeState:
    batch, given = prefix.shape
    cache = target.init_cache(batch, size)
    if given > 1:
        _, fed = target.decode(prefix, cache, encoded)
        assert fed is not None  # only teacher forcing keeps nothing
        cache = fed
    real = jnp.arange(given)[None] < prefix_length[:, None]
    tokens = jnp.zeros((batch, size), jnp.int32)
    # The inner minimum keeps a huge budget from overflowing.
    limit = jnp.minimum(prefix_length + jnp.minimum(budget, max_length), max_length)
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


def _noises(keys: Array, state: DecodeState, verifier: Verifier) -> tuple[Noise, Noise]:
    start = state.length - 1
    if verifier.noise == "position":
        # Both sides share the noise that the autoregressive sample would use.
        noise = Noise(keys=fold_rows(keys, SAMPLE), start=start, by="position")
        return noise, noise.replace(keys=jax.random.clone(noise.keys))
    calls = state.stats.target_calls  # the row's own: independent of its neighbours
    return (
        Noise(keys=fold_rows(fold_rows(keys, DRAFT), calls), start=start),
        Noise(keys=fold_rows(fold_rows(keys, VERIFY), calls), start=start),
    )


def _last(state: DecodeState) -> Array:
    return jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
