"""Decodes as coloured text: each token's origin, and nothing lost of the text."""

import jax.numpy as jnp
import pytest

from specjax import decoding
from specjax.decode_state import Trace
from specjax.errors import InputError
from specjax.report import trace

A, C, B = trace.ACCEPTED, trace.CORRECTED, trace.BONUS
EOS, BAR = 1, "\N{BOX DRAWINGS LIGHT VERTICAL}"

# One row's calls: the drafted tokens that are real, how many stood, what followed.
CALLS = [((5, 6, 7), 3, 8), ((5, 6, 7), 0, 9), ((4, 3), 2, 6), ((), 0, 7)]
WRITTEN = [5, 6, 7, 8, 9, 4, 3, 6, 7]
KINDS = [A, A, A, B, C, A, A, B, C]
CALL = [0, 0, 0, 0, 1, 2, 2, 2, 3]


def output(calls, emitted, row=0, gamma=3):
    """What a traced decode of two rows gives; the other row holds other things."""
    shape = (2, 6, gamma)
    drafted = jnp.full(shape, 99, jnp.int32)
    length, accepted, following = (jnp.full(shape[:2], 2, jnp.int32) for _ in range(3))
    for call, (tokens, stood, after) in enumerate(calls):
        for place, token in enumerate(tokens):
            drafted = drafted.at[row, call, place].set(token)
        length = length.at[row, call].set(len(tokens))
        accepted = accepted.at[row, call].set(stood)
        following = following.at[row, call].set(after)
    zeros = jnp.zeros(shape, jnp.float32)
    counts = jnp.zeros((2, gamma), jnp.int32)
    return decoding.DecodeOutput(
        tokens=jnp.zeros((2, 20), jnp.int32),
        length=jnp.full(2, 20, jnp.int32),
        stats=decoding.Stats(
            target_calls=jnp.zeros(2, jnp.int32).at[row].set(len(calls)),
            emitted=jnp.zeros(2, jnp.int32).at[row].set(emitted),
            drafted=counts,
            accepted=counts,
        ),
        trace=Trace(
            tokens=drafted,
            p=zeros,
            q=zeros,
            length=length,
            num_accepted=accepted,
            next_token=following,
        ),
    )


@pytest.mark.parametrize("row", [0, 1])
def test_each_token_s_origin(row):
    tokens = trace.traced_tokens(output(CALLS, 9, row), row)
    assert [own.token for own in tokens] == WRITTEN
    assert [own.kind for own in tokens] == KINDS
    assert [own.call for own in tokens] == CALL
    assert trace.traced_tokens(output(CALLS, 9, row), 1 - row) == []


@pytest.mark.parametrize("emitted", range(1, 5))
def test_the_last_call_is_cut(emitted):
    """At EOS, which may be drafted and accepted, or where the budget ends."""
    calls = [*CALLS[1:2], ((5, EOS, 7), 3, 8)]
    tokens = trace.traced_tokens(output(calls, emitted), 0)
    assert [own.token for own in tokens] == [9, 5, EOS, 7][:emitted]
    assert [own.kind for own in tokens] == [C, A, A, A][:emitted]


def test_a_decode_without_a_trace_is_refused():
    with pytest.raises(InputError, match="trace=True"):
        trace.traced_tokens(output(CALLS, 9).replace(trace=None), 0)


def test_colours_lose_nothing_of_the_text():
    texts = ["The", " [bold]", "", " x", "ä", "[/]", " |", ".", ""]
    tokens = trace.traced_tokens(output(CALLS, 9), 0)
    line = trace.coloured(tokens, texts)
    assert line.plain.replace(BAR, "") == "".join(texts)
    # A bar after each call but the last.
    assert line.plain == f"The [bold] x{BAR}ä{BAR}[/] |.{BAR}"
    styles = [(line.plain[span.start : span.end], span.style) for span in line.spans]
    shown = [(text, style) for text, style in styles if style != "dim"]
    expected = [
        (text, trace.STYLES[own.kind])
        for text, own in zip(texts, tokens, strict=True)
        if text
    ]
    assert shown == expected
    assert len({trace.STYLES[kind] for kind in (A, B, C)}) == 3


def test_without_colours_brackets_tell_the_kinds_apart():
    texts = ["The", " cat", "", " x", "ä", "y", " z", ".", ""]
    tokens = trace.traced_tokens(output(CALLS, 9), 0)
    marked = {A: "{}", C: "[{}]", B: "{{{}}}"}
    expected = ""
    for i, (own, text) in enumerate(zip(tokens, texts, strict=True)):
        space = " " * (len(text) - len(text.lstrip()))
        expected += space
        if text.strip():
            expected += marked[own.kind].format(text.strip())
        if i + 1 < len(tokens) and tokens[i + 1].call != own.call:
            expected += BAR
    assert trace.coloured(tokens, texts, marks=True).plain == expected
    legend = trace.legend(marks=True).plain
    assert "[corrected]" in legend and "{bonus of a whole block}" in legend


def test_one_text_per_token():
    tokens = trace.traced_tokens(output(CALLS, 9), 0)
    with pytest.raises(InputError, match="8 texts for 9 tokens"):
        trace.coloured(tokens, ["a"] * 8)
    assert trace.coloured([], []).plain == ""


def test_the_legend_names_every_kind_on_one_line():
    legend = trace.legend()
    assert {span.style for span in legend.spans} >= set(trace.STYLES.values())
    assert BAR in legend.plain and len(legend.plain) < 80
