"""Descriptions and their synopses: what is left out, counted, and kept apart."""

from specjax.data import debian, synopsis

LONG = "reads every kind of picture that the cameras of the last ten years write"


def _record(package, summary, *paragraphs, verbatim=()):
    kinds = tuple(text in verbatim for text in paragraphs)
    return debian.Description(package, package, summary, paragraphs, kinds)


def _named(split: str, count: int) -> list[str]:
    """Names of packages with different stems in a split."""
    names = (f"name{chr(97 + i // 26)}{chr(97 + i % 26)}" for i in range(676))
    return [name for name in names if debian.split_of(name) == split][:count]


TRAIN = _named("train", 40)
(TEST,) = _named("test", 1)
(VALIDATION,) = _named("validation", 1)


def _kept(records, **settings):
    splits, counts = synopsis.examples(records, **settings)
    rows = {row.package: row for rows in splits.values() for row in rows}
    return rows, counts


def test_a_description_becomes_its_synopsis():
    command = "foo --all"
    record = _record(
        TRAIN[0], "reader of files", "It reads.", command, "Well.", verbatim=[command]
    )
    rows, counts = _kept([record])
    assert rows[TRAIN[0]] == debian.TextPair(
        TRAIN[0], "It reads. Well.", "reader of files"
    )
    assert counts["records"] == counts["verbatim_paragraphs_left_out"] == 1


def test_what_is_boilerplate_alone_is_left_out():
    crates = [
        _record(
            f"librust-{name}-dev",
            f"thing number {at} of many",
            f"This package contains the source for the Rust {name} crate.",
        )
        for at, name in enumerate(TRAIN[:20])
    ]
    own = _record(
        f"librust-{TRAIN[30]}-dev",
        "a parser of trees",
        f"This package contains the source for the Rust {TRAIN[30]} crate.",
        "It parses trees.",
    )
    rows, counts = _kept([*crates, own])
    assert set(rows) == {own.package}
    assert counts["left_out_boilerplate"] == 20
    # Fewer are copies of one mould, of which the first stays.
    rows, counts = _kept([*crates[:10], own], max_alike=12)
    assert set(rows) == {own.package, crates[0].package}
    assert counts["left_out_copy"] == 9


def test_long_descriptions_stay_out_or_end_with_a_whole_paragraph():
    parts = ("First part here.", "Second part here.", "Third.")
    record = _record(TRAIN[0], "a thing of parts", *parts)
    huge = _record(TRAIN[1], "a thing of words", "word " * 50)
    rows, counts = _kept([record, huge], max_source=40)
    assert not rows and counts["left_out_too_long"] == 2 and counts["shortened"] == 0
    rows, counts = _kept([record, huge], max_source=40, shorten=True)
    assert rows[TRAIN[0]].source == "First part here. Second part here."
    assert counts["shortened"] == counts["left_out_too_long"] == 1
    rows, counts = _kept([record], max_source=41, shorten=True)
    assert rows[TRAIN[0]].source == " ".join(parts) and counts["shortened"] == 0


def test_each_other_reason_is_counted():
    rows, counts = _kept(
        [
            _record(TRAIN[0], "no body at all"),
            _record(TRAIN[1], "漢字 converter", "It converts."),
            _record(TRAIN[2], "short", "It is short."),
            _record(TRAIN[3], "long " * 30, "It is long."),
            _record(TRAIN[4], "a good synopsis", "It is good."),
        ]
    )
    assert set(rows) == {TRAIN[4]}
    assert counts["left_out_without_prose"] == counts["left_out_other_script"] == 1
    assert counts["left_out_synopsis_length"] == 2
    assert sum(n for name, n in counts.items() if name.startswith("left_out")) == 4


def test_near_copies_do_not_cross_splits():
    held_out = _record(TEST, "picture reader of cameras (documentation)", f"It {LONG}.")
    unlike = _record(TRAIN[5], "text writer", "It writes texts.")
    for copy in (
        _record(TRAIN[0], "another synopsis", f"It {LONG}.", "And more."),
        _record(TRAIN[1], "another synopsis", f"It {LONG}. This has its files."),
        _record(TRAIN[2], "picture reader of cameras - tools", "Not alike."),
        _record(TRAIN[3], "Picture reader of cameras", "Not alike."),
    ):
        splits, counts = synopsis.examples([copy, unlike, held_out])
        assert [row.package for row in splits["train"]] == [TRAIN[5]]
        assert [row.package for row in splits["test"]] == [TEST]
        assert counts["left_out_of_train_near_copy"] == 1
    # The test split goes before the validation split, wherever it stands.
    near = _record(VALIDATION, "picture reader of cameras", "Not alike.")
    splits, counts = synopsis.examples([near, held_out])
    assert not splits["validation"] and len(splits["test"]) == 1
    assert counts["left_out_of_validation_near_copy"] == 1


def test_a_sentence_of_many_packages_is_no_near_copy():
    intro = f"This suite {LONG}."
    many = [
        _record(name, f"part {name} of a suite", intro, f"This has {at * 'x'}.")
        for at, name in enumerate([*TRAIN[:20], TEST])
    ]
    splits, _ = synopsis.examples(many)
    assert len(splits["train"]) == 20 and len(splits["test"]) == 1
    splits, _ = synopsis.examples(many[10:])
    assert not splits["train"] and len(splits["test"]) == 1


def test_a_package_is_in_the_split_of_all_tasks():
    splits, _ = synopsis.examples(
        [_record(n, f"a thing named {n}", f"It is {n} alone.") for n in (*TRAIN, TEST)],
        max_alike=100,
    )
    for name, rows in splits.items():
        assert all(debian.split_of(row.package) == name for row in rows)
