"""Public corpora: any data set of the Hugging Face hub, and WMT's test sets."""

import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from specjax import errors
from specjax.data import pairs


def load_hub(
    dataset: str,
    name: str,
    split: str,
    source_field: str,
    target_field: str,
    *,
    revision: str = "",
) -> Iterator[pairs.Pair]:
    """One split of a data set, by the package `datasets`.

    Args:
        dataset: its name on the hub ("wmt/wmt14"), or a folder with JSON, CSV or
            Parquet files that are named after their splits.
        name: the configuration's name ("de-en"); empty: the only one.
        split: "train", "validation", "test", or a slice ("train[:1000]").
        source_field: the field of the source text; a field within a field after a
            point ("translation.en").
        target_field: the field of the target text.
        revision: the hub's branch or commit; empty: the main one.

    Yields:
        The pairs in order, texts as they are: one may be empty.

    Raises:
        InputError: `datasets` is not installed, the data cannot be had, or a row has no
            text in a field.
    """
    try:
        import datasets
    except ImportError as error:
        raise errors.InputError(
            f"{dataset} is read with the package datasets, which is not installed:"
            " install specjax with the extra hub"
        ) from error
    try:
        rows = datasets.load_dataset(
            dataset, name or None, split=split, revision=revision or None
        )
    except Exception as error:  # what a download may raise is written nowhere
        raise errors.InputError(
            f"split {split!r} of the data set {dataset!r} {name} cannot be loaded:"
            f" {_first_line(error)}"
        ) from error
    for number, row in enumerate(rows):
        place = f"row {number} (counted from 0) of {dataset}, {split},"
        yield pairs.Pair(
            _field(row, source_field, place), _field(row, target_field, place)
        )


def _field(row: Mapping[str, Any], path: str, place: str) -> str:
    value: Any = row
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if not isinstance(value, str):
        raise errors.InputError(
            f"{place} has no text under {path!r}; its fields are {sorted(row)}"
        )
    return value


def load_test_set(test_set: str, langpair: str) -> list[pairs.Pair]:
    """One of WMT's test sets, as the package `sacrebleu` downloads it.

    Args:
        test_set: sacrebleu's name of it ("wmt14/full": newstest2014 with 3,003
            sentences).
        langpair: "en-de".

    Returns:
        A pair a sentence, with the first reference.

    Raises:
        InputError: sacrebleu is not installed, it knows no such set or languages, or
            the set cannot be downloaded.
    """
    try:
        from sacrebleu import utils
    except ImportError as error:
        raise errors.InputError(
            f"the test set {test_set} is read with the package sacrebleu, which is not"
            " installed: install specjax with the extra data"
        ) from error
    if test_set not in utils.get_available_testsets():
        raise errors.InputError(f"sacrebleu knows no test set {test_set!r}")
    known = utils.get_langpairs_for_testset(test_set)
    if langpair not in known:
        raise errors.InputError(
            f"sacrebleu's test set {test_set} has no {langpair!r}, but"
            f" {', '.join(sorted(known))}"
        )
    # A damaged download ends sacrebleu with SystemExit, and so does a TLS error.
    try:
        source = utils.get_source_file(test_set, langpair)
        target = utils.get_reference_files(test_set, langpair)[0]
    except (Exception, SystemExit) as error:
        raise errors.InputError(
            f"sacrebleu's test set {test_set} {langpair} cannot be downloaded:"
            f" {_first_line(error)}"
        ) from error
    sides = [_lines(source), _lines(target)]
    if len(sides[0]) != len(sides[1]):
        raise errors.InputError(
            f"{source} has {len(sides[0])} lines and {target} {len(sides[1])}: delete"
            " both and try again"
        )
    return [pairs.Pair(*texts) for texts in zip(*sides, strict=True)]


def _lines(path: str) -> list[str]:
    text = pathlib.Path(path).read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n")


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]
