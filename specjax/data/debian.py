"""Debian's package descriptions as a corpus: English sentences and translations."""

import collections
import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence

from specjax import errors

SPLITS = ("train", "validation", "test")

# An item starts with one of these, and the sign says nothing about the text.
_BULLET = re.compile(r"(?:[-*+•·∙–—o§#]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+(?=\S)")
_FIELD = re.compile(r"Description-([a-z]{2}(?:_[A-Z]{2})?):")

# A full stop after one of these does not end a sentence (English, then German). Of the
# single letters C, D, R and X are languages and systems here, which may end one.
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'“‘„/])(?:e\.g|i\.e|eg|ie|vs|cf|al|approx|resp|incl|esp|ca|no|nos"
    r"|ver|vol|fig|dr|mr|mrs|ms|prof|st|jr|sr|inc|ltd|co|corp|a\.k\.a|aka|dept|univ"
    r"|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec|bzw|evtl|ggf|inkl|engl|sog"
    r"|bspw|vgl|nr|zzgl|u\.\s?a|z\.\s?b|d\.\s?h|[abe-hj-qs-wyz]|(?:[a-z]\.)+[a-z])\.$",
    re.IGNORECASE,
)
_END = re.compile(r"[.!?][\"'”’“)]*(?=\s+[\"'“‘„(]?[A-ZÄÖÜ0-9])")
_SENTENCE = re.compile(r"[\"'“‘(]?[A-Za-z0-9].*[.!?][\"'”’)]*")
# What is no English prose: addresses, placeholders, code, columns of a table.
_MARKUP = re.compile(r"://|www\.|@|[<>{}|\\^~`=_$*]|(?:^|\s)/\w|\s-{1,2}\w|--|\.\.\.")
# Letters of other scripts and symbols: too rare to learn, and each would take a piece.
_OTHER_SCRIPT = re.compile(r"[^ -~¡-ɏ‘’“”„–—]")
_LANGUAGE_PREFIX = re.compile(
    r"^(?:python3?-|ruby-|golang-|node-|r-(?:cran|bioc|other)-|elpa-|php-|fonts-|task-"
    r"|gir1\.2-|haskell-|ocaml-|librust-|libghc-|lua-|puppet-module-|lib)"
    r"(?:(?:github|gitlab|gopkg|google|golang)-(?:com-)?)?"
)


@dataclasses.dataclass(frozen=True)
class Description:
    """What one package says of itself in one language.

    Attributes:
        package: the package's name.
        md5: Debian's checksum of the English description, alike in all languages.
        synopsis: the one-line summary.
        paragraphs: the body; each item of a list is a paragraph without its bullet.
        verbatim: for each paragraph whether it was indented text without a bullet
            (commands, tables, poems), which is no running text.
    """

    package: str
    md5: str
    synopsis: str
    paragraphs: tuple[str, ...]
    verbatim: tuple[bool, ...]


def plain(text: str) -> str:
    """One form for each character (ligatures resolved), single spaces."""
    text = unicodedata.normalize("NFKC", text).replace("\u00ad", "")
    return " ".join(text.split())


def _paragraphs(lines: Sequence[str]) -> tuple[tuple[str, ...], tuple[bool, ...]]:
    """Body lines (without the leading space of the format) to paragraphs and kinds."""
    texts: list[list[str]] = []
    kinds: list[str] = []
    kind, flat = None, False
    for line in lines:
        text = line.strip()
        if text in (".", ""):
            kind = None
            continue
        indented = line[:1].isspace()
        bullet = _BULLET.match(text)
        # A dash amid unindented running text is punctuation unless it opens a block.
        if bullet and (indented or kind != "prose"):
            text = text[bullet.end() :]
            starts, kind = True, "item"
        elif not indented:
            # A list that is not indented may wrap without indenting either.
            flush = kind == "item" and flat
            starts, kind = kind != "prose" and not flush, "item" if flush else "prose"
        elif kind == "item":
            starts = False
        else:
            starts, kind = True, "verbatim"
        if starts:
            flat = not indented
            texts.append([])
            kinds.append(kind)
        texts[-1].append(text)
    joined = tuple(plain(" ".join(text)) for text in texts)
    return joined, tuple(kind == "verbatim" for kind in kinds)


def parse_descriptions(text: str) -> list[Description]:
    """Parses the text of a `Translation-xx` list.

    Args:
        text: records apart by empty lines, each with `Package`, `Description-md5` and
            `Description-xx` fields.

    Returns:
        One Description a record, in order.

    Raises:
        InputError: a record lacks one of the three fields.
    """
    records = []
    for number, block in enumerate(re.split(r"\n\s*\n", text.strip("\n")), start=1):
        if not block.strip():
            continue
        package = md5 = synopsis = None
        body: list[str] = []
        in_body = False
        for line in block.split("\n"):
            if line.startswith(" "):
                if in_body:
                    body.append(line[1:])
                continue
            in_body = False
            name, _, value = line.partition(":")
            if name == "Package":
                package = value.strip()
            elif name == "Description-md5":
                md5 = value.strip()
            elif _FIELD.match(line):
                synopsis, in_body = plain(value), True
        if package is None or md5 is None or synopsis is None:
            missing = [
                name
                for name, value in (
                    ("Package", package),
                    ("Description-md5", md5),
                    ("Description-<language>", synopsis),
                )
                if value is None
            ]
            raise errors.InputError(
                f"record {number} of the package list has no {' and no '.join(missing)}"
                f" field; it starts with {block[:60]!r}"
            )
        records.append(Description(package, md5, synopsis, *_paragraphs(body)))
    return records


def split_sentences(paragraph: str) -> list[str]:
    """Cuts running text after `.`, `!` or `?`, but not after common abbreviations."""
    sentences, start = [], 0
    for match in _END.finditer(paragraph):
        if paragraph[match.start()] == "." and _ABBREVIATION.search(
            paragraph[start : match.start() + 1]
        ):
            continue
        sentences.append(paragraph[start : match.end()].strip())
        start = match.end()
    rest = paragraph[start:].strip()
    return sentences + [rest] if rest else sentences


def stem(package: str) -> str:
    """What a package's relatives share: its name without language, kind and version.

    `libfoo2`, `libfoo-dev`, `python3-foo` and `foo-doc` all have the stem `foo`.
    """
    name = _LANGUAGE_PREFIX.sub("", package) or package
    first = re.split(r"[-_.+]", name)[0] or name
    return first.rstrip("0123456789") or first


def split_of(package: str, validation: int = 2, test: int = 2) -> str:
    """The split that a package belongs to, a pure function of its stem.

    Args:
        package: a package's name.
        validation: percent of the stems in the validation split.
        test: percent of the stems in the test split.

    Returns:
        "train", "validation" or "test".
    """
    digest = hashlib.sha256(stem(package).encode("utf-8")).digest()
    percent = int.from_bytes(digest[:8], "big") % 100
    if percent < validation:
        return "validation"
    return "test" if percent < validation + test else "train"


@dataclasses.dataclass(frozen=True)
class Text:
    """A piece of one language with the package that it comes from."""

    package: str
    text: str


def fold(text: str) -> str:
    """Letters and digits alone, so that copies differing in dress count as one."""
    return "".join(character for character in text.casefold() if character.isalnum())


def has_markup(text: str) -> bool:
    """Whether a text has addresses, paths, code, or other signs that prose has not."""
    return _MARKUP.search(text) is not None


def has_other_script(text: str) -> bool:
    """Whether a text has letters that are not Latin, or symbols rare in prose."""
    return _OTHER_SCRIPT.search(text) is not None


def sentences(
    records: Iterable[Description],
    min_length: int = 20,
    max_length: int = 140,
    max_alike: int = 20,
) -> list[Text]:
    """Distinct sentences of English prose from the bodies of the descriptions.

    Left out are list items and headings without an end, and text that is not prose
    (addresses, code, paths). Of sentences made from one mould ("This package contains
    the source for the Rust ... crate") only the first few stay.

    Args:
        records: English descriptions.
        min_length: characters of the shortest sentence.
        max_length: characters of the longest sentence.
        max_alike: how many sentences may share their first and last three words.

    Returns:
        The sentences in the order of the records.
    """
    seen: set[str] = set()
    alike: collections.Counter[tuple[str, ...]] = collections.Counter()
    kept = []
    for record in records:
        for paragraph, verbatim in zip(record.paragraphs, record.verbatim, strict=True):
            for text in () if verbatim else split_sentences(paragraph):
                if not min_length <= len(text) <= max_length:
                    continue
                if not _SENTENCE.fullmatch(text) or has_markup(text):
                    continue
                if has_other_script(text):
                    continue
                words = text.lower().split()
                mould = (*words[:3], *words[-3:])
                key = fold(text)
                if len(words) < 3 or key in seen or alike[mould] == max_alike:
                    continue
                seen.add(key)
                alike[mould] += 1
                kept.append(Text(record.package, text))
    return kept


def synopses(
    records: Iterable[Description], min_length: int = 20, max_length: int = 140
) -> list[Text]:
    """Distinct one-line summaries, which are phrases without a final full stop.

    Args:
        records: English descriptions.
        min_length: characters of the shortest summary.
        max_length: characters of the longest summary.

    Returns:
        The summaries in the order of the records.
    """
    seen: set[str] = set()
    kept = []
    for record in records:
        text = record.synopsis
        key = fold(text)
        if not min_length <= len(text) <= max_length or key in seen:
            continue
        if has_markup(text) or has_other_script(text):
            continue
        seen.add(key)
        kept.append(Text(record.package, text))
    return kept


@dataclasses.dataclass(frozen=True)
class TextPair:
    """A text and its translation with the package that they come from."""

    package: str
    source: str
    target: str


def is_fair_pair(source: str, target: str, max_length: int, max_ratio: float) -> bool:
    """Whether a text and its translation are in Latin letters and of like lengths.

    Args:
        source: a text.
        target: its translation.
        max_length: characters of the longer one.
        max_ratio: how many times longer than the other one may be, beyond ten
            characters.
    """
    short, long = sorted((len(source), len(target)))
    if long > max_length or long > 10 + max_ratio * short:
        return False
    return not has_other_script(source + target)


def pairs(
    sources: Iterable[Description],
    targets: Iterable[Description],
    *,
    by_sentence: bool = True,
    max_length: int = 400,
    max_ratio: float = 3.0,
) -> list[TextPair]:
    """Distinct translations: summaries, and paragraphs where their numbers agree.

    Left out are verbatim paragraphs, texts with letters that are not Latin, texts that
    the translation leaves as they are, and all but the first translation of one source
    text, so that no source stands in two splits.

    Args:
        sources: descriptions in the source language.
        targets: descriptions in the target language; records belong together by md5.
        by_sentence: cut a paragraph into sentences where both sides have equally many.
        max_length: characters of the longest text on either side.
        max_ratio: how many times longer than the other one side may be, beyond ten
            characters.

    Returns:
        The pairs in the order of `sources`.
    """
    translated = {record.md5: record for record in targets}
    seen: set[str] = set()
    kept = []
    for record in sources:
        other = translated.get(record.md5)
        if other is None:
            continue
        for source, target in _aligned(record, other, by_sentence):
            if not is_fair_pair(source, target, max_length, max_ratio):
                continue
            # Letters alone decide, except where a text has none.
            key = fold(source) or source
            if source == target or key in seen:
                continue
            seen.add(key)
            kept.append(TextPair(record.package, source, target))
    return kept


def _aligned(
    record: Description, other: Description, by_sentence: bool
) -> Iterator[tuple[str, str]]:
    yield record.synopsis, other.synopsis
    if len(record.paragraphs) != len(other.paragraphs):
        return
    for source, target, *verbatim in zip(
        record.paragraphs,
        other.paragraphs,
        record.verbatim,
        other.verbatim,
        strict=True,
    ):
        if any(verbatim):
            continue
        cut = (split_sentences(source), split_sentences(target))
        if by_sentence and len(cut[0]) == len(cut[1]):
            yield from zip(*cut, strict=True)
        else:
            yield source, target
