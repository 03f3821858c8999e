"""Debian's descriptions: parsing, cutting, pairing and splitting of small lists."""

import collections

import pytest

from specjax import errors
from specjax.data import debian, debian_lists

ENGLISH = """\
Package: foo
Description-md5: aaaa
Description-en: tool that  foos
 Foo is a small tool that reads files. It was written for C. It needs e.g. Bar
 and runs everywhere!
 .
 Supported operations are:
  * reading files
    of all kinds
  * writing - if allowed - files
 - a flush item
 that wraps
 .
 Use it like this:
   foo --help | less
 .
 The end of foo comes (as you see) at the end of this paragraph.

Package: libfoo-dev
Description-md5: bbbb
Description-en: foo (development files)
 This package has the headers of foo.
 .
 Ask Dr. Smith. He knows the ﬁrst version well.

Package: bar
Description-md5: cccc
Description-en: bar without a body
"""

GERMAN = """\
Package: foo
Description-md5: aaaa
Description-de: Werkzeug zum Fooen
 Foo ist ein kleines Werkzeug, das Dateien liest. Es wurde für C geschrieben. Es
 benötigt z. B. Bar und läuft überall!
 .
 Unterstützt werden:
  * Lesen von Dateien
  * Schreiben von Dateien
 - ein Punkt
 .
 Benutzung:
   foo --help | less
 .
 Das Ende von Foo kommt (wie man sieht) am Ende dieses Absatzes.

Package: libfoo-dev
Description-md5: bbbb
Description-de: foo (Entwicklungsdateien)
 Dieses Paket enthält die Header von foo und mehr.

Package: bar
Description-md5: cccc
Description-de: bar without a body
"""


def test_records_have_all_fields():
    foo, libfoo, bar = debian.parse_descriptions(ENGLISH)
    assert (foo.package, foo.md5, foo.synopsis) == ("foo", "aaaa", "tool that foos")
    assert libfoo.paragraphs[1] == "Ask Dr. Smith. He knows the first version well."
    assert (bar.paragraphs, bar.verbatim) == ((), ())


def test_lists_lose_their_bullets_and_commands_are_marked():
    foo = debian.parse_descriptions(ENGLISH)[0]
    assert foo.paragraphs[1:] == (
        "Supported operations are:",
        "reading files of all kinds",
        "writing - if allowed - files",
        "a flush item that wraps",
        "Use it like this:",
        "foo --help | less",
        "The end of foo comes (as you see) at the end of this paragraph.",
    )
    assert [
        text for text, kind in zip(foo.paragraphs, foo.verbatim, strict=True) if kind
    ] == ["foo --help | less"]


def test_a_dash_amid_running_text_stays():
    text = "Package: a\nDescription-md5: b\nDescription-en: c\n One thing\n - or two.\n"
    assert debian.parse_descriptions(text)[0].paragraphs == ("One thing - or two.",)


def test_text_after_an_indented_list_is_its_own_paragraph():
    text = "Package: a\nDescription-md5: b\nDescription-en: c\n  * item\n After it.\n"
    assert debian.parse_descriptions(text)[0].paragraphs == ("item", "After it.")


@pytest.mark.parametrize(
    "line", ["Package: foo", "Description-md5: aaaa", "Description-en: tool that  foos"]
)
def test_a_record_without_a_field_is_an_error(line):
    with pytest.raises(errors.InputError, match=f"record 1 .*{line.split(':')[0][:9]}"):
        debian.parse_descriptions(ENGLISH.replace(line, "Other: x", 1))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        (
            "It uses e.g. Bar, etc. Then it ends.",
            ["It uses e.g. Bar, etc.", "Then it ends."],
        ),
        ("For Python 3. It is by J. Doe.", ["For Python 3.", "It is by J. Doe."]),
        (
            "Version 1.2 is new. no capital here",
            ["Version 1.2 is new. no capital here"],
        ),
        (
            'He said "so." Then (he left.) The end',
            ['He said "so."', "Then (he left.)", "The end"],
        ),
        ("Es hat z. B. Äpfel. Öl nicht.", ["Es hat z. B. Äpfel.", "Öl nicht."]),
        ("", []),
    ],
)
def test_sentences_end_where_they_should(text, sentences):
    assert debian.split_sentences(text) == sentences


def _records(*bodies: str) -> list[debian.Description]:
    return [
        debian.Description(f"p{i}", str(i), f"synopsis {i}", (body,), (False,))
        for i, body in enumerate(bodies)
    ]


def test_sentences_are_whole_prose_of_the_right_length():
    found = debian.sentences(debian.parse_descriptions(ENGLISH))
    assert [text.text for text in found] == [
        "Foo is a small tool that reads files.",
        "It was written for C.",
        "It needs e.g. Bar and runs everywhere!",
        "The end of foo comes (as you see) at the end of this paragraph.",
        "This package has the headers of foo.",
        "He knows the first version well.",
    ]
    assert found[0].package == "foo" and found[-1].package == "libfoo-dev"


@pytest.mark.parametrize(
    "text",
    [
        "See https://example.org for more of it.",
        "Set the variable foo_bar to get it.",
        "Look into /etc/foo for the files.",
        "A heading without any end at all",
        "Too short.",
        "Long " * 40 + "text.",
        "漢字 is the name of this package.",
        "foo -- does what it can do here.",
    ],
)
def test_what_is_no_sentence_is_left_out(text):
    good = "This one is a plain sentence."
    found = debian.sentences(_records(text, good))
    assert [t.text for t in found] == [good]


def test_copies_in_another_dress_are_left_out():
    found = debian.sentences(
        _records("This is a fine package, really.", "This is a fine package really!")
    )
    assert len(found) == 1


def test_of_one_mould_only_the_first_few_stay():
    bodies = [f"This package contains the {w} files of foo." for w in "abcdefgh"]
    assert len(debian.sentences(_records(*bodies), max_alike=3)) == 3
    assert len(debian.sentences(_records(*bodies), max_alike=8)) == 8


def test_synopses_are_distinct():
    records = debian.parse_descriptions(ENGLISH)
    found = debian.synopses([*records, *records], min_length=10)
    assert [text.text for text in found] == [
        "tool that foos",
        "foo (development files)",
        "bar without a body",
    ]


def test_pairs_belong_together_by_md5_and_number():
    english = debian.parse_descriptions(ENGLISH)
    german = debian.parse_descriptions(GERMAN)[::-1]
    found = {p.source: p.target for p in debian.pairs(english, german)}
    assert found == {
        "tool that foos": "Werkzeug zum Fooen",
        "Foo is a small tool that reads files.": (
            "Foo ist ein kleines Werkzeug, das Dateien liest."
        ),
        "It was written for C.": "Es wurde für C geschrieben.",
        "It needs e.g. Bar and runs everywhere!": (
            "Es benötigt z. B. Bar und läuft überall!"
        ),
        "Supported operations are:": "Unterstützt werden:",
        "reading files of all kinds": "Lesen von Dateien",
        "writing - if allowed - files": "Schreiben von Dateien",
        "a flush item that wraps": "ein Punkt",
        "Use it like this:": "Benutzung:",
        "The end of foo comes (as you see) at the end of this paragraph.": (
            "Das Ende von Foo kommt (wie man sieht) am Ende dieses Absatzes."
        ),
        # libfoo-dev: two paragraphs against one, so the summary alone;
        # bar: not translated, so nothing.
        "foo (development files)": "foo (Entwicklungsdateien)",
    }


def test_pairs_by_paragraph_and_limits():
    english = debian.parse_descriptions(ENGLISH)
    german = debian.parse_descriptions(GERMAN)
    whole = debian.pairs(english, german, by_sentence=False)
    assert any(
        p.source.startswith("Foo is a small tool that reads files. It") for p in whole
    )
    short = debian.pairs(english, german, max_length=30)
    assert short and all(max(len(p.source), len(p.target)) <= 30 for p in short)
    assert {p.package for p in whole} == {"foo", "libfoo-dev"}


def test_one_source_has_one_translation():
    english = [
        debian.Description(p, p, "one text", (), ()) for p in ("first", "second")
    ]
    german = [
        debian.Description(p, p, f"ein Text {p}", (), ()) for p in ("second", "first")
    ]
    assert debian.pairs(english, german) == [
        debian.TextPair("first", "one text", "ein Text first")
    ]


@pytest.mark.parametrize(
    "relatives",
    [
        ("foo", "libfoo2", "libfoo-dev", "foo-doc", "python3-foo", "libfoo-perl"),
        ("gcc-12", "gcc-13-base", "gcc"),
        ("golang-github-spf13-cobra-dev", "golang-spf13-x"),
        ("r-cran-abc", "r-cran-abc.data"),
    ],
)
def test_relatives_share_a_split(relatives):
    assert len({debian.stem(package) for package in relatives}) == 1
    assert len({debian.split_of(package) for package in relatives}) == 1


def test_odd_names_have_a_stem():
    for package in ("0ad", "2048", "lib", "4store", "libc6", "fonts-"):
        assert debian.stem(package)


def test_splits_are_stable_and_of_the_right_size():
    counts = collections.Counter(debian.split_of(f"name{i}x") for i in range(5000))
    assert abs(counts["validation"] - 100) < 40 and abs(counts["test"] - 100) < 40
    assert counts["train"] == 5000 - counts["validation"] - counts["test"]
    assert set(counts) == set(debian.SPLITS)
    # These are what the shipped models were and were not trained on.
    names = ["vim", "git", "apache2", "gimp", "emacs", "bash", "nano", "zsh", "kile"]
    assert [debian.split_of(name) for name in names] == EXPECTED_SPLITS


EXPECTED_SPLITS = [
    "train",
    "train",
    "train",
    "train",
    "train",
    "train",
    "train",
    "train",
    "test",
]


def _write_lists(folder):
    (folder / "x_dists_y_main_i18n_Translation-en").write_text(ENGLISH, "utf-8")
    (folder / "x_dists_y_main_i18n_Translation-de").write_text(GERMAN, "utf-8")
    (folder / "x_dists_y_main_i18n_Translation-en.diff_Index").write_text("no list")


def test_lists_that_are_there_are_read_without_apt(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    _write_lists(tmp_path)
    found = debian_lists.fetch_lists(tmp_path)
    assert [path.name[-2:] for paths in found.values() for path in paths] == [
        "en",
        "de",
    ]
    records = debian_lists.read_lists([*found["en"], *found["en"]])
    assert [record.package for record in records] == ["foo", "libfoo-dev", "bar"]


def test_a_missing_apt_is_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(errors.InputError, match="apt-get was not found"):
        debian_lists.fetch_lists(tmp_path / "lists")


def _fake_apt(folder, monkeypatch, script: str):
    folder.mkdir()
    (folder / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_apt_writes_into_the_folder_alone(tmp_path, monkeypatch):
    record = tmp_path / "arguments"
    _fake_apt(
        tmp_path / "bin",
        monkeypatch,
        f'for a in "$@"; do echo "$a" >> {record}\n'
        'case "$a" in -oDir::State::Lists=*) d="${a#*=}";; esac; done\n'
        f'printf "%s" "$TEXT" > "$d/x_i18n_Translation-en"; echo > "$d/lock"',
    )
    monkeypatch.setenv("TEXT", ENGLISH)
    folder = tmp_path / "a folder"
    found = debian_lists.fetch_lists(folder, ("en",))
    assert [path.name for path in folder.iterdir()] == ["x_i18n_Translation-en"]
    assert len(debian_lists.read_lists(found["en"])) == 3
    arguments = record.read_text().splitlines()
    assert arguments[-1] == "update"
    for name in ("Dir::State::Lists", "Dir::Cache"):
        (value,) = [a for a in arguments if a.startswith(f"-o{name}=")]
        assert str(folder) in value
    assert "-oAcquire::Languages=en" in arguments


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'E: no such host' >&2; exit 100", "failed: E: no such host"),
        ("echo 'W: Failed to fetch http://x' >&2", "failed: W: Failed to fetch http"),
        ("exit 3", "exit code 3"),
        ("exit 0", "no Translation-en list"),
    ],
)
def test_a_failed_download_is_said_and_leaves_nothing(
    tmp_path, monkeypatch, script, message
):
    _fake_apt(tmp_path / "bin", monkeypatch, script)
    with pytest.raises(errors.InputError, match=message):
        debian_lists.fetch_lists(tmp_path / "lists")
    assert list((tmp_path / "lists").iterdir()) == []


def test_an_unreadable_list_is_named(tmp_path):
    broken = tmp_path / "x_i18n_Translation-en"
    broken.write_text("Package: foo\n")
    with pytest.raises(errors.InputError, match="Translation-en cannot be read"):
        debian_lists.read_lists([broken])
    packed = tmp_path / "x_i18n_Translation-en.lz4"
    packed.write_bytes(b"no lz4")
    with pytest.raises(errors.InputError, match="lz4 cannot be read: apt-helper"):
        debian_lists.read_lists([packed])
