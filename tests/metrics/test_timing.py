"""Timings: a clock that the test moves, and planted work for the real one."""

from __future__ import annotations

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from specjax import metrics
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.drafters.tree import TreeDrafter
from specjax.errors import InputError
from specjax.metrics import timed_loops, timing
from specjax.models.base import Cache, DecoderOutput, Encoded
from specjax.sampling import Sampling
from tests.helpers import row_keys

WIDTH, VOCABULARY = 256, 32
HEAVY, LIGHT = 64, 8


@struct.dataclass
class Mill:
    """A model whose decoder pass is `work` products with one square matrix.

    Small products in a loop: one thread does them, whose own time can be counted.
    """

    weight: jax.Array
    work: int = struct.field(pytree_node=False)

    vocab_size = VOCABULARY

    def _grind(self, x, work):
        return jax.lax.fori_loop(0, work, lambda _, x: jnp.tanh(x @ self.weight), x)

    def encode(self, inputs, mask, *, dropout_key=None):
        hidden = self._grind(self.weight[inputs], 4 * self.work)
        return Encoded(hidden=hidden, mask=mask, cross=())

    def init_cache(self, batch_size, size):
        memory = jnp.zeros((batch_size, size), jnp.int32)
        return Cache(memory=memory, length=jnp.zeros(batch_size, jnp.int32))

    def decode(
        self,
        tokens,
        cache,
        encoded,
        *,
        parents=None,
        start=0,
        taps=(),
        dropout_key=None,
    ):
        rows = jnp.arange(tokens.shape[0])[:, None]
        slots = cache.length[:, None] + jnp.arange(tokens.shape[1])[None]
        memory = cache.memory.at[rows, slots].set(tokens, mode="drop")
        hidden = self._grind(self.weight[tokens] + encoded.hidden[:, :1], self.work)
        output = DecoderOutput(logits=hidden[..., :VOCABULARY])
        return output, Cache(memory=memory, length=cache.length + tokens.shape[1])

    def keep(self, cache, base, path):
        return cache


def mill(work) -> Mill:
    weight = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / math.sqrt(WIDTH)
    return Mill(weight=weight, work=work)


def costs(drafter, measure=metrics.measure_costs, **settings):
    settings = {"gamma": 3, "seconds": 0.02, "repeats": 3} | settings
    settings.setdefault("sampling", Sampling(temperature=None))  # compiles sooner
    return measure(
        mill(HEAVY),
        drafter,
        jnp.ones((1, 4), jnp.int32),
        jnp.ones((1, 4), bool),
        row_keys(0, 1),
        **settings,
    )


@pytest.fixture
def cpu_clock(monkeypatch):
    """Counts this process's own seconds: other work on the machine decides no test."""
    monkeypatch.setattr(timing.time, "perf_counter", time.process_time)


class Clock:
    """A clock that moves when something is waited for."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now

    def job(self, name, durations, log):
        durations = iter(durations)

        class Result:
            def block_until_ready(result):
                log.append(name)
                self.now += next(durations)
                return result

        return Result


def test_calls_are_timed_in_turn_and_waited_for(monkeypatch):
    clock, log = Clock(), []
    monkeypatch.setattr(timing.time, "perf_counter", clock)
    timings = metrics.time_calls(
        {
            "a": clock.job("a", [10.0, 7.0, 1.0, 4.0, 2.0], log),
            "b": clock.job("b", [1.0, 3.0, 3.0, 3.0, 3.0], log),
        },
        repeats=3,
        warmup=1,
    )
    monkeypatch.undo()
    assert log == ["a", "b"] * 5
    assert timings["a"].times == (1.0, 4.0, 2.0)
    assert timings["a"].median == 2.0
    assert (timings["a"].low, timings["a"].high) == (1.5, 3.0)
    assert timings["a"].compile_seconds == 8.0
    assert timings["b"].compile_seconds == 0.0  # never negative


def test_time_call_passes_arguments_and_tells_compiling_apart():
    square = jax.jit(lambda x: x @ x)
    result = metrics.time_call(square, jnp.ones((64, 64)), repeats=3)
    assert len(result.times) == 3
    assert 0 < result.low <= result.median <= result.high
    assert result.compile_seconds > 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        result.times = ()


def test_ratios_are_taken_within_each_round():
    """The machine is ten times slower in one round; the ratio does not see it."""
    costs = metrics.Costs(
        gamma=4,
        step=metrics.Timing((1.0, 10.0, 2.0)),
        verify=metrics.Timing((1.5, 15.0, 3.0)),
        draft=metrics.Timing((0.8, 8.0, 1.6)),
        encode=metrics.Timing((3.0, 30.0, 6.0)),
        draft_encode=metrics.Timing((0.5, 5.0, 1.0)),
    )
    assert costs.cost_ratio == pytest.approx(0.2)
    assert costs.verify_ratio == pytest.approx(1.5)
    assert costs.encode_ratio == pytest.approx(3.0)
    assert costs.draft_encode_ratio == pytest.approx(0.5)


def test_steps_are_counted_until_they_take_long_enough(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", clock)

    runs = []

    def part(count):  # 0.5 s a call, 0.01 s a step; now and then the machine stalls
        runs.append(count)
        stall = 9.0 if len(runs) % 3 == 0 else 0.0
        return clock.job("", [0.5 + 0.01 * count + stall], [])()

    assert timing.enough_steps(part, 0.3, most=1000) == 32
    assert timing.enough_steps(part, 0.3, most=20) == 20
    assert timing.enough_steps(part, 0.3, most=1) == 1


def test_the_run_of_no_steps_is_taken_off():
    whole, empty = metrics.Timing((3.0, 5.0, 1.0)), metrics.Timing((2.0, 1.0, 1.5))
    result = timing.per_step(whole, empty, 4)
    assert result.times[:2] == (0.5, 1.0)
    assert 0 < result.times[2] < 1e-8  # a ratio to it stays finite


@pytest.mark.slow
def test_planted_costs_are_found(cpu_clock):
    """A draft with an eighth of the target's work, and one with the same."""
    light, equal = (costs(ModelDrafter(mill(work))) for work in (LIGHT, HEAVY))
    for found in (light, equal):
        assert found.gamma == 3
        assert found.step.median > 0
        assert 0.3 < found.verify_ratio < 15
        assert found.encode_ratio > 0.5  # four times the work of a step
    assert 0.02 < light.cost_ratio < 0.6
    assert 0.4 < equal.cost_ratio < 5
    assert equal.cost_ratio > 2 * light.cost_ratio


@pytest.mark.slow
def test_a_tree_is_drafted_level_by_level(cpu_clock):
    """Three nodes side by side cost one pass, one below the other three of them."""
    wide, deep = (
        costs(TreeDrafter(mill(HEAVY), parents), gamma=depth)
        for parents, depth in (((-1, 0, 0, 0), 1), ((-1, 0, 1, 2), 3))
    )
    assert (wide.gamma, deep.gamma) == (1, 3)
    for found in (wide, deep):
        assert 0.3 < found.verify_ratio < 15
    assert wide.cost_ratio < 0.75 * 3 * deep.cost_ratio
    assert 0.4 < deep.cost_ratio < 5


def test_the_same_shapes_compile_once():
    drafter = ModelDrafter(mill(LIGHT))
    costs(drafter, repeats=1)
    programs = (timed_loops.prepare, timed_loops.verify_steps, timed_loops.draft_steps)
    sizes = [program._cache_size() for program in programs]
    costs(drafter, repeats=1, seconds=0.001)
    assert [program._cache_size() for program in programs] == sizes


def test_a_draft_can_be_timed_alone(cpu_clock):
    """By the same programs: nothing is compiled that the whole measure has not."""
    drafter = ModelDrafter(mill(LIGHT))
    found = costs(drafter, repeats=1)
    sizes = timed_loops.draft_steps._cache_size()
    alone = costs(drafter, metrics.time_draft)
    assert timed_loops.draft_steps._cache_size() == sizes
    assert 0.1 * found.draft.median < alone.median < 10 * found.draft.median
    with pytest.raises(InputError, match="repeats 0"):
        costs(drafter, metrics.time_draft, repeats=0)


def test_drafts_without_a_model_are_timed_by_the_same_function(cpu_clock):
    found = costs(NgramDrafter())
    assert 0 < found.cost_ratio < 1


@pytest.mark.parametrize(
    "settings, named",
    [
        ({"seconds": 0.0}, "seconds is 0"),
        ({"repeats": 0}, "repeats 0"),
        ({"gamma": 0}, "gamma is 0"),
        ({"max_length": 1}, "max_length is 1"),
        ({"sampling": Sampling(top_k=0)}, "sampling.top_k"),
    ],
)
def test_settings_that_mean_nothing_are_named(settings, named):
    with pytest.raises(InputError, match=named):
        costs(ModelDrafter(mill(LIGHT)), **settings)
