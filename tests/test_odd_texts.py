"""Odd texts are decoded whole or refused in a sentence; none crashes, none is cut."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import unicodedata

import pytest

import specjax
from experiments import input_lines
from specjax import decoding, zoo
from specjax.data import characters
from specjax.data import tokenizer as tokenizers
from specjax.errors import InputError
from tests import pairs
from tests.odd_texts import odd_texts

TEXTS = odd_texts()


def shown(text: str, marked: bool) -> collections.Counter[str]:
    """How often each ASCII letter and digit stands there, in T5's normal form.

    Args:
        text: of any characters.
        marked: also below combining marks, which may make it an unknown character.
    """
    plain = unicodedata.normalize("NFKD", text) + " "
    return collections.Counter(
        own
        for own, after in itertools.pairwise(plain)
        if own.isascii()
        and own.isalnum()
        and (marked or not unicodedata.combining(after))
    )


def is_text(text: str) -> bool:
    return not any(0xD800 <= ord(character) < 0xE000 for character in text)


def test_there_are_a_thousand():
    assert len(TEXTS) == 1000 == len(odd_texts()) and odd_texts() == TEXTS
    assert sum(map(is_text, TEXTS)) == 940
    assert sum(characters.is_blank(text) for text in TEXTS) >= 60
    assert max(len(text.split()) for text in TEXTS) == 10_000


@pytest.mark.parametrize("name", ["zoo/ende/target", "zoo/repair/target", "bytes"])
def test_a_tokenizer_keeps_all_or_refuses(name):
    """Each character is spelled, or an unknown id stands in its place."""
    tokenizer: tokenizers.Tokenizer = tokenizers.ByteTokenizer()
    if name != "bytes":
        tokenizer = tokenizers.load_tokenizer(zoo.locate(name))
    refused = 0
    for text in TEXTS:
        if not is_text(text):
            with pytest.raises(
                InputError, match=r"is U\+D[89A-F].*half of a surrogate"
            ):
                tokenizer.encode(text)
            refused += 1
            continue
        ids = tokenizer.encode(text)
        assert ids[-1] == tokenizer.eos_id and tokenizer.eos_id not in ids[:-1]
        assert tokenizer.pad_id not in ids
        assert 0 <= min(ids) and max(ids) < tokenizer.vocab_size
        written = tokenizer.decode(ids)
        assert "".join(tokenizer.decode_pieces(ids)) == written
        if name == "bytes":
            assert written == text
            continue
        assert shown(text, False) <= shown(written, True) <= shown(text, True), text
        # What leaves no trace does not show, or is SentencePiece's sign of a space.
        if ids == [tokenizer.eos_id]:
            assert characters.is_blank(text.replace("\u2581", " ")), text
    assert refused == 60


def test_a_cut_would_be_seen():
    """The twin: a tokenizer that stops at NUL, as strings of C do."""
    cut = [(text, text.partition("\x00")[0]) for text in TEXTS]
    cut = [own for text, own in cut if not shown(text, False) <= shown(own, True)]
    assert len(cut) > 5


def test_the_line_reader_keeps_all_or_refuses(tmp_path):
    """Each text alone in a file, then all that may stand there in one."""
    path, kept = tmp_path / "lines.txt", []
    for text in TEXTS:
        path.write_bytes(text.encode("utf-8", "surrogatepass") + b"\n")
        try:
            lines = input_lines.read_lines(path)
        except InputError as error:
            assert not is_text(text) or characters.is_blank(text)
            assert str(path) in str(error)
        else:
            assert is_text(text) and lines == [text.removesuffix("\r")]
            kept.append(lines[0])
    assert 850 < len(kept) < 940
    kept = [line for line in kept if not line.endswith("\r")]
    path.write_bytes("\n".join(kept).encode())
    assert input_lines.read_lines(path) == kept
    # A line that fits no bucket is named, not cut.
    rows = [tokenizers.ByteTokenizer().encode(line) for line in kept]
    first = next(i for i, row in enumerate(rows) if len(row) > 4096)
    with pytest.raises(InputError, match=f"line {first + 1} has {len(rows[first])} to"):
        input_lines.check_lengths(rows, (64, 4096), path)


@pytest.mark.slow
def test_a_pair_decodes_or_refuses():
    """Every text that may pass does so, by one program; the rest never comes so far."""
    pair = specjax.load("zoo/ende/target", "zoo/ende/draft")
    pair = dataclasses.replace(pair, max_source=32)
    passing = []
    for text in TEXTS:
        try:
            pair.generate_batches([text], batch_size=None, max_length=10)
        except InputError as error:
            long = is_text(text) and len(pair.tokenizer.encode(text)) > 32
            assert not is_text(text) or long or characters.is_blank(text), error
        else:
            assert is_text(text)
            passing.append(text)
    assert len(passing) > 400
    before = decoding._speculative_loop._cache_size()
    made = pair.generate(passing, batch_size=64, gamma=3, max_length=10)
    assert decoding._speculative_loop._cache_size() == before + 1
    assert len(made.texts) == len(passing) and made.complete
    assert len(set(made.texts)) > 100


@pytest.mark.slow
def test_the_command_decodes_each_line_whole(tmp_path):
    folders = pairs.make_pair(tmp_path / "pair")
    tokenizer = tokenizers.load_tokenizer(folders.target)
    lines = [
        text
        for text in TEXTS
        if is_text(text)
        and not characters.is_blank(text)
        and not {"\n", "\r"} & set(text[-1:])
        and len(tokenizer.encode(text)) <= pairs.BUCKET
    ][::8]
    assert len(lines) > 40
    path = tmp_path / "lines.txt"
    path.write_bytes("\n".join(lines).encode())
    with pairs.costs_are():
        run = pairs.run_decode(
            dataclasses.replace(folders, input=path),
            tmp_path / "run",
            "--config.runs=greedy",
            "--config.batch_size=16",
        )
    assert run.code == 0, run.err
    assert [line["input"] for line in run.decodes] == lines
