"""The `repair` task: give a sentence its capitals, punctuation and spelling back."""

import hashlib
import random
import re

from specjax.data import pairs

# Signs inside a word (C++, libfoo-dev, TCP/IP, 2.4) are spelling; an apostrophe is not.
_INNER_APOSTROPHE = re.compile(r"(?<=\w)['’](?=\w)")
_SEPARATOR = re.compile(r"[()\[\]\"“”„«»;,!?…]|(?<!:):(?!:)|[–—]")
_EDGE = re.compile(r"^[^\w+#&%]+|[^\w+#&%]+$")


def strip_sentence(sentence: str) -> str:
    """The sentence in lower case without punctuation; signs inside words stay."""
    bare = _SEPARATOR.sub(" ", _INNER_APOSTROPHE.sub("", sentence.lower()))
    words = (_EDGE.sub("", word) for word in bare.split())
    return " ".join(word for word in words if word)


def typo(word: str, rng: random.Random) -> str:
    """The word with one letter dropped, doubled, or swapped with the next letter.

    Words of fewer than three letters, and words with no two differing neighbours to
    swap, come back with another of the three, or unchanged if none applies.
    """
    letters = [i for i, character in enumerate(word) if character.isalpha()]
    if len(letters) < 3:
        return word
    swaps = [
        i for i in letters if word[i + 1 : i + 2].isalpha() and word[i] != word[i + 1]
    ]
    kind = rng.choice(("drop", "double", "swap") if swaps else ("drop", "double"))
    at = rng.choice(swaps if kind == "swap" else letters)
    if kind == "drop":
        return word[:at] + word[at + 1 :]
    if kind == "double":
        return word[: at + 1] + word[at:]
    return word[:at] + word[at + 1] + word[at] + word[at + 2 :]


def corrupt(sentence: str, seed: int = 0, typo_rate: float = 1 / 8) -> str:
    """What a hurried writer would have typed, a pure function of sentence and seed.

    Args:
        sentence: a well-formed sentence.
        seed: another seed places other typos.
        typo_rate: the chance that a word of three letters or more gets one typo.

    Returns:
        The sentence in lower case, without punctuation, with typos.
    """
    # hash() differs between processes; a digest does not.
    digest = hashlib.sha256(f"{seed}\n{sentence}".encode()).digest()
    rng = random.Random(int.from_bytes(digest[:8], "big"))
    words = strip_sentence(sentence).split()
    return " ".join(
        typo(word, rng) if rng.random() < typo_rate else word for word in words
    )


def example(
    sentence: str, seed: int = 0, typo_rate: float = 1 / 8, copy: int = 0
) -> pairs.Pair:
    """The sentence's corrupted form as source and itself as target; see `corrupt`.

    Args:
        sentence: a well-formed sentence.
        seed: from 0 to 2^32 - 1; another seed places other typos.
        typo_rate: see `corrupt`.
        copy: which of several drawings; the first is 0. Each is drawn apart from the
            others, so that a sentence may come out twice without a typo.
    """
    # Copies of one seed are not those of the next one.
    return pairs.Pair(corrupt(sentence, seed + (copy << 32), typo_rate), sentence)
