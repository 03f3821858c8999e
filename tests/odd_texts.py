"""A thousand texts of the kinds at which programs fail: the same on every run."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable

WORDS = (
    "this package contains the files that every program needs and its documentation "
    "Größe Über naïve façade x86 e-mail 1,000 (see) a.b/c don't NULL"
).split()
# Signs that mean something to a tokenizer, a line reader or a terminal.
SIGNS = [
    *("\x00", "\x07", "\x08", "\x1b[31m", "\x7f", "\x85", "\r", "\t", "\v", "\f"),
    *("\xa0", "\xad", "\u1680", "\u200b", "\u200d", "\u200e", "\u202e", "\u2028"),
    *("\u2029", "\u2060", "\u3000", "\ufeff", "\ufffd", "\ufffe", "\uffff"),
    *("\ue000", "\U000e0001", "\U0010ffff", "\u2581", "\u2581\u2581", " \u2581 "),
    *("<extra_id_0>", "<extra_id_99>", "<extra_id_100>", "<extra_id_007>"),
    *("<extra_id_-1>", "<extra_id_\u0660>", "<extra_id_0", "▁<extra_id_1>"),
    "<extra_id_" + "9" * 5_000 + ">",  # more digits than Python's int takes
    *("</s>", "<s>", "<pad>", "<unk>", "<0x41>", "\u2047", " \u2047 ", "%s%n", "{0}"),
    *("\\", "\\n", '"', "'", "`", "$(ls)", "../", "\ufb01", "\u2460", "\U0001d4d0"),
    *("\u0130", "\u1e9e", "\u01c5", "\u0345", "e\u0301", "\u0301", "\u0308\u0301"),
    *("\u05d0\u05d1", "\u0627\u0644", "\u6f22\u5b57", "\uac00", "\u1100\u1161"),
    *("\U0001f600", "\U0001f469\u200d\U0001f467", "\U0001f1e9\U0001f1ea", "\ufe0f"),
]
SURROGATES = ["\ud800", "\udbff", "\udc80", "\udfff", "\udc00\ud800"]


def _words(rng: random.Random, most: int = 12) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def _blank(rng: random.Random) -> str:
    blanks = " \t\v\f\u3000\xa0\u200b\ufeff\x00\x1f\u2028"
    return "".join(rng.choices(blanks, k=rng.randint(0, 9)))


def _sign_in_text(rng: random.Random) -> str:
    """At the start, inside a word, between words, at the end, and doubled."""
    sign, text = rng.choice(SIGNS) * rng.randint(1, 2), _words(rng)
    place = rng.choice([0, len(text), rng.randint(0, len(text))])
    return text[:place] + sign + text[place:]


def _signs_alone(rng: random.Random) -> str:
    return "".join(rng.choices(SIGNS[:-1], k=rng.randint(1, 6)))


def _any_characters(rng: random.Random) -> str:
    """Of all planes, halves of surrogate pairs left out."""
    codes = [rng.randrange(rng.choice([0x80, 0x800, 0x10000, 0x110000])) for _ in "x"]
    codes += [rng.randrange(0x110000) for _ in range(rng.randint(0, 30))]
    return "".join(chr(c) for c in codes if not 0xD800 <= c < 0xE000) + _words(rng, 2)


def _combined(rng: random.Random) -> str:
    """Letters under heaps of combining marks."""
    marks = [chr(code) for code in range(0x300, 0x370)]
    return "".join(
        letter + "".join(rng.choices(marks, k=rng.randint(0, 20)))
        for letter in _words(rng, 3)
    )


def _right_to_left(rng: random.Random) -> str:
    letters = [chr(c) for c in (*range(0x5D0, 0x5EB), *range(0x627, 0x64B))]
    text = "".join(rng.choices([*letters, " "], k=rng.randint(1, 40)))
    return f"{_words(rng, 2)} \u202b{text}\u202c {_words(rng, 2)}"


def _taken_apart(rng: random.Random) -> str:
    return unicodedata.normalize(rng.choice(["NFD", "NFKD"]), _words(rng, 30))


def _surrogates(rng: random.Random) -> str:
    text = _words(rng)
    place = rng.randint(0, len(text))
    return text[:place] + rng.choice(SURROGATES) + text[place:]


def _huge(rng: random.Random) -> str:
    """10,000 words, or as many characters without a space, or of one kind."""
    return rng.choice(
        [
            " ".join(rng.choices(WORDS, k=10_000)),
            "".join(rng.choices("abcdef", k=20_000)),
            rng.choice(SIGNS[:20]) * 10_000,
            "a" + "\u0301" * 10_000,
            "<extra_id_0>" * 2_000,
            " " * 10_000 + "end",
        ]
    )


KINDS: dict[str, tuple[int, Callable[[random.Random], str]]] = {
    "blank": (60, _blank),
    "a sign in text": (330, _sign_in_text),
    "signs alone": (150, _signs_alone),
    "any characters": (200, _any_characters),
    "combining marks": (60, _combined),
    "right to left": (60, _right_to_left),
    "taken apart": (40, _taken_apart),
    "halves of surrogate pairs": (60, _surrogates),
    "huge": (40, _huge),
}


def odd_texts() -> list[str]:
    """All of them, kind by kind."""
    rng = random.Random(7)
    return [make(rng) for count, make in KINDS.values() for _ in range(count)]
