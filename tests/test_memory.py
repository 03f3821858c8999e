"""Memory stays flat however often a pair decodes, and no step copies a cache."""

from __future__ import annotations

import gc
import json
import pathlib
import resource
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

import specjax
from experiments.compiled_text import Program
from specjax import ModelDrafter, Sampling, checks, decoding, token_verify
from tests import pairs
from tests.helpers import perturbed, ragged_sources, row_keys, tiny_t5

pytestmark = pytest.mark.slow
CALLS, MOST = 200, 8e6  # bytes; a leak of one call's buffers alone would be 40 MB


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def growth(pair: specjax.Pair, keep: list | None = None) -> tuple[int, int]:
    """Bytes and live arrays that so many calls leave behind.

    The calls differ in source, seed, budget and temperature, which share a program.
    """

    def call(number: int) -> None:
        line = pairs.LINES[number % len(pairs.LINES)]
        made = pair.generate(
            [line] * 8,
            seed=number,
            gamma=3,
            max_length=24,
            budget=1 + number % 23,
            sampling=Sampling(temperature=0.5 + number % 3),
        )
        if keep is not None:
            keep.append((made, bytearray(b"x" * 200_000)))

    for number in range(20):  # allocators take what they want
        call(number)
    before = resident(), len(jax.live_arrays())
    for number in range(CALLS):
        call(number)
    return resident() - before[0], len(jax.live_arrays()) - before[1]


def measure(target: str, draft: str) -> None:
    """Prints what is left behind, then the same where every result is kept."""
    pair = specjax.load(target, draft)
    print(json.dumps([growth(pair), growth(pair, [])]))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_200_calls_leave_nothing_behind(tmp_path):
    folders = pairs.make_pair(tmp_path)
    # In a process of its own: the tests before have left this one memory that is free,
    # in which a leak would not be seen.
    pair = str(folders.target), str(folders.draft)
    program = f"from tests import test_memory; test_memory.measure{pair}"
    told = subprocess.run(
        [sys.executable, "-c", program],
        cwd=pairs.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    (size, arrays), (kept_size, kept_arrays) = json.loads(told)
    assert arrays == 0 and size < MOST
    # Results that somebody keeps are seen.
    assert kept_arrays > CALLS and kept_size > MOST


def test_no_step_copies_a_cache():
    """The loops write in place, so that a longer buffer costs what is read of it."""
    target = tiny_t5(0)
    arguments = checks.decode_arguments(
        target,
        *ragged_sources(0, 2, 8),
        row_keys(0, 2),
        Sampling(temperature=None),
        91,
        None,
        None,
        None,
        1,
    )
    fast = decoding._speculative_loop.lower(
        target,
        ModelDrafter(perturbed(target, 1, 0.1)),
        verifier=token_verify,
        draft_sampling=arguments["sampling"],
        stop=None,
        gamma=4,
        log_probs=False,
        trace=False,
        **arguments,
    )
    slow = decoding._autoregressive_loop.lower(
        target, stop=None, log_probs=False, **arguments
    )

    @jax.jit
    def copying(cache):  # the twin reads what it has changed already
        def step(carry):
            place, own = carry
            after = own.at[:, :, place].set(1.0)
            return place + 1, after.at[0, 0, 0, 0].add(jnp.sum(own * after))

        return jax.lax.while_loop(lambda c: c[0] < 9, step, (0, cache))

    for lowered, size in ((fast, 91 + 4 + 1), (slow, 91 + 1)):
        shape = target.init_cache(2, size).memory[0].keys.shape
        program = Program.parse(lowered.compile().as_text())
        assert list(program.bodies()) and program.copies(shape) == []
        twin = copying.lower(jax.ShapeDtypeStruct(shape, jnp.float32))
        assert Program.parse(twin.compile().as_text()).copies(shape) != []
