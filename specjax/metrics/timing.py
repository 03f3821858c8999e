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
from jaxtyping import Array, Bool, Int, Key

from specjax import checks
from specjax.decoding import autoregressive_generate, speculative_generate
from specjax.drafters.base import Drafter
from specjax.errors import InputError
from specjax.metrics import timed_loops
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling, with_arrays
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
    _check_repeats(seconds, repeats)
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

    inner = _inner(drafter, verifier, sampling, draft_sampling, gamma, inputs.shape[0])
    jax.block_until_ready(plain(0))  # refuses bad settings before all else compiles
    encoded, state, block = timed_loops.prepare(
        target, drafter, inputs, mask, keys, max_length=max_length, **inner
    )

    def verify(count: int) -> Any:
        arguments = (target, drafter, encoded, keys, state, block, jnp.int32(count))
        return timed_loops.verify_steps(*arguments, **inner)

    def draft(count: int) -> Any:
        arguments = (target, drafter, encoded, keys, state, jnp.int32(count))
        return timed_loops.draft_steps(*arguments, **inner)

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


def time_draft(
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
) -> Timing:
    """Times drafting one block, as `measure_costs` does, and nothing else.

    Raises:
        InputError: as `measure_costs`.
    """
    _check_repeats(seconds, repeats)
    inner = _inner(drafter, verifier, sampling, draft_sampling, gamma, inputs.shape[0])
    encoded, state, _ = timed_loops.prepare(
        target, drafter, inputs, mask, keys, max_length=max_length, **inner
    )

    def draft(count: int) -> Any:
        arguments = (target, drafter, encoded, keys, state, jnp.int32(count))
        return timed_loops.draft_steps(*arguments, **inner)

    count = enough_steps(draft, seconds, _MOST_STEPS)
    calls = {"draft": lambda: draft(count), "none": lambda: draft(0)}
    timings = time_calls(calls, repeats=repeats)
    return per_step(timings["draft"], timings["none"], count)


def _check_repeats(seconds: float, repeats: int) -> None:
    if not seconds > 0 or repeats < 1:
        raise InputError(
            f"seconds is {seconds} and repeats {repeats}: above 0 and at least 1"
        )


def _inner(
    drafter: Drafter,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling | None,
    gamma: int,
    batch: int,
) -> dict[str, Any]:
    """The settings of one step, checked."""
    draft_sampling = checks.check_speculation(
        drafter, verifier, sampling, draft_sampling, gamma, batch
    )
    return dict(
        verifier=verifier,
        sampling=with_arrays(sampling),
        draft_sampling=with_arrays(draft_sampling),
        gamma=gamma,
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
