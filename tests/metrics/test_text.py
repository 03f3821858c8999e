"""Text scores against values counted by hand."""

import sys

import pytest

from specjax import errors
from specjax.metrics import text


def test_by_hand():
    scores = text.text_scores(["abcd", "abxd", ""], ["abcd", "abcd", "ab"])
    assert set(scores) == set(text.SCORES)
    assert scores["exact_match"] == pytest.approx(1 / 3)
    assert scores["character_error_rate"] == pytest.approx(3 / 10)
    same = text.text_scores(["a b c d e"], ["a b c d e"])
    assert same.pop("character_error_rate") == 0 and same.pop("exact_match") == 1
    assert all(score == pytest.approx(100) for score in same.values()), same


def test_rouge_by_hand():
    """Four of five words, one of four pairs, and a subsequence of three."""
    names = ("rouge1", "rouge2", "rouge_l")
    outputs, references = ["The cats sat down here"], ["the CATS down sat there"]
    scores = text.text_scores(outputs, references, names)
    assert list(scores) == list(names)
    assert scores["rouge1"] == pytest.approx(80)
    assert scores["rouge2"] == pytest.approx(25)
    assert scores["rouge_l"] == pytest.approx(60)
    # The mean over texts; F1 counts what is left out too.
    scores = text.text_scores(["a b", "c"], ["a b c d", "x"], ["rouge1"])
    assert scores["rouge1"] == pytest.approx(100 * (2 * 1 * 0.5 / 1.5) / 2)
    # Words are not cut to their stems.
    assert text.text_scores(["cats"], ["cat"], ["rouge1"]) == {"rouge1": 0}


def test_bleu_is_of_the_corpus():
    """Counts add up before they are divided: not the mean over texts."""
    outputs = ["the cat sat on the mat", "x"]
    references = ["the cat sat on the mat", "a b c d e f"]
    together = text.text_scores(outputs, references, ["bleu"])["bleu"]
    apart = [
        text.text_scores([a], [b], ["bleu"])["bleu"]
        for a, b in zip(outputs, references, strict=True)
    ]
    # 6 of 7 words, 5 of 5 pairs, 4 of 4 and 3 of 3; 7 words against 12.
    assert together == pytest.approx(
        100 * (6 / 7) ** 0.25 * 2.718281828 ** (1 - 12 / 7)
    )
    assert abs(together - sum(apart) / 2) > 1


def test_refused(monkeypatch):
    with pytest.raises(errors.InputError, match="names has 'blue': known scores are"):
        text.text_scores(["a"], ["a"], ["blue"])
    for outputs, references in (([], []), (["a"], ["a", "b"])):
        with pytest.raises(errors.InputError, match="cannot be scored"):
            text.text_scores(outputs, references, ["exact_match"])
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(errors.InputError, match="rouge_score is not installed"):
        text.check_scores(["exact_match", "rouge_l"])
    text.check_scores(["exact_match", "bleu"])
