"""Pair files: every line is a pair or an error that names it."""

import pytest

from specjax import errors
from specjax.data import pairs


def _write(path, content: str):
    path.write_bytes(content.encode("utf-8"))
    return path


def test_tsv(tmp_path):
    path = _write(tmp_path / "a.tsv", "a b\tA b.\r\nc\u2028d\t é\n")
    assert pairs.load_pairs(path) == [
        pairs.Pair("a b", "A b."),
        pairs.Pair("c\u2028d", " é"),
    ]


def test_jsonl_with_other_keys(tmp_path):
    path = _write(tmp_path / "a.jsonl", '{"en": "a", "de": "b", "n": 1}')
    assert pairs.load_pairs(path, "en", "de") == [pairs.Pair("a", "b")]


def test_what_is_saved_loads_again(tmp_path):
    rows = [pairs.Pair('a "quoted"\ttab', "zwei\nZeilen"), pairs.Pair("é 漢", "\u2028")]
    rows[1] = pairs.Pair("é 漢", "x\u2028y", finished=False)
    pairs.save_pairs(tmp_path / "a.jsonl", rows)
    assert pairs.load_pairs(tmp_path / "a.jsonl") == rows


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.tsv", "a\tb\nc\n", "line 2 has 1 tab-separated columns"),
        ("a.tsv", "a\tb\tc\n", "line 1 has 3 tab-separated columns"),
        ("a.tsv", "a\tb\n\nc\td\n", "line 2 has 1 tab"),
        ("a.tsv", "a\t \n", "line 1 has an empty target"),
        ("a.tsv", "", "is empty"),
        ("a.jsonl", '{"source": "a"}\n', "line 1 has no text under 'target'"),
        ("a.jsonl", '{"source": 1, "target": "b"}', "no text under 'source'"),
        ("a.jsonl", '{"source": "", "target": "b"}', "line 1 has an empty source"),
        ("a.jsonl", '{"source": "a", "target": "b"}\n{"sou', "line 2 is not JSON"),
        ("a.jsonl", "[1]\n", "line 1 is not a JSON object"),
        (
            "a.jsonl",
            '{"source": "a", "target": "b", "finished": 0}',
            "line 1 has 0 under 'finished'",
        ),
        ("a.csv", "a,b\n", "neither .tsv nor .jsonl"),
    ],
)
def test_wrong_lines_are_named(tmp_path, name, content, message):
    path = _write(tmp_path / name, content)
    with pytest.raises(errors.InputError, match=message) as caught:
        pairs.load_pairs(path)
    assert str(path) in str(caught.value)


def test_an_empty_target_where_a_model_wrote_it(tmp_path):
    rows = [pairs.Pair("a", ""), pairs.Pair("b", "c")]
    pairs.save_pairs(tmp_path / "a.jsonl", rows)
    assert pairs.load_pairs(tmp_path / "a.jsonl", empty_targets=True) == rows
    with pytest.raises(errors.InputError, match="line 1 has an empty target"):
        pairs.load_pairs(tmp_path / "a.jsonl")


def test_missing_files_and_bytes_that_are_no_text(tmp_path):
    with pytest.raises(errors.InputError, match="does not exist"):
        pairs.load_pairs(tmp_path / "none.tsv")
    (tmp_path / "b.tsv").write_bytes(b"a\tb\n\xff\tc\n")
    with pytest.raises(errors.InputError, match="line 2 is not UTF-8"):
        pairs.load_pairs(tmp_path / "b.tsv")


def test_a_header_names_the_columns(tmp_path):
    path = _write(tmp_path / "a.tsv", "id\tde\ten\r\n1\tzwei\ttwo\n")
    assert pairs.load_pairs(path, "en", "de", header=True) == [
        pairs.Pair("two", "zwei")
    ]
    for content, message in (
        ("id\ten\n1\ttwo\n", "line 1 is the header and names 0 columns 'de'"),
        ("de\ten\ten\n1\t2\t3\n", "line 1 is the header and names 2 columns 'en'"),
        ("en\tde\tx\ntwo\tzwei\n", "line 2 has 2 tab-separated columns; 3 are"),
        ("en\tde\n", "is empty"),
    ):
        path = _write(tmp_path / "a.tsv", content)
        with pytest.raises(errors.InputError, match=message):
            pairs.load_pairs(path, "en", "de", header=True)


def test_limits_leave_out_and_count():
    rows = [
        pairs.Pair("One two.", "1 2"),
        pairs.Pair("One two. Three four. Five six.", "long source"),
        pairs.Pair("Three.", "a target beyond the limit"),
        pairs.Pair(" ", "empty source"),
        pairs.Pair("Onetwothreefourfivesixseven", "no end"),
    ]
    assert pairs.within_limits(rows)[0] == [*rows[:3], rows[4]]
    kept, counts = pairs.within_limits(rows, 20, 20)
    assert kept == rows[:1]
    assert counts == {
        "left_out_empty": 1,
        "left_out_long_source": 2,
        "left_out_long_target": 1,
    }
    kept, counts = pairs.within_limits(rows, 20, 20, shorten=True)
    assert kept == [rows[0], pairs.Pair("One two. Three four.", "long source")]
    assert counts["shortened"] == 1 and counts["left_out_long_source"] == 1
