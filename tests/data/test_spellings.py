"""Texts to begin with and to stop at, as ids."""

import pytest

from specjax import errors
from specjax.data import spellings
from specjax.data import tokenizer as tokenizers
from tests import pairs


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    path = tmp_path_factory.mktemp("spiece") / "spiece.model"
    tokenizers.train_sentencepiece(pairs.TEXTS, pairs.PIECES, path)
    return tokenizers.SentencePieceTokenizer.from_file(path)


def rows(ids) -> list[list[int]]:
    return [[index for index in row if index >= 0] for row in ids.tolist()]


def test_a_stop_has_a_spelling_within_a_word_too(pieces):
    found = rows(spellings.stop_sequences(pieces, [".", "disk"]))
    sentence = pieces.encode("reads the disk.")
    full_stop = [own for own in found if pieces.decode(own) == "."]
    assert len(full_stop) == 2
    # One of them ends the sentence as the tokenizer spells it, the other does not.
    ends = [sentence[-1 - len(own) : -1] == own for own in full_stop]
    assert sorted(ends) == [False, True]
    assert pieces.encode("disk")[:-1] in found


def test_without_sentinels_only_a_words_start_is_known(pieces):
    bare = tokenizers.SentencePieceTokenizer(pieces.model, num_sentinels=0)
    assert rows(spellings.stop_sequences(bare, ["disk"])) == [bare.encode("disk")[:-1]]


def test_bytes_have_one_spelling():
    own = tokenizers.ByteTokenizer()
    found = spellings.stop_sequences(own, ["\n", "ab"])
    assert found.tolist() == [[13, -1], [100, 101]]


def test_prefixes(pieces):
    ids, length = spellings.decoder_prefixes(pieces, ["the disk", "", "a"])
    assert length.tolist() == [len(pieces.encode("the disk")), 1, 2]
    assert ids[:, 0].tolist() == [0, 0, 0] and ids[1].tolist() == [0] * ids.shape[1]
    assert pieces.decode(ids[0, 1 : length[0]].tolist()) == "the disk"


@pytest.mark.parametrize("text", ["漢", " "])
def test_what_cannot_be_spelled(pieces, text):
    with pytest.raises(errors.InputError, match="cannot be spelled by the tokenizer"):
        spellings.stop_sequences(pieces, [text])
    with pytest.raises(errors.InputError, match="cannot be spelled by the tokenizer"):
        spellings.decoder_prefixes(pieces, ["a", text])
    with pytest.raises(errors.InputError, match="no text to stop at"):
        spellings.stop_sequences(pieces, [])
