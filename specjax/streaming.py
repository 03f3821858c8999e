"""A decode's tokens and text as they are written, one target call after the other.

The loops of `specjax.decoding` driven from Python: what a call has written stands, so
that the pieces joined are what the loop writes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from specjax import checks
from specjax.data.tokenizer import Tokenizer
from specjax.decode_state import DecodeState
from specjax.decoding import (
    autoregressive_step,
    speculative_init,
    speculative_step,
)
from specjax.drafters.base import Drafter
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling, with_arrays
from specjax.verify import Verifier, token_verify

# Of a call, each row's new tokens; a row that has ended has none.
Calls = Iterator[list[list[int]]]

_begin = jax.jit(speculative_init, static_argnames=("gamma", "max_length"))
_speculate = jax.jit(speculative_step, static_argnames=("gamma",))
_write = jax.jit(autoregressive_step)


def speculative_stream(
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
) -> Calls:
    """The tokens of `speculative_generate`, as each target call writes them.

    Args:
        target: the model whose law the tokens follow. All that follows: as of
            `speculative_generate`.

    Raises:
        InputError: as `speculative_generate`, at once.
    """
    draft_sampling = checks.check_speculation(
        drafter, verifier, sampling, draft_sampling, gamma, len(inputs)
    )
    start = checks.decode_arguments(
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
    settings = _of_steps(start, stop)
    encoded, state = _begin(target, drafter, gamma=int(gamma), **start)
    step = functools.partial(
        _speculate,
        target,
        drafter,
        encoded,
        keys,
        verifier=verifier,
        draft_sampling=with_arrays(draft_sampling),
        gamma=int(gamma),
        **settings,
    )
    return _calls(step, state)


def autoregressive_stream(
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
) -> Calls:
    """The tokens of `autoregressive_generate`, one after the other.

    Args:
        target: the model. All that follows: as of `autoregressive_generate`.

    Raises:
        InputError: as `autoregressive_generate`, at once.
    """
    start = checks.decode_arguments(
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
    settings = _of_steps(start, stop)
    encoded, state = _begin(target, None, gamma=0, **start)
    step = functools.partial(_write, target, encoded, keys, **settings)
    return _calls(step, state)


def pieces(tokenizer: Tokenizer, calls: Iterable[list[int]]) -> Iterator[str]:
    """The text that each call adds; joined it is the tokenizer's own of all tokens.

    A character whose bytes are not all there waits for the call that completes it; one
    that nothing completes comes last, as the replacement character. What adds no text
    yields nothing.

    Args:
        tokenizer: that the tokens are of.
        calls: the new tokens of each call.
    """
    ids: list[int] = []
    text, given = "", 0
    for new in calls:
        ids += new
        text = tokenizer.decode(ids)
        # Bytes of a part of a character stand last, as what replaces them.
        whole = len(text.rstrip("\N{REPLACEMENT CHARACTER}"))
        if whole > given:
            yield text[given:whole]
            given = whole
    if len(text) > given:
        yield text[given:]


def _of_steps(start: dict[str, Any], stop: Array | None) -> dict[str, Any]:
    """Takes out of the arguments what each step takes, and the init does not."""
    del start["keys"]  # callers have them
    settings = {name: start.pop(name) for name in ("sampling", "eos_id")}
    return settings | {"stop": checks.check_stop(stop)}


def _calls(step: Callable[[DecodeState], DecodeState], state: DecodeState) -> Calls:
    before = np.asarray(state.length)
    while not np.all(state.done):
        state = step(state)
        tokens, length = np.asarray(state.tokens), np.asarray(state.length)
        yield [
            own[start:end].tolist()
            for own, start, end in zip(tokens, before, length, strict=True)
        ]
        before = length
