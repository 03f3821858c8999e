"""Tokenizers: T5's conventions, round trips, and the text of each id."""

import io
import json
import random
import string
import sys

import pytest

from specjax import errors
from specjax.data import tokenizer

SIZE = 120
WORDS = "the draft model writes some tokens and target checks them all at once".split()


def _texts(count: int = 300) -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=9)).capitalize() + "." for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("spiece")
    tokenizer.train_sentencepiece(_texts(), SIZE, path / "spiece.model")
    return path


@pytest.fixture(scope="module")
def pieces(folder):
    return tokenizer.load_tokenizer(folder)


def _train(path, **settings):
    import sentencepiece

    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_texts()),
        model_writer=buffer,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        minloglevel=2,
        **settings,
    )
    path.write_bytes(buffer.getvalue())
    return path


def test_special_ids_follow_t5(pieces):
    assert (pieces.pad_id, pieces.eos_id, pieces.unk_id) == (0, 1, 2)
    assert [pieces.piece(i) for i in range(3)] == ["<pad>", "</s>", "<unk>"]
    assert pieces.vocab_size == SIZE + 100


def test_sentinels_count_down_from_the_last_id(pieces):
    last = pieces.vocab_size - 1
    assert pieces.encode("<extra_id_0>") == [last, 1]
    assert pieces.encode("<extra_id_99>") == [last - 99, 1]
    assert pieces.piece(last - 7) == "<extra_id_7>"
    assert pieces.decode([last, last - 1]) == "<extra_id_0><extra_id_1>"


def test_a_sentinel_that_does_not_exist_is_text(pieces):
    ids = pieces.encode("<extra_id_100>")
    assert max(ids) < SIZE
    assert pieces.decode(ids) == "<extra_id_100>"


def test_text_around_sentinels_keeps_its_spaces(pieces):
    text = "Draft<extra_id_0> model<extra_id_1>s."
    ids = pieces.encode(text)
    assert ids[-1] == 1 and ids.count(1) == 1
    assert pieces.decode(ids) == text
    assert pieces.encode(pieces.decode(ids)) == ids


@pytest.mark.parametrize("text", ["", "the", "The draft model.", "a {b} ~ \\ c?"])
def test_every_text_ends_in_one_eos_and_round_trips(pieces, text):
    ids = pieces.encode(text)
    assert ids.count(1) == 1 and ids[-1] == 1
    assert pieces.unk_id not in ids
    assert pieces.decode(ids) == text


def test_no_text_can_end_a_sequence_early(pieces):
    ids = pieces.encode("the </s> draft <pad> model")
    assert ids.count(1) == 1 and ids[-1] == 1 and 0 not in ids
    assert pieces.decode(ids) == "the </s> draft <pad> model"


def test_white_space_is_normalised_as_in_t5(pieces):
    assert pieces.decode(pieces.encode("  the\n draft  ")) == "the draft"


def test_decode_stops_at_eos_and_skips_padding(pieces):
    ids = pieces.encode("The draft")
    more = [0, *ids, *pieces.encode("model"), 0, 0]
    assert pieces.decode(more) == "The draft"
    texts = pieces.decode_pieces(more)
    assert len(texts) == len(more)
    assert texts[0] == "" and set(texts[len(ids) :]) == {""}


def test_an_unknown_character_shows(pieces):
    ids = pieces.encode("the 漢 draft")
    assert ids.count(2) == 1
    assert "⁇" in pieces.decode(ids)


def test_decode_agrees_with_sentencepiece(folder, pieces):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(
        model_file=str(folder / "spiece.model")
    )
    rng = random.Random(1)
    for text in [*_texts(50), string.printable]:
        assert pieces.encode(text) == [*processor.encode(text), 1]
        ids = [rng.randrange(2, SIZE) for _ in range(12)]
        # Only spaces beside unknowns and at the start are the two's own affair.
        assert "".join(pieces.decode(ids).split()) == "".join(
            processor.decode(ids).split()
        )
        known = [i for i in ids if i != 2]
        assert pieces.decode(known).strip() == processor.decode(known).strip()


def test_pieces_joined_are_the_text(pieces):
    ids = pieces.encode("The target<extra_id_3> checks them, (all) 漢.")
    texts = pieces.decode_pieces(ids)
    assert len(texts) == len(ids)
    assert "".join(texts) == pieces.decode(ids)
    assert not next(text for text in texts if text).startswith(" ")


@pytest.mark.parametrize("ids", [[SIZE + 100], [5, -1]])
def test_an_id_without_a_piece_is_refused(pieces, ids):
    with pytest.raises(errors.InputError, match=rf"id ({SIZE + 100}|-1) at position"):
        pieces.decode(ids)


def test_training_twice_gives_the_same_file(folder, tmp_path):
    tokenizer.train_sentencepiece(_texts(), SIZE, tmp_path / "again.model")
    again = (tmp_path / "again.model").read_bytes()
    assert again == (folder / "spiece.model").read_bytes()


def test_equal_files_make_equal_tokenizers(folder, pieces):
    again = tokenizer.load_tokenizer(folder)
    assert again == pieces and hash(again) == hash(pieces)


def test_impossible_vocabulary_sizes_are_refused(tmp_path):
    with pytest.raises(errors.InputError, match="5000 pieces"):
        tokenizer.train_sentencepiece(_texts(20), 5000, tmp_path / "x.model")
    with pytest.raises(errors.InputError, match="vocab_size 50"):
        tokenizer.train_sentencepiece(_texts(20), 50, tmp_path / "x.model")


def test_sentinels_inside_the_model_file_are_not_added_again(tmp_path):
    names = [f"<extra_id_{k}>" for k in (1, 0)]
    path = _train(tmp_path / "m", vocab_size=50, user_defined_symbols=names)
    own = tokenizer.SentencePieceTokenizer.from_file(path)
    assert own.vocab_size == 50
    ids = own.encode("the <extra_id_1> draft")
    assert [own.piece(i) for i in ids].count("<extra_id_1>") == 1
    assert own.decode(ids) == "the<extra_id_1> draft"


def test_a_character_of_several_byte_pieces_is_not_split(tmp_path):
    path = _train(tmp_path / "m", vocab_size=305, byte_fallback=True)
    own = tokenizer.SentencePieceTokenizer.from_file(path)
    ids = own.encode("the 漢 é")
    texts = own.decode_pieces(ids)
    assert own.decode(ids) == "the 漢 é" == "".join(texts)
    assert "漢" in texts and "é" in texts and "�" not in "".join(texts)


def test_a_model_with_other_special_ids_is_refused(tmp_path):
    import sentencepiece

    buffer = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(_texts()),
        model_writer=buffer,
        vocab_size=50,
        minloglevel=2,
    )
    (tmp_path / "m").write_bytes(buffer.getvalue())
    with pytest.raises(errors.InputError, match=r"pad, eos, unk at ids \(-1, 2, 0\)"):
        tokenizer.SentencePieceTokenizer.from_file(tmp_path / "m")


def test_bytes_follow_byt5():
    own = tokenizer.ByteTokenizer()
    assert own.vocab_size == 384
    assert own.encode("aé") == [100, 198, 172, 1]
    assert own.encode("<extra_id_0>") == [259, 1]
    assert own.encode("<extra_id_124>") == [383, 1]
    assert own.piece(259) == "<extra_id_0>" and own.piece(68) == "<0x41>"


@pytest.mark.parametrize(
    "text", ["", "a  b\n\t{c}", "漢字 é 😀", "x<extra_id_4>y", "<extra_id_125>", "</s>"]
)
def test_bytes_lose_nothing(text):
    own = tokenizer.ByteTokenizer()
    ids = own.encode(text)
    assert ids.count(1) == 1
    texts = own.decode_pieces(ids)
    assert len(texts) == len(ids)
    assert own.decode(ids) == "".join(texts) == text


def test_bytes_that_are_no_text_show():
    own = tokenizer.ByteTokenizer()
    half = own.encode("漢")[:2]
    assert own.decode(half) == "�"
    assert own.decode([*half, 259, *own.encode("x")]) == "�<extra_id_0>x"
    assert own.decode_pieces([*own.encode("漢")[:3]]) == ["", "", "漢"]
    with pytest.raises(errors.InputError, match="id 384"):
        own.decode([384])


def test_load_reads_the_number_of_sentinels(folder, tmp_path):
    (tmp_path / "spiece.model").write_bytes((folder / "spiece.model").read_bytes())
    config = {"tokenizer_class": "T5Tokenizer", "extra_ids": 7}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer.load_tokenizer(tmp_path).vocab_size == SIZE + 7


def test_load_knows_byt5(tmp_path):
    config = {"tokenizer_class": "ByT5Tokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer.load_tokenizer(tmp_path) == tokenizer.ByteTokenizer()


def test_load_says_what_is_missing(tmp_path):
    with pytest.raises(errors.InputError, match=r"needs spiece\.model"):
        tokenizer.load_tokenizer(tmp_path)
    with pytest.raises(errors.InputError, match="there is no folder"):
        tokenizer.load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "spiece.model").write_bytes(b"half a file")
    with pytest.raises(errors.InputError, match="not a SentencePiece model"):
        tokenizer.load_tokenizer(tmp_path)
    (tmp_path / "spiece.model").write_bytes(b"")
    with pytest.raises(errors.InputError, match="not a SentencePiece model"):
        tokenizer.load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(errors.InputError, match="is not JSON"):
        tokenizer.load_tokenizer(tmp_path)
    for wrong in ("many", -1, True, 2.5):
        settings = {"tokenizer_class": "ByT5Tokenizer", "extra_ids": wrong}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        with pytest.raises(errors.InputError, match=f"extra_ids {wrong!r}; it must be"):
            tokenizer.load_tokenizer(tmp_path)


def test_equal_tokenizers_pass(folder, pieces):
    tokenizer.check_same_tokenizer(pieces, tokenizer.load_tokenizer(folder))
    tokenizer.check_same_tokenizer(tokenizer.ByteTokenizer(), tokenizer.ByteTokenizer())


def test_the_first_differing_piece_is_named(pieces, tmp_path):
    other = [text.replace("draft", "small") for text in _texts()]
    tokenizer.train_sentencepiece(other, SIZE, tmp_path / "spiece.model")
    small = tokenizer.load_tokenizer(tmp_path)
    first = next(i for i in range(SIZE) if pieces.piece(i) != small.piece(i))
    with pytest.raises(errors.InputError) as caught:
        tokenizer.check_same_tokenizer(pieces, small)
    for part in (f"id {first} ", repr(pieces.piece(first)), repr(small.piece(first))):
        assert part in str(caught.value)


def test_a_longer_vocabulary_differs_at_its_first_extra_id():
    short, long = tokenizer.ByteTokenizer(10), tokenizer.ByteTokenizer(12)
    with pytest.raises(errors.InputError, match="id 269 is no piece for the target"):
        tokenizer.check_same_tokenizer(short, long)


@pytest.mark.parametrize(
    ("known", "rows", "dead"),
    [(32100, 32128, 32100), (250100, 250112, 250100), (384, 384, None)],
)
def test_rows_that_the_tokenizer_does_not_know_are_dead(known, rows, dead):
    """Padding of the vocabulary, as in T5 and mT5."""
    own = tokenizer.ByteTokenizer(num_sentinels=known - 259)
    assert tokenizer.dead_from(own, rows, 0, 1) == dead
    with pytest.raises(errors.InputError, match=rf"{known} ids and its model 300 rows"):
        tokenizer.dead_from(own, 300, 0, 1)


def test_half_a_surrogate_pair_is_refused(pieces):
    for own in (pieces, tokenizer.ByteTokenizer()):
        with pytest.raises(errors.InputError, match=r"character 4 .* is U\+D83D, half"):
            own.encode("the \ud83d draft")


def test_a_sentinel_of_many_digits_is_text(pieces):
    """More than Python's int takes."""
    text = f"<extra_id_{'9' * 5000}>"
    for own in (pieces, tokenizer.ByteTokenizer()):
        assert own.decode(own.encode(text)) == text


def test_bytes_need_no_sentencepiece(monkeypatch):
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert tokenizer.ByteTokenizer().encode("a") == [100, 1]


@pytest.mark.parity
def test_ids_equal_those_of_transformers(folder, pieces):
    import transformers

    theirs = transformers.T5Tokenizer.from_pretrained(str(folder))
    assert len(theirs) == pieces.vocab_size
    for text in [
        *_texts(40),
        "Hello <extra_id_0> .",
        "",
        " a  {b}\n",
        "漢 <extra_id_99>",
    ]:
        ids = pieces.encode(text)
        assert theirs(text).input_ids == ids
        if "<extra" not in text and pieces.unk_id not in ids:
            assert theirs.decode(ids, skip_special_tokens=True) == pieces.decode(ids)


@pytest.mark.parity
def test_byte_ids_equal_those_of_transformers():
    import transformers

    theirs, ours = transformers.ByT5Tokenizer(), tokenizer.ByteTokenizer()
    for text in ["", "a é 漢\n", "<extra_id_0> x<extra_id_124>", "Hi <extra_id_3> ."]:
        assert theirs(text).input_ids == ours.encode(text)
