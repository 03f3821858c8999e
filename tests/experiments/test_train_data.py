"""What a training run refuses of its files, and what it counts and says."""

import shutil

import pytest

from experiments import train_data
from specjax import errors
from specjax.data import pairs, tokenizer
from tests.pairs import TEXTS
from tests.tiny_run import WORDS, tiny_config


def test_long_examples_stay_out_aloud(folder):
    config = tiny_config(folder)
    config.data.max_tokens = 14
    said: list[str] = []
    data = train_data.load_data(config, said.append)
    left = 32 - len(data.train)
    assert 0 < left < 32
    assert f"{left} of 32 examples are longer" in "".join(said)
    assert data.dropped[str(folder / "train.jsonl")] == left
    # None was cut: what is left is what a longer limit keeps too.
    config.data.max_tokens = 32
    assert all(own in train_data.load_data(config, print).train for own in data.train)


def test_a_long_target_counts_as_a_long_source_does(folder, tmp_path):
    config = tiny_config(folder)
    long = " ".join(WORDS)
    rows = [pairs.Pair("ab", "ab"), pairs.Pair("ab", long), pairs.Pair(long, "ab")]
    pairs.save_pairs(tmp_path / "some.jsonl", rows)
    config.data.update(train=str(tmp_path / "some.jsonl"), max_tokens=14)
    said: list[str] = []
    assert len(train_data.load_data(config, said.append).train) == 1
    assert any(
        line.startswith(f"{tmp_path / 'some.jsonl'}: 2 of 3 examples are longer")
        for line in said
    )


@pytest.mark.parametrize("part", ["train", "validation"])
@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", "", r"a.jsonl is empty: it needs at least one pair"),
        ("a.tsv", "", r"a.tsv is empty: it needs at least one pair"),
        ("a.tsv", "ab\tA\ncde fgh\n", r"a.tsv, line 2 has 1 tab-separated columns"),
        (
            "a.jsonl",
            '{"source": "ab", "target": "A"}\n{"source": "ab"}\n',
            r"a.jsonl, line 2 has no text under 'target'",
        ),
        ("a.jsonl", "ab\tA\n", r"a.jsonl, line 1 is not JSON"),
        ("a.tsv", "\tA\n", r"a.tsv, line 1 has an empty source"),
        (
            "a.tsv",
            f"{' '.join(WORDS)}\tA\n",
            r"a.tsv: no example is left: 1 of 1 are longer than config.data.max_t",
        ),
        ("absent.tsv", None, "absent.tsv does not exist"),
    ],
)
def test_a_bad_file_is_named(folder, tmp_path, part, name, content, message):
    config = tiny_config(folder)
    config.data.max_tokens = 14
    if content is not None:
        (tmp_path / name).write_text(content)
    config.data[part] = str(tmp_path / name)
    with pytest.raises(errors.InputError, match=message):
        train_data.load_data(config, lambda line: None)


def test_a_cut_target_has_no_end(folder, tmp_path):
    config = tiny_config(folder)
    rows = [pairs.Pair("ab cde", "ab The", finished) for finished in (True, False)]
    pairs.save_pairs(tmp_path / "cut.jsonl", rows)
    config.data.train = str(tmp_path / "cut.jsonl")
    (_, whole), (_, cut) = train_data.load_data(config, print).train
    assert whole == [*cut, 1] and 1 not in cut


def test_what_was_cut_before_its_first_token_stays_out_aloud(folder, tmp_path):
    config = tiny_config(folder)
    rows = [pairs.Pair("ab cde", "", finished) for finished in (True, False)]
    pairs.save_pairs(tmp_path / "cut.jsonl", rows)
    config.data.train = str(tmp_path / "cut.jsonl")
    said: list[str] = []
    # An empty text that ended by itself teaches just that.
    (only,) = train_data.load_data(config, said.append).train
    assert only[1] == [1]
    assert any("1 of 2 examples are unfinished and empty" in line for line in said)


def test_an_empty_target_is_counted(folder, tmp_path):
    config = tiny_config(folder)
    rows = [pairs.Pair("ab cde", "ab"), pairs.Pair("fgh", "")]
    pairs.save_pairs(tmp_path / "some.jsonl", rows)
    config.data.train = str(tmp_path / "some.jsonl")
    said: list[str] = []
    assert train_data.load_data(config, said.append).train[1][1] == [1]
    assert any("1 of 2 examples have an empty target" in line for line in said)


def test_another_tokenizer_than_the_model(folder):
    config = tiny_config(folder)
    config.model.vocab_size = 100
    with pytest.raises(errors.InputError, match="has 205 ids"):
        train_data.load_data(config, print)
    config = tiny_config(folder)
    config.model.pad_id = 3
    with pytest.raises(errors.InputError, match=r"config.model.pad_id is 3"):
        train_data.load_data(config, print)


def test_another_tokenizer_than_the_model_to_start_from(folder, tmp_path):
    """Other pieces are refused; and a folder without any is said."""
    config = tiny_config(folder)
    config.init = str(tmp_path)
    said: list[str] = []
    train_data.load_data(config, said.append)
    assert "holds no tokenizer" in said[0]
    shutil.copy(folder / "spiece.model", tmp_path)
    train_data.load_data(config, said.append)
    tokenizer.train_sentencepiece(TEXTS, 130, tmp_path / "spiece.model")
    with pytest.raises(errors.InputError, match="config.init: .* another tokenizer"):
        train_data.load_data(config, said.append)
