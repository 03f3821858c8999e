"""Source-target pairs of text from two-column TSV or JSONL files."""

import dataclasses
import json
import pathlib
from collections.abc import Iterable

from specjax import errors


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
) -> list[Pair]:
    """Reads every line of a file as one pair.

    Args:
        path: a `.tsv` file (source, tab, target; no header) or a `.jsonl` file (one
            object a line, with the field `finished` where it is false), in UTF-8.
        source_key: JSONL: the name of the source's field.
        target_key: JSONL: the name of the target's field.
        empty_targets: a model that wrote these may have written nothing.

    Returns:
        As many pairs as the file has lines.

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
    # Only "\n" ends a line: a text may hold other separators that Python knows.
    with open(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            place = f"{path}, line {number}"
            try:
                line = raw.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise errors.InputError(f"{place} is not UTF-8") from error
            if path.suffix == ".tsv":
                pair = _from_columns(line, place)
            else:
                pair = _from_json(line, place, source_key, target_key)
            for name, text in (("source", pair.source), ("target", pair.target)):
                if not text.strip() and not (name == "target" and empty_targets):
                    raise errors.InputError(f"{place} has an empty {name}")
            pairs.append(pair)
    if not pairs:
        raise errors.InputError(f"{path} is empty: it needs at least one pair")
    return pairs


def _from_columns(line: str, place: str) -> Pair:
    columns = line.split("\t")
    if len(columns) != 2:
        raise errors.InputError(
            f"{place} has {len(columns)} tab-separated columns; 2 are needed"
        )
    source, target = columns
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
