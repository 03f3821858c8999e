"""The repair task: what is taken from a sentence, and that it is always the same."""

import random

import pytest

from specjax.data import repair

LONG = "This package contains several well-known examples, for instance (among others)"


@pytest.mark.parametrize(
    ("sentence", "bare"),
    [
        ("It doesn't need X11, really!", "it doesnt need x11 really"),
        ('The "new" API (v2.4) is in C++.', "the new api v2.4 is in c++"),
        ("Use libfoo-dev; see TCP/IP.", "use libfoo-dev see tcp/ip"),
        ("Data::Password: a port - by Perl's.", "data::password a port by perls"),
        ("It is a (re)write of cb(code, sig).", "it is a re write of cb code sig"),
        ("One’s “own” way – or not?", "ones own way or not"),
    ],
)
def test_case_and_punctuation_go_and_spelling_stays(sentence, bare):
    assert repair.strip_sentence(sentence) == bare
    assert repair.corrupt(sentence, typo_rate=0.0) == bare


def test_corruption_is_a_function_of_sentence_and_seed():
    sentences = [f"{LONG} number {i}." for i in range(50)]
    first = [repair.corrupt(sentence) for sentence in sentences]
    assert first == [repair.corrupt(sentence) for sentence in reversed(sentences)][::-1]
    assert first != [repair.corrupt(sentence, seed=1) for sentence in sentences]
    # The digest is fixed: another process, another day, the same typos.
    assert repair.corrupt("Alpha beta gamma.", typo_rate=1.0) == EXPECTED


EXPECTED = "alpah bta gammma"


def test_copies_have_typos_of_their_own():
    sentences = [f"{LONG} number {i}." for i in range(50)]
    drawn = [[repair.example(s, 3, copy=c) for s in sentences] for c in range(3)]
    assert drawn[0] == [repair.example(s, 3) for s in sentences]
    assert drawn[1] == [repair.example(s, 3, copy=1) for s in sentences]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        same = zip(drawn[first], drawn[second], strict=True)
        assert sum(a == b for a, b in same) < 15
    # The second copy of one seed is not the first of the next.
    assert drawn[1] != [repair.example(s, 4) for s in sentences]


def test_one_word_in_eight_has_one_typo():
    words = wrong = 0
    for i in range(400):
        sentence = f"{LONG} number {i}."
        bare = repair.strip_sentence(sentence).split()
        typed = repair.corrupt(sentence).split()
        assert len(bare) == len(typed)
        words += sum(len([c for c in word if c.isalpha()]) >= 3 for word in bare)
        wrong += sum(a != b for a, b in zip(bare, typed, strict=True))
    assert abs(wrong / words - 1 / 8) < 0.02


def _is_one_typo(word: str, typed: str) -> bool:
    size = range(len(word))
    dropped = {word[:i] + word[i + 1 :] for i in size}
    doubled = {word[:i] + word[i] + word[i:] for i in size}
    swapped = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in size[:-1]}
    return typed in dropped | doubled | (swapped - {word})


@pytest.mark.parametrize("word", ["the", "aaa", "libfoo-dev2", "ab-cd", "été"])
def test_a_typo_drops_doubles_or_swaps_one_letter(word):
    seen = set()
    for seed in range(60):
        typed = repair.typo(word, random.Random(seed))
        assert _is_one_typo(word, typed)
        seen.add(len(typed) - len(word))
    assert seen == ({-1, 1} if word == "aaa" else {-1, 0, 1})


def test_short_words_and_numbers_are_spared():
    for word in ("a", "of", "2024", "v2"):
        assert repair.typo(word, random.Random(0)) == word
