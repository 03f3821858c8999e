"""What compiles anew and what does not; and no random key is used twice."""

from __future__ import annotations

import contextlib
import gc
import inspect
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    ModelDrafter,
    NgramDrafter,
    Sampling,
    Verifier,
    autoregressive_generate,
    block_verify,
    checks,
    decoding,
    speculative_generate,
    token_verify,
)
from specjax.controls import NoRepeatNgram
from specjax.sampling import mask_dead_rows
from specjax.verify import coupled_verify, token_rule
from tests.helpers import (
    HashModel,
    hash_pair,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
)

ROWS, WIDTH = 3, 8
TARGET, DRAFT = hash_pair()
MODEL = ModelDrafter(DRAFT)


def decode(*, target=TARGET, drafter=MODEL, seed=0, width=WIDTH, **options):
    """A batch whose longest source has `width` tokens, padded to a multiple of 8."""
    inputs, mask = ragged_sources(seed, ROWS, width)
    pad = ((0, 0), (0, -width % 8))
    options = {"gamma": 2, "max_length": 14, "budget": 6, **options}
    output = speculative_generate(
        target,
        drafter,
        jnp.pad(inputs, pad),
        jnp.pad(mask, pad),
        row_keys(seed, ROWS),
        **options,
    )
    return jax.block_until_ready(output)


@contextlib.contextmanager
def programs(expected: int) -> Iterator[None]:
    """Asserts that so many programs are compiled inside."""
    before = decoding._speculative_loop._cache_size()
    yield
    assert decoding._speculative_loop._cache_size() - before == expected


def test_values_compile_nothing_new():
    """Seed, weights, prompt in its bucket, sampling, budget, EOS, stop sequences."""
    stop = jnp.array([[60, 61], [62, -1]])
    cut = Sampling(temperature=0.7, top_k=5, top_p=0.9)
    with programs(1):
        first = decode(sampling=cut, draft_sampling=cut, stop=stop)
    other, _ = hash_pair(9)
    same = dict(sampling=cut, draft_sampling=cut, stop=stop, seed=1)
    with programs(0):
        results = [
            decode(**{**same, **changed})
            for changed in (
                {},
                {"target": other, "drafter": ModelDrafter(HashModel(other.table + 1))},
                *({"width": width} for width in range(1, 9)),
                {"sampling": Sampling(temperature=2, top_k=7, top_p=0.5)},
                {"sampling": Sampling(temperature=jnp.float32(0.1), top_k=1, top_p=1)},
                {"draft_sampling": Sampling(temperature=0.0, top_k=64, top_p=0.1)},
                {"budget": 3},
                {"budget": jnp.array([0, 1, 9])},
                {"eos_id": 7},
                {"eos_id": -1},
                {"stop": jnp.array([[4, 5], [6, 7]])},
            )
        ]
    texts = {tuple(output.tokens.ravel().tolist()) for output in [first, *results]}
    assert len(texts) > 10


def test_numbers_of_numpy_compile_nothing_new(monkeypatch):
    # Annotations refuse them here alone: a user has no such guard.
    for module, name in (
        (checks, "check_speculation"),
        (checks, "check_arguments"),
        (checks, "decode_arguments"),
    ):
        monkeypatch.setattr(module, name, inspect.unwrap(getattr(module, name)))
    monkeypatch.setitem(
        globals(), "speculative_generate", inspect.unwrap(speculative_generate)
    )
    decode(gamma=3, max_length=13)
    with programs(0):
        decode(gamma=np.int64(3), max_length=np.int64(13))


def test_structure_compiles():
    """Greedy and sampled, top-k or top-p present or absent: programs of their own."""
    greedy = Sampling(temperature=None)
    copying = dict(drafter=NgramDrafter(), gamma=1)
    with programs(1):
        decode(sampling=greedy, **copying)
        decode(sampling=greedy, seed=3, **copying)
    with programs(1):
        decode(sampling=Sampling(temperature=0.0), **copying)
        decode(sampling=Sampling(temperature=1.5), **copying)
    with programs(1):
        decode(sampling=Sampling(top_p=0.5), **copying)
    with programs(1):
        decode(sampling=greedy, draft_sampling=Sampling(), gamma=1)


def traced(sampling: Sampling):
    """The program of a small decode, traced anew and not compiled."""

    def loop(*models, **settings):  # another function each time
        return inspect.unwrap(decoding._speculative_loop)(*models, **settings)

    arguments = checks.decode_arguments(
        TARGET,
        *ragged_sources(0, ROWS, WIDTH),
        row_keys(0, ROWS),
        sampling,
        12,
        None,
        None,
        None,
        1,
    )
    static = ("gamma", "max_length", "log_probs", "trace")
    return jax.jit(loop, static_argnames=static).trace(
        TARGET,
        ModelDrafter(DRAFT),
        verifier=token_verify,
        draft_sampling=arguments["sampling"],
        stop=None,
        gamma=2,
        log_probs=False,
        trace=False,
        **arguments,
    )


def test_greedy_programs_hold_neither_sort_nor_random_bits():
    def text(sampling: Sampling) -> str:
        return str(traced(sampling).jaxpr)

    greedy = text(Sampling(temperature=None))
    assert "random_bits" not in greedy and "sort[" not in greedy
    sampled = text(Sampling(temperature=1.0))
    assert "random_bits" in sampled and "sort[" not in sampled
    assert "sort[" in text(Sampling(temperature=1.0, top_k=2))


def test_controls_that_are_not_used_are_no_part_of_the_program(monkeypatch):
    """Without any the program is, word for word, that of a loop that knows of none."""

    def text(*controls) -> str:
        return traced(Sampling(controls=controls)).lower().as_text()

    unused, used = text(), text(NoRepeatNgram(2))
    assert text() == unused != used

    def without(self, logits, prefix=None):
        called.append(prefix)
        return mask_dead_rows(logits, self.num_tokens)

    called: list = []
    monkeypatch.setattr(Sampling, "edited", without)
    monkeypatch.setattr(decoding, "block_prefix", None)
    assert text() == unused and called


def test_as_many_programs_as_buckets():
    """Sources of 1 .. 24 tokens in buckets of 8, 16 and 24; the second pass is free."""
    options = dict(
        drafter=NgramDrafter(), sampling=Sampling(temperature=None), max_length=15
    )
    with programs(3):
        for width in range(1, 25):
            decode(width=width, **options)
    with programs(0):
        for width in range(24, 0, -1):
            decode(width=width, seed=width, **options)


def reused(noise, block, scored, params):
    """The planted fault: one key for two numbers."""
    verdict = token_rule(noise, block, scored, params)
    key = noise.key(0, 1)
    twice = jax.random.uniform(key) + jax.random.uniform(key)
    return verdict.replace(
        next_token=verdict.next_token * (twice < 9).astype(jnp.int32)
    )


@pytest.mark.parametrize("name", ["plain", "token", "block", "ngram", "coupled"])
def test_no_key_is_used_twice(name):
    inputs, mask = ragged_sources(0, ROWS, WIDTH)
    with jax.debug_key_reuse(True):
        keys = row_keys(0, ROWS)
        if name == "plain":
            autoregressive_generate(TARGET, inputs, mask, keys, max_length=8)
            return
        drafter = NgramDrafter() if name == "ngram" else ModelDrafter(DRAFT)
        verifiers = {"token": token_verify, "coupled": coupled_verify}
        speculative_generate(
            TARGET,
            drafter,
            inputs,
            mask,
            keys,
            gamma=2,
            max_length=8,
            verifier=verifiers.get(name, block_verify),
        )


def test_a_key_used_twice_is_found_out():
    inputs, mask = ragged_sources(0, ROWS, WIDTH)
    with (
        jax.debug_key_reuse(True),
        pytest.raises(jax.errors.KeyReuseError),
    ):
        speculative_generate(
            TARGET,
            ModelDrafter(DRAFT),
            inputs,
            mask,
            row_keys(0, ROWS),
            gamma=2,
            max_length=8,
            verifier=Verifier(reused),
        )


def test_arguments_stay_usable_and_nothing_is_left_behind():
    """The same arrays again and again: none donated, changed in place, or kept."""
    inputs, mask = ragged_sources(0, ROWS, WIDTH)
    keys = row_keys(0, ROWS)
    given = (TARGET, DRAFT, inputs, mask)
    before = jax.tree.map(jnp.copy, given)

    def run():
        return speculative_generate(
            TARGET,
            NgramDrafter(),
            inputs,
            mask,
            keys,
            sampling=Sampling(temperature=None),
            gamma=2,
            max_length=14,
        ).tokens

    first = run()
    assert jnp.array_equal(run(), first)
    for one, two in zip(jax.tree.leaves(before), jax.tree.leaves(given), strict=True):
        assert jnp.array_equal(one, two)

    def alive() -> int:
        gc.collect()
        return len(jax.live_arrays())

    held = alive()
    for _ in range(5):
        run()
    assert alive() == held
