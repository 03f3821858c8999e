"""Compiled catalogues: read as gettext reads them, cleaned, or refused by name."""

import gettext
import io
import struct

import pytest

from specjax import errors
from specjax.data import catalogues

HEADER = "Content-Type: text/plain; charset={}\nPlural-Forms: nplurals=2; plural=n!=1;"


def compiled(entries, order="<", charset="UTF-8") -> bytes:
    """What msgfmt makes of messages and translations."""
    rows = sorted({"": HEADER.format(charset), **entries}.items())
    tables, texts = [b"", b""], b""
    start = 28 + 16 * len(rows)
    for side in (0, 1):
        for row in rows:
            text = row[side].encode(charset)
            tables[side] += struct.pack(f"{order}2I", len(text), start + len(texts))
            texts += text + b"\0"
    head = (0x950412DE, 0, len(rows), 28, 28 + 8 * len(rows), 0, 0)
    return struct.pack(f"{order}7I", *head) + b"".join(tables) + texts


PLURAL = {"One file\0Many files": "Eine Datei\0Viele Dateien"}
CONTEXT = {"menu|open\x04_Open": "Ö_ffnen"}


def _write(folder, content: bytes, name="app.mo"):
    place = folder / "usr" / "share" / "locale" / "de" / "LC_MESSAGES"
    place.mkdir(parents=True, exist_ok=True)
    (place / name).write_bytes(content)
    return place / name


@pytest.mark.parametrize(("order", "charset"), [("<", "UTF-8"), (">", "ISO-8859-1")])
def test_messages_are_what_gettext_finds(tmp_path, order, charset):
    content = compiled({**PLURAL, **CONTEXT, "Quit": "Beenden"}, order, charset)
    rows = catalogues.read_catalogue(_write(tmp_path, content))
    assert sorted(rows) == [
        ("Many files", "Viele Dateien"),
        ("One file", "Eine Datei"),
        ("Quit", "Beenden"),
        ("_Open", "Ö_ffnen"),
    ]
    known = gettext.GNUTranslations(io.BytesIO(content))
    assert known.gettext("Quit") == "Beenden"
    assert known.pgettext("menu|open", "_Open") == "Ö_ffnen"
    assert known.ngettext("One file", "Many files", 2) == "Viele Dateien"


@pytest.mark.parametrize(
    ("message", "translation", "pair"),
    [
        ("_Save as...", "Speichern _unter …", ("Save as", "Speichern unter")),
        ("E&xit", "B&eenden", ("Exit", "Beenden")),
        ("~Edit this", "~Ändern", ("Edit this", "Ändern")),
        ("Bread & butter", "Brot & Butter", ("Bread & butter", "Brot & Butter")),
        ("100 % of it\nall", "100 % davon", ("100 % of it all", "100 % davon")),
    ],
)
def test_signs_for_keys_go(tmp_path, message, translation, pair):
    path = _write(tmp_path, compiled({message: translation}))
    rows, _ = catalogues.pairs([path])
    assert [(row.package, row.source, row.target) for row in rows] == [("app", *pair)]


@pytest.mark.parametrize(
    ("message", "translation", "reason"),
    [
        ("%s files", "%s Dateien", "format"),
        ("File %1 of it", "Datei %1 davon", "format"),
        ("Hello {name}", "Hallo {name}", "format"),
        ("Run $(ARG1) now", "Jetzt $(ARG1)", "format"),
        ("This &amp; that", "Dies &amp; das", "format"),
        ("Set font_size now", "Setze font_size", "code"),
        ("The R&D team", "Das R&D-Team", "code"),
        ("See <b>this</b>", "Siehe <b>dies</b>", "code"),
        ("Kernel", "Kernel", "untranslated"),
        ("Nothing yet", "", "untranslated"),
        ("A", "Ä", "length_or_script"),
        ("Short", "Ein sehr langer Text, der nicht passt", "length_or_script"),
        ("Letters", "漢字", "length_or_script"),
    ],
)
def test_what_is_no_plain_text_is_left_out_and_counted(
    tmp_path, message, translation, reason
):
    path = _write(tmp_path, compiled({message: translation}))
    rows, counts = catalogues.pairs([path])
    assert not rows and counts == {"messages": 1, f"left_out_{reason}": 1}


def test_one_message_has_one_translation(tmp_path):
    first = _write(tmp_path, compiled({"Open": "Öffnen", "_Open": "Ö_ffnen"}), "a.mo")
    second = _write(tmp_path, compiled({"Open": "Offen", "Close": "Zu"}), "b.mo")
    found = catalogues.find_catalogues(tmp_path)
    assert found == [first, second]
    rows, counts = catalogues.pairs(found)
    assert [(row.source, row.target) for row in rows] == [
        ("Open", "Öffnen"),
        ("Close", "Zu"),
    ]
    assert counts["left_out_copy"] == 2


def test_bad_files_are_named(tmp_path):
    with pytest.raises(errors.InputError, match="holds no catalogue"):
        catalogues.find_catalogues(tmp_path)
    whole = compiled({"Open": "Öffnen"})
    for content, message in (
        (b"no catalogue", "is no catalogue"),
        (whole[:-12], "is damaged: entry"),
        (whole[:20], "is damaged"),
        (whole.replace(b"UTF-8", b"ASCII"), "is damaged: .*codec"),
        (whole.replace(b"UTF-8", b"UTF-9"), "is damaged: unknown encoding"),
    ):
        path = _write(tmp_path, content)
        with pytest.raises(errors.InputError, match=f"app.mo {message}"):
            catalogues.read_catalogue(path)
