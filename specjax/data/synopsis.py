"""The `synopsis` task: a package's long description to its one-line synopsis."""

import collections
import re
from collections.abc import Iterable, Sequence

from specjax.data import debian, pairs

# Where a synopsis begins to say which part of its project the package is.
_SUFFIX = re.compile(r"\s+(?:-{1,2}|[–—])\s+|\s*\(|[,;:]\s")
# Letters of the shortest sentence and synopsis that two packages do not share by
# accident.
_OWN_SENTENCE = 40
_OWN_SYNOPSIS = 12


def examples(
    records: Iterable[debian.Description],
    *,
    max_source: int = 600,
    min_target: int = 10,
    max_target: int = 100,
    max_alike: int = 20,
    shorten: bool = False,
) -> tuple[dict[str, list[debian.TextPair]], dict[str, int]]:
    """Descriptions with their synopses in splits that do not leak.

    Two texts are of one mould if they differ in digits and in the words of their
    packages' own names alone. A paragraph whose mould many packages share says nothing
    of one of them ("This package contains the source for the Rust ... crate"): a
    description of nothing else is left out. Of descriptions of one mould the first
    stays. Verbatim paragraphs are no running text and stay out of the source.

    A package is in the split of all other tasks. Those of the training split that share
    their description's mould, a long sentence that is not boilerplate, or their
    synopsis but for its suffix ("... (documentation)") with a held-out package are left
    out; so are those of the validation split that do with the test split.

    Args:
        records: English descriptions.
        max_source: characters of the longest source.
        min_target: characters of the shortest synopsis.
        max_target: characters of the longest synopsis.
        max_alike: a paragraph or sentence that so many packages share is boilerplate.
        shorten: cut longer descriptions to the leading whole paragraphs that fit,
            instead of leaving them out.

    Returns:
        For each split its pairs in the order of the records, the source's paragraphs
        joined by spaces; and how many descriptions were left out or shortened, by
        reason.
    """
    records = list(records)
    moulds = [
        tuple(_mould(text, record.package) for text in _prose(record))
        for record in records
    ]
    shared = collections.Counter(part for mould in moulds for part in set(mould))
    sentences = [_long_sentences(record) for record in records]
    common = collections.Counter(text for texts in sentences for text in texts)
    counts: collections.Counter[str] = collections.Counter(
        records=len(records), shortened=0
    )
    seen: set[tuple[str, ...]] = set()
    kept = []
    for record, mould, texts in zip(records, moulds, sentences, strict=True):
        paragraphs = _prose(record)
        source = " ".join(paragraphs)
        if not paragraphs:
            counts["left_out_without_prose"] += 1
        elif all(shared[part] >= max_alike for part in mould):
            counts["left_out_boilerplate"] += 1
        elif debian.has_other_script(source + record.synopsis):
            counts["left_out_other_script"] += 1
        elif not min_target <= len(record.synopsis) <= max_target:
            counts["left_out_synopsis_length"] += 1
        elif mould in seen:
            counts["left_out_copy"] += 1
        else:
            seen.add(mould)
            whole = len(source)
            if whole > max_source:
                source = pairs.leading(paragraphs, max_source) if shorten else ""
            if not source:
                counts["left_out_too_long"] += 1
                continue
            counts["shortened"] += len(source) < whole
            counts["verbatim_paragraphs_left_out"] += sum(record.verbatim)
            own = {text for text in texts if common[text] < max_alike}
            row = debian.TextPair(record.package, source, record.synopsis)
            kept.append((row, own | {" ".join(mould), _subject(record.synopsis)}))
    splits = _without_near_copies(kept, counts)
    return splits, dict(counts)


def _without_near_copies(
    rows: Sequence[tuple[debian.TextPair, set[str]]], counts: collections.Counter[str]
) -> dict[str, list[debian.TextPair]]:
    splits: dict[str, list[debian.TextPair]] = {name: [] for name in debian.SPLITS}
    held_out: set[str] = set()
    # The test split keeps all of its own, then the validation split.
    for name in reversed(debian.SPLITS):
        own: set[str] = set()
        for row, keys in rows:
            if debian.split_of(row.package) != name:
                continue
            if keys & held_out:
                counts[f"left_out_of_{name}_near_copy"] += 1
                continue
            splits[name].append(row)
            own |= keys
        held_out |= own
    return splits


def _prose(record: debian.Description) -> list[str]:
    return [
        text
        for text, verbatim in zip(record.paragraphs, record.verbatim, strict=True)
        if not verbatim
    ]


def _long_sentences(record: debian.Description) -> set[str]:
    folded = (
        re.sub(r"\d+", "", debian.fold(sentence))
        for paragraph in _prose(record)
        for sentence in debian.split_sentences(paragraph)
    )
    return {text for text in folded if len(text) >= _OWN_SENTENCE}


def _mould(text: str, package: str) -> str:
    """What is left of a text without digits and the words of its package's name."""
    name = debian.fold(package)
    parts = {debian.fold(part) for part in re.split(r"[-_.+]", package)}
    words = (debian.fold(word) for word in re.split(r"[\s/\"'()]+", text))
    own = (
        word
        for word in words
        if word not in parts and not (len(word) > 3 and word in name)
    )
    return re.sub(r"\d+", "", " ".join(word for word in own if word)).strip()


def _subject(synopsis: str) -> str:
    """The folded synopsis up to its suffix, unless too little is left."""
    subject = debian.fold(_SUFFIX.split(synopsis)[0])
    return subject if len(subject) >= _OWN_SYNOPSIS else debian.fold(synopsis)
