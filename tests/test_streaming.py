"""Streams: the joined pieces are the whole text, and no piece splits a character."""

from __future__ import annotations

import inspect
import io

import jax.numpy as jnp
import pytest

from specjax import InputError, Pair, Sampling, decoding, streaming
from specjax.data import tokenizer as tokenizers
from specjax.data.tokenizer import ByteTokenizer
from specjax.verify import coupled_verify
from tests.helpers import hash_pair, quick_compile, ragged_sources, row_keys  # noqa: F401
from tests.test_pair_rows import ALONE, LINES, PAIR

TEXT = "aé漢\N{REPLACEMENT CHARACTER}🙂e\N{COMBINING ACUTE ACCENT}."


def test_pieces_of_bytes_split_anywhere():
    own = ByteTokenizer()
    ids = own.encode(TEXT)
    for size in range(1, len(ids) + 1):
        for first in range(size):
            cuts = [0, *range(first, len(ids), size), len(ids)]
            calls = [ids[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            found = list(streaming.pieces(own, calls))
            assert "".join(found) == TEXT and "" not in found
            # Every prefix is one of the text: nothing was taken back.
            assert all(TEXT.startswith("".join(found[:n])) for n in range(len(found)))
    one_by_one = list(streaming.pieces(own, [[index] for index in ids]))
    assert one_by_one[:3] == ["a", "é", "漢"]


def test_bytes_that_nothing_completes_come_last():
    own = ByteTokenizer()
    half = [3 + byte for byte in "x🙂".encode()[:-1]]
    assert list(streaming.pieces(own, [half[:2], half[2:]])) == [
        "x",
        own.decode(half)[1:],
    ]
    other = [[3 + byte] for byte in b"x\xe6y"]
    assert list(streaming.pieces(own, other)) == ["x", "\N{REPLACEMENT CHARACTER}y"]


@pytest.fixture(scope="module")
def fallback():
    """A SentencePiece model that spells what it has no piece for in bytes."""
    import sentencepiece

    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat reads the mail", "a cat and the disk"] * 50),
        model_writer=buffer,
        vocab_size=290,
        hard_vocab_limit=False,
        byte_fallback=True,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
    )
    return tokenizers.SentencePieceTokenizer(buffer.getvalue())


def test_pieces_of_byte_fallback(fallback):
    ids = fallback.encode("the 漢 cat 🙂")
    # Seven bytes for the two characters, whatever pieces a version of the trainer has
    # found for the rest.
    assert len(ids) - len(fallback.encode("the  cat ")) >= 7
    found = list(streaming.pieces(fallback, [[index] for index in ids]))
    assert len(ids) - len(found) >= 2 + 3  # the first bytes of each add nothing yet
    assert "".join(found) == fallback.decode(ids) == "the 漢 cat 🙂"
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(found)
    assert "漢" in found and "🙂" in found


SAMPLED = Sampling(temperature=0.7)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"sampling": SAMPLED, "seed": 3},
        {"prefix": "ab", "stop": ["q", "zz"], "budget": 9},
    ],
    ids=["greedy", "sampled", "cut"],
)
@pytest.mark.parametrize("own", [PAIR, ALONE], ids=["drafted", "alone"])
def test_the_joined_pieces_are_the_text(own, settings):
    settings = {"max_length": 40} | settings
    if own is PAIR:
        settings["gamma"] = 3
    for line in LINES[:2]:
        whole = own.generate([line], **settings)
        found = list(own.stream(line, **settings))
        assert "".join(found) == whole.text
        # Letters alone: a piece for each call.
        assert len(found) == int(whole.stats.target_calls[0])
        if own is ALONE:
            assert all(len(piece) == 1 for piece in found)


def test_a_row_of_a_batch_streams_until_it_ends():
    target, draft = PAIR.target, PAIR.drafter
    common = (*ragged_sources(0, 3, 9), row_keys(0, 3))
    options = dict(sampling=SAMPLED, max_length=20, budget=jnp.array([9, 0, 4]))
    for verifier in (decoding.token_verify, coupled_verify):
        own = options | {"verifier": verifier, "gamma": 3}
        whole = decoding.speculative_generate(target, draft, *common, **own)
        rows = [[], [], []]
        for call in streaming.speculative_stream(target, draft, *common, **own):
            for row, new in zip(rows, call, strict=True):
                row += new
        assert [len(row) for row in rows] == [9, 0, 4]
        for row, tokens, length in zip(rows, whole.tokens, whole.length, strict=True):
            assert row == tokens[1:length].tolist()


def test_refused_at_once():
    with pytest.raises(InputError, match="stream takes one text"):
        inspect.unwrap(Pair.stream)(PAIR, LINES)  # around the check of types
    with pytest.raises(InputError, match="is empty"):
        PAIR.stream(" ")
    with pytest.raises(InputError, match="gamma is 0"):
        PAIR.stream("a", gamma=0)
    with pytest.raises(InputError, match="must leave room"):
        ALONE.stream("a", prefix="abc", max_length=4)


@pytest.mark.parametrize("way", ["speculative", "autoregressive"])
def test_a_stream_takes_what_its_loop_takes(way):
    whole = inspect.signature(getattr(decoding, f"{way}_generate")).parameters
    calls = inspect.signature(getattr(streaming, f"{way}_stream")).parameters
    left_out = {"log_probs", "trace"} & set(whole)
    assert set(whole) - set(calls) == left_out
    assert all(calls[name].default == whole[name].default for name in calls)
