"""Seconds, compile time apart, and the cost ratios c and v of a pair."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Key

from specjax import checks
from specjax.decoding import (
    DecodeState,
    autoregressive_generate,
    speculative_generate,
    speculative_init,
    speculative_step,
)
from specjax.drafters.base import Committed, Drafter
from specjax.errors import InputError
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling, with_arrays
from specjax.types import DraftBlock, Noise
from specjax.verify import Verifier, token_verify

# Of a verification or a draft in one timing; a step that cheap is timed well by then.
_MOST_STEPS = 4096


@dataclasses.dataclass(frozen=True)
class Timing:
    """Repeated timings of one thing.

    Attributes:
        times: seconds of each repeat, in the order in which they were taken.
        compile_seconds: what the first call took beyond the median: tracing and
            compiling, or reading a compile cache.
    """

    times: tuple[float, ...]
    compile_seconds: float = 0.0

    @property
    def median(self) -> float:
        """Seconds."""
        return statistics.median(self.times)

    @property
    def low(self) -> float:
        """First quartile, in seconds."""
        return float(np.percentile(self.times, 25))

    @property
    def high(self) -> float:
        """Third quartile, in seconds."""
        return float(np.percentile(self.times, 75))


def time_calls(
    calls: Mapping[str, Callable[[], Any]], *, repeats: int = 7, warmup: int = 1
) -> dict[str, Timing]:
    """Times several calls in turn, so that a slow moment of the machine hits them all.

    Args:
        calls: functions of no argument by name; results are waited for.
        repeats: timed rounds, >= 1.
        warmup: rounds after the first call that are not timed, >= 0.

    Returns:
        a timing per name; repeat i of all of them was taken in the same round.

    Raises:
        InputError: repeats below 1 or warmup below 0.
    """
    if repeats < 1 or warmup < 0:
        raise InputError(
            f"repeats is {repeats} and warmup {warmup}: at least 1 and at least 0"
        )

    first = {name: _seconds(call) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(warmup + repeats):
        for name, call in calls.items():
            taken = _seconds(call)
            if round_ >= warmup:
                times[name].append(taken)
    return {
        name: Timing(
            times=tuple(taken),
            compile_seconds=max(first[name] - statistics.median(taken), 0.0),
        )
        for name, taken in times.items()
    }


def _seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def time_call(
    fn: Callable[..., Any], *args: Any, repeats: int = 7, warmup: int = 1
) -> Timing:
    """Times ``fn(*args)``, compile time apart; see `time_calls`."""
    calls = {"call": lambda: fn(*args)}
    return time_calls(calls, repeats=repeats, warmup=warmup)["call"]


@dataclasses.dataclass(frozen=True)
class Costs:
    """What each part of decoding one batch takes, timed apart.

    Attributes:
        gamma: draft length; of a tree, its depth.
        step: one step of the autoregressive loop.
        verify: one step of the speculative loop without its draft: a target pass over
            the block and the token before it (gamma + 1 tokens; of a tree, all nodes),
            the verdict and the bookkeeping.
        draft: drafting a block: gamma tokens, or the gamma levels of a tree.
        encode: what an autoregressive decode takes before its first step: the encoder,
            an empty cache, and the call itself.
        draft_encode: what a speculative decode takes beyond that: the drafter's encoder
            and memory.
    """

    gamma: int
    step: Timing
    verify: Timing
    draft: Timing
    encode: Timing
    draft_encode: Timing

    @property
    def cost_ratio(self) -> float:
        """c: drafting one token, or one level of a tree / one target step."""
        return time_ratio(self.draft, self.step) / self.gamma

    @property
    def verify_ratio(self) -> float:
        """v: verifying a block / one target step."""
        return time_ratio(self.verify, self.step)

    @property
    def encode_ratio(self) -> float:
        """Encoding, in target steps."""
        return time_ratio(self.encode, self.step)

    @property
    def draft_encode_ratio(self) -> float:
        """The drafter's set-up, in target steps."""
        return time_ratio(self.draft_encode, self.step)


def measure_costs(
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
    seconds: float = 0.1,
    repeats: int = 7,
) -> Costs:
    """Times one target step, one verification, one draft and both encoders.

    Each is the decoding loops' own code, run many times inside one program with the
    memory carried along; the same program run 0 times is subtracted, so that neither
    dispatch nor copies of arguments count as step. All are taken in turn. The two loops
    are the programs that decoding with the same shapes and settings uses anyway. What
    is verified is mostly rejected: a rule that takes longer over what it accepts (or
    over what it rejects, as `traversal_rule` does) is timed on that.

    Args:
        target: the target model.
        drafter: the drafter.
        inputs: source ids; only their shape matters.
        mask: True at real source tokens.
        keys: as for decoding.
        verifier: decides which drafted tokens stand.
        sampling: how the target's logits become a law.
        draft_sampling: the same for the draft; None: as `sampling`.
        gamma: draft length, >= 1; of a tree, its depth, or c is no level's cost.
        max_length: columns of the token buffer; attention reads all of them.
        seconds: least length of each timing, > 0; a target step is run at most
            ``max_length - 1`` times.
        repeats: timings of each, >= 1.

    Raises:
        InputError: as `speculative_generate`, and for seconds and repeats.
    """
    if not seconds > 0 or repeats < 1:
        raise InputError(
            f"seconds is {seconds} and repeats {repeats}: above 0 and at least 1"
        )
    settings: dict[str, Any] = dict(sampling=sampling, max_length=max_length, eos_id=-1)

    def plain(budget: int) -> Any:
        return autoregressive_generate(
            target, inputs, mask, keys, budget=budget, **settings
        )

    def speculative(budget: int) -> Any:
        return speculative_generate(
            target,
            drafter,
            inputs,
            mask,
            keys,
            verifier=verifier,
            draft_sampling=draft_sampling,
            gamma=gamma,
            budget=budget,
            **settings,
        )

    inner = dict(
        verifier=verifier,
        sampling=with_arrays(sampling),
        draft_sampling=with_arrays(
            checks.check_speculation(
                drafter, verifier, sampling, draft_sampling, gamma, inputs.shape[0]
            )
        ),
        gamma=gamma,
    )
    jax.block_until_ready(plain(0))  # refuses bad settings before all else compiles
    encoded, state, block = _prepare(
        target, drafter, inputs, mask, keys, max_length=max_length, **inner
    )

    def verify(count: int) -> Any:
        arguments = (target, drafter, encoded, keys, state, block, jnp.int32(count))
        return _verify_steps(*arguments, **inner)

    def draft(count: int) -> Any:
        arguments = (target, drafter, encoded, keys, state, jnp.int32(count))
        return _draft_steps(*arguments, **inner)

    parts = {"step": plain, "verify": verify, "draft": draft}
    counts = {
        name: enough_steps(
            part, seconds, max_length - 1 if part is plain else _MOST_STEPS
        )
        for name, part in parts.items()
    }
    calls: dict[str, Callable[[], Any]] = {"set-up": lambda: speculative(0)}
    for name, part in parts.items():
        calls[name] = functools.partial(part, counts[name])
        calls[f"{name} 0"] = functools.partial(part, 0)
    timings = time_calls(calls, repeats=repeats)
    encode = timings["step 0"]
    beyond = zip(timings["set-up"].times, encode.times, strict=True)
    return Costs(
        gamma=gamma,
        **{
            name: per_step(timings[name], timings[f"{name} 0"], counts[name])
            for name in parts
        },
        encode=encode,
        draft_encode=Timing(tuple(max(both - one, 0.0) for both, one in beyond)),
    )


def enough_steps(part: Callable[[int], Any], seconds: float, most: int) -> int:
    """How many steps take `seconds` beyond a run of none: doubles until they do.

    They must do so five times: a busy machine makes single runs of any length.

    Args:
        part: runs so many steps, and is compiled at the first call.
        seconds: that they are to take.
        most: so many steps at most, whatever they take.
    """

    def taken(count: int) -> float:
        return _seconds(functools.partial(part, count))

    count, empty = min(4, most), min(taken(0) for _ in range(5))
    while count < most and any(taken(count) - empty < seconds for _ in range(5)):
        count = min(2 * count, most)
    return count


def per_step(whole: Timing, empty: Timing, count: int) -> Timing:
    """Seconds of one of `count` steps, the empty run at its quickest taken off.

    Args:
        whole: of all steps together.
        empty: of a run of no step.
        count: steps.
    """
    fixed = min(empty.times)
    return Timing(tuple(max(time - fixed, 1e-9) / count for time in whole.times))


def time_ratio(numerator: Timing, denominator: Timing) -> float:
    """Median of the ratios within each round."""
    pairs = zip(numerator.times, denominator.times, strict=True)
    return statistics.median(n / d for n, d in pairs)


@struct.dataclass
class _Replay:
    """A drafter that costs nothing: its state is the block, changed a little each time.

    Without a change the compiler could compute parts of the pass once for all steps.
    """

    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())
    trees: bool = struct.field(pytree_node=False, default=False)
    siblings: str | None = struct.field(pytree_node=False, default=None)
    has_law: bool = struct.field(pytree_node=False, default=True)
    samples: bool = struct.field(pytree_node=False, default=True)

    def nodes(self, gamma: int) -> int:
        return gamma

    def init(self, *arguments: Any) -> Any:
        return None

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: DraftBlock,
        tokens: Array,
        length: Array,
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, DraftBlock]:
        other = (state.tokens + 1) % target.vocab_size
        return state, state.replace(tokens=other)

    def commit(self, state: DraftBlock, committed: Committed) -> DraftBlock:
        return state


@functools.partial(jax.jit, static_argnames=("gamma", "max_length"))
def _prepare(
    target: EncoderDecoder,
    drafter: Drafter,
    inputs: Array,
    mask: Array,
    keys: Array,
    *,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
    max_length: int,
) -> tuple[Encoded, DecodeState, DraftBlock]:
    """The state before the first step, and a block to verify."""
    batch = inputs.shape[0]
    encoded, state = speculative_init(
        target,
        drafter,
        inputs,
        mask,
        gamma=gamma,
        max_length=max_length,
        budget=jnp.full(batch, max_length, jnp.int32),
        prefix=jnp.zeros((batch, 1), jnp.int32),
        prefix_length=jnp.ones(batch, jnp.int32),
    )
    block, _ = drafter.draft(
        target,
        Noise(keys=keys, start=state.length - 1),
        state.draft_state,
        state.tokens,
        state.length,
        gamma=gamma,
        sampling=draft_sampling,
    )
    return encoded, state, block


@functools.partial(jax.jit, static_argnames="gamma")
def _verify_steps(
    target: EncoderDecoder,
    drafter: Drafter,
    encoded: Encoded,
    keys: Array,
    state: DecodeState,
    block: DraftBlock,
    count: Array,
    *,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
) -> DecodeState:
    """`count` steps of the speculative loop with a draft that costs nothing."""

    def step(_: Array, state: DecodeState) -> DecodeState:
        return speculative_step(
            target,
            _Replay(
                taps=drafter.taps,
                trees=drafter.trees,
                siblings=getattr(drafter, "siblings", None),
            ),
            encoded,
            keys,
            state,
            verifier=verifier,
            sampling=sampling,
            draft_sampling=draft_sampling,
            gamma=gamma,
            eos_id=jnp.int32(-1),
        )

    return jax.lax.fori_loop(0, count, step, state.replace(draft_state=block))


@functools.partial(jax.jit, static_argnames="gamma")
def _draft_steps(
    target: EncoderDecoder,
    drafter: Drafter,
    encoded: Encoded,
    keys: Array,
    state: DecodeState,
    count: Array,
    *,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
) -> Any:
    """`count` drafts and commits; each starts from a token of the one before."""
    rows = jnp.arange(state.length.shape[0])
    fed = jnp.zeros((rows.shape[0], gamma + 1), jnp.int32)
    output, _ = target.decode(fed, state.cache, encoded, taps=drafter.taps)
    path = jnp.zeros((rows.shape[0], gamma), jnp.int32) if drafter.trees else None

    def step(index: Array, carry: Any) -> Any:
        tokens, draft_state, used = carry
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        block, draft_state = drafter.draft(
            target,
            Noise(keys=folded, start=state.length - 1),
            draft_state,
            tokens,
            state.length,
            gamma=gamma,
            sampling=draft_sampling,
        )
        # All tokens and laws are read, or the compiler would drop some.
        last = jnp.max(block.tokens, axis=-1)
        committed = Committed(
            tokens=tokens.at[rows, state.length - 1].set(last),
            length=state.length,
            num_accepted=jnp.zeros_like(state.length),
            features=output.features,
            path=path,
        )
        draft_state = drafter.commit(draft_state, committed)
        if block.law is not None:  # of a tree: fewer rows than tokens
            some = block.tokens[:, : block.law.probs.shape[1]]
            used = used + jnp.sum(block.law.at(some), axis=-1)
        return committed.tokens, draft_state, used

    used = jnp.zeros(rows.shape, jnp.float32)
    return jax.lax.fori_loop(0, count, step, (state.tokens, state.draft_state, used))
