"""Source-target pairs of text from TSV or JSONL files, and limits to their lengths."""

import collections
import dataclasses
import json
import pathlib
from collections.abc import Iterable

from specjax import errors
from specjax.data import debian


@dataclasses.dataclass(frozen=True)
class Pair:
    """A source text and the target text that it should become.

    Attributes:
        source: what is read.
        target: what is to be written.
        finished: the target text ends where it stands; a model's output that was cut
            at a length limit does not, and no end of sequence follows it.
    """

    source: str
    target: str
    finished: bool = True


def load_pairs(
    path: str | pathlib.Path,
    source_key: str = "source",
    target_key: str = "target",
    empty_targets: bool = False,
    header: bool = False,
) -> list[Pair]:
    """Reads every line of a file as one pair.

    Args:
        path: a `.tsv` file (source, tab, target) or a `.jsonl` file (one object a
            line, with the field `finished` where it is false), in UTF-8.
        source_key: the name of the source's field, or of its column under a header.
        target_key: likewise the target's.
        empty_targets: a model that wrote these may have written nothing.
        header: TSV: the first line names the columns, of which there may be more.

    Returns:
        As many pairs as the file has lines, a header not counted.

    Raises:
        InputError: names the file and the first line that is no pair of two non-empty
            texts; nothing is skipped.
    """
    path = pathlib.Path(path)
    if path.suffix not in (".tsv", ".jsonl"):
        raise errors.InputError(
            f"{path} is neither .tsv nor .jsonl: pairs are read from these two formats"
        )
    if not path.is_file():
        raise errors.InputError(f"pairs file {path} does not exist")
    pairs = []
    columns = None
    # Only "\n" ends a line: a text may hold other separators that Python knows.
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise errors.InputError(f"{place} is not UTF-8") from error
            if path.suffix == ".tsv" and header and columns is None:
                columns = line.split("\t")
                _check_header(columns, (source_key, target_key), place)
                continue
            if path.suffix == ".tsv":
                pair = _from_columns(line, place, columns, (source_key, target_key))
            else:
                pair = _from_json(line, place, source_key, target_key)
            for name, text in (("source", pair.source), ("target", pair.target)):
                if not text.strip() and not (name == "target" and empty_targets):
                    raise errors.InputError(f"{place} has an empty {name}")
            pairs.append(pair)
    if not pairs:
        raise errors.InputError(f"{path} is empty: it needs at least one pair")
    return pairs


def _check_header(columns: list[str], keys: tuple[str, str], place: str) -> None:
    for key in keys:
        if columns.count(key) != 1:
            raise errors.InputError(
                f"{place} is the header and names {columns.count(key)} columns {key!r};"
                f" its columns are {columns}"
            )


def _from_columns(
    line: str, place: str, names: list[str] | None, keys: tuple[str, str]
) -> Pair:
    columns = line.split("\t")
    needed = 2 if names is None else len(names)
    if len(columns) != needed:
        raise errors.InputError(
            f"{place} has {len(columns)} tab-separated columns; {needed} are needed"
        )
    source, target = (
        columns if names is None else (columns[names.index(k)] for k in keys)
    )
    return Pair(source, target)


def _from_json(line: str, place: str, source_key: str, target_key: str) -> Pair:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise errors.InputError(f"{place} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise errors.InputError(f"{place} is not a JSON object")
    for key in (source_key, target_key):
        if not isinstance(fields.get(key), str):
            raise errors.InputError(
                f"{place} has no text under {key!r}; its fields are {sorted(fields)}"
            )
    finished = fields.get("finished", True)
    if not isinstance(finished, bool):
        raise errors.InputError(
            f"{place} has {finished!r} under 'finished': it must be true or false"
        )
    return Pair(fields[source_key], fields[target_key], finished)


def save_pairs(path: str | pathlib.Path, pairs: Iterable[Pair]) -> None:
    """Writes pairs as JSONL, a line of `to_json` each."""
    with open(path, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(to_json(pair) + "\n" for pair in pairs)


def to_json(pair: Pair) -> str:
    """One line, without its end: `source`, `target`, and `finished` where it is not."""
    line: dict[str, str | bool] = {"source": pair.source, "target": pair.target}
    if not pair.finished:
        line["finished"] = False
    return json.dumps(line, ensure_ascii=False)


def within_limits(
    pairs: Iterable[Pair],
    max_source: int = 0,
    max_target: int = 0,
    shorten: bool = False,
) -> tuple[list[Pair], dict[str, int]]:
    """Pairs of texts that are neither empty nor too long.

    Args:
        pairs: source and target texts.
        max_source: characters of the longest source; 0: any length.
        max_target: characters of the longest target; 0: any length.
        shorten: cut longer sources to the leading whole sentences that fit, instead of
            leaving the pair out. Targets are never cut.

    Returns:
        The pairs in order; and how many were left out or shortened, by reason.
    """
    counts: collections.Counter[str] = collections.Counter()
    kept = []
    for pair in pairs:
        source = pair.source
        if shorten and max_source and len(source) > max_source:
            source = leading(debian.split_sentences(source), max_source)
            counts["shortened"] += bool(source)
        if not pair.source.strip() or not pair.target.strip():
            counts["left_out_empty"] += 1
        elif not source or 0 < max_source < len(source):
            counts["left_out_long_source"] += 1
        elif 0 < max_target < len(pair.target):
            counts["left_out_long_target"] += 1
        else:
            kept.append(dataclasses.replace(pair, source=source))
    return kept, dict(counts)


def leading(parts: Iterable[str], max_length: int) -> str:
    """As many whole parts from the first on as fit, joined by spaces.

    Args:
        parts: sentences or paragraphs.
        max_length: characters of the whole.

    Returns:
        The text; empty if not even the first part fits.
    """
    text = ""
    for part in parts:
        longer = f"{text} {part}" if text else part
        if len(longer) > max_length:
            break
        text = longer
    return text
