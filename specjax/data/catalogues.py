"""Translations of programs' messages from gettext's compiled catalogues (`.mo`)."""

import collections
import pathlib
import re
import struct
from collections.abc import Iterator, Sequence

from specjax import errors
from specjax.data import debian

_MAGIC = 0x950412DE
# A message may open with the place where it is used.
_CONTEXT_END = "\x04"
# What a program fills in (%s, %1, %(name)s, {0}, $(ARG1); a lone "100 %" is text), and
# what stands for a sign (&amp;).
_FORMAT = re.compile(r"%[\w(\-+.#*]|\{|\$[\w({]|&#?\w+;")
# GTK's, Qt's and the older LibreOffice's sign before the letter that is the key.
_MNEMONIC = re.compile(r"[_&~](?=\w)")
_INNER_SIGN = re.compile(r"\w+[_&~]\w+")
_ELLIPSIS = re.compile(r"\s*(?:\.\.\.|…)$")


def read_catalogue(path: str | pathlib.Path) -> list[tuple[str, str]]:
    """Every message of a catalogue with its translation, as they stand.

    A message with a plural gives two pairs: the singular with the first form, the
    plural with the last one, which is right for languages of two forms.

    Args:
        path: a `.mo` file.

    Returns:
        Messages, without their contexts, and translations, in the file's order. The
        header is no message.

    Raises:
        InputError: the file is no catalogue, is damaged, or is not text in the encoding
            that its header names.
    """
    path = pathlib.Path(path)
    content = path.read_bytes()
    order = "<"
    if content[:4] == struct.pack(">I", _MAGIC):
        order = ">"
    elif content[:4] != struct.pack("<I", _MAGIC):
        raise errors.InputError(f"{path} is no catalogue of gettext (.mo)")
    try:
        entries = list(_entries(content, order))
        header = dict(entries).get(b"", b"").decode("ascii", "replace")
        found = re.search(r"charset=([\w-]+)", header)
        # Templates that were never filled in say CHARSET, and are ASCII.
        encoding = found[1] if found and found[1] != "CHARSET" else "utf-8"
        texts = [(a.decode(encoding), b.decode(encoding)) for a, b in entries if a]
    except (struct.error, LookupError, UnicodeDecodeError) as error:
        raise errors.InputError(f"{path} is damaged: {error}") from error
    rows = []
    for message, translation in texts:
        message = message.rpartition(_CONTEXT_END)[2]
        singular, _, plural = message.partition("\0")
        forms = translation.split("\0")
        rows.append((singular, forms[0]))
        if plural:
            rows.append((plural, forms[-1]))
    return rows


def _entries(content: bytes, order: str) -> Iterator[tuple[bytes, bytes]]:
    count, sources, targets = struct.unpack_from(f"{order}3I", content, 8)
    for number in range(count):
        sides = []
        for table in (sources, targets):
            length, start = struct.unpack_from(
                f"{order}2I", content, table + 8 * number
            )
            if start + length > len(content):
                raise struct.error(f"entry {number} lies beyond the file's end")
            sides.append(content[start : start + length])
        yield sides[0], sides[1]


def find_catalogues(
    folder: str | pathlib.Path, language: str = "de"
) -> list[pathlib.Path]:
    """The catalogues of one language at any depth, as gettext lays them out.

    Args:
        folder: holds `.../<language>/LC_MESSAGES/*.mo`.
        language: its code.

    Returns:
        The files, sorted.

    Raises:
        InputError: there are none.
    """
    folder = pathlib.Path(folder)
    found = sorted(folder.glob(f"**/{language}/LC_MESSAGES/*.mo"))
    if not found:
        raise errors.InputError(
            f"{folder} holds no catalogue: no file {language}/LC_MESSAGES/*.mo at any"
            " depth"
        )
    return found


def pairs(
    paths: Sequence[pathlib.Path], *, max_length: int = 400, max_ratio: float = 3.0
) -> tuple[list[debian.TextPair], dict[str, int]]:
    """Distinct messages that are plain text, with their translations.

    Signs for keys ("_Open", "&Open") and a closing ellipsis go. Left out are messages
    with places to fill in, code, paths and addresses, what the translation leaves as it
    is, single letters, and all but the first translation of one message.

    Args:
        paths: `.mo` files.
        max_length: see `debian.pairs`.
        max_ratio: see `debian.pairs`.

    Returns:
        The pairs, whose `package` is the catalogue's name; and how many were left out,
        by reason.
    """
    counts: collections.Counter[str] = collections.Counter()
    seen: set[str] = set()
    kept = []
    for path in paths:
        for message, translation in read_catalogue(path):
            counts["messages"] += 1
            raw = (message, translation)
            source, target = (_plain(text) for text in raw)
            key = debian.fold(source)
            if not translation.strip() or source == target:
                counts["left_out_untranslated"] += 1
            elif any(_FORMAT.search(text) for text in raw):
                counts["left_out_format"] += 1
            elif _is_code(*raw) or any(map(debian.has_markup, (source, target))):
                counts["left_out_code"] += 1
            elif len(key) < 2 or not debian.is_fair_pair(
                source, target, max_length, max_ratio
            ):
                counts["left_out_length_or_script"] += 1
            elif key in seen:
                counts["left_out_copy"] += 1
            else:
                seen.add(key)
                kept.append(debian.TextPair(path.stem, source, target))
    return kept, dict(counts)


def _is_code(message: str, translation: str) -> bool:
    """Whether both sides have a word with one sign inside: a name, not a key's mark."""
    return bool(
        set(_INNER_SIGN.findall(message)) & set(_INNER_SIGN.findall(translation))
    )


def _plain(text: str) -> str:
    return _ELLIPSIS.sub("", _MNEMONIC.sub("", debian.plain(text)))
