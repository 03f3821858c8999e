"""Makes a task's data: three JSONL splits, a SentencePiece model and a record of both.

    python -m experiments.prepare --config=configs/repair_data.py --workdir=DIR

DIR receives train.jsonl, validation.jsonl and test.jsonl (objects with `source` and
`target`), a tokenizer (spiece.model), data.json, and for the tasks from Debian's
descriptions lists/, where apt keeps what it downloaded. What was left out or shortened
is counted in data.json and printed.
"""

import collections
import dataclasses
import glob
import importlib.metadata
import pathlib
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
from absl import flags

from configs import ende_data, files_data, repair_data, synopsis_data, wmt_data
from experiments import build, command
from specjax import errors, zoo
from specjax.data import (
    catalogues,
    debian,
    debian_lists,
    hub,
    pairs,
    repair,
    synopsis,
    tokenizer,
)

# The pairs of each split, and what was left out or shortened on the way, by reason.
Splits = dict[str, list[pairs.Pair]]
Counts = dict[str, dict[str, int]]
Task = Callable[[ml_collections.ConfigDict, pathlib.Path], tuple[Splits, Counts]]


def _repair(
    config: ml_collections.ConfigDict, lists: pathlib.Path
) -> tuple[Splits, Counts]:
    if config.copies < 1:
        raise errors.InputError(f"config.copies is {config.copies}: at least 1")
    if not 0 <= config.typo_rate <= 1:
        raise errors.InputError(f"config.typo_rate is {config.typo_rate}: from 0 to 1")
    records = debian_lists.read_lists(debian_lists.fetch_lists(lists, ("en",))["en"])
    texts: dict[str, list[str]] = {name: [] for name in debian.SPLITS}
    for text in debian.sentences(
        records, config.min_length, config.max_length, config.max_alike
    ):
        texts[debian.split_of(text.package)].append(text.text)
    if config.synopses:
        sources = {repair.strip_sentence(t) for split in texts.values() for t in split}
        # They have no full stop and begin in either case: to learn words from, not to
        # be judged by.
        for text in debian.synopses(records, config.min_length, config.max_length):
            is_new = repair.strip_sentence(text.text) not in sources
            if is_new and debian.split_of(text.package) == "train":
                texts["train"].append(text.text)
                sources.add(repair.strip_sentence(text.text))
    splits = {
        name: [
            repair.example(text, config.seed, config.typo_rate, copy)
            for copy in range(config.copies if name == "train" else 1)
            for text in split
        ]
        for name, split in texts.items()
    }
    same = len(splits["train"]) - len(set(splits["train"]))
    return splits, {"train": {"copies_with_the_same_typos": same}}


def _ende(
    config: ml_collections.ConfigDict, lists: pathlib.Path
) -> tuple[Splits, Counts]:
    paths = debian_lists.fetch_lists(lists, ("en", "de"))
    splits: Splits = {name: [] for name in debian.SPLITS}
    found = debian.pairs(
        debian_lists.read_lists(paths["en"]),
        debian_lists.read_lists(paths["de"]),
        by_sentence=config.by_sentence,
        max_length=config.max_length,
        max_ratio=config.max_ratio,
    )
    for pair in found:
        row = pairs.Pair(pair.source, pair.target)
        splits[debian.split_of(pair.package)].append(row)
    if not config.catalogues:
        return splits, {}
    messages, counts = catalogues.pairs(
        catalogues.find_catalogues(config.catalogues, "de"),
        max_length=config.max_length,
        max_ratio=config.max_ratio,
    )
    # Programs' messages are to learn from, not to be judged by.
    known = {debian.fold(pair.source) for pair in found}
    new = [pair for pair in messages if debian.fold(pair.source) not in known]
    splits["train"] += [pairs.Pair(pair.source, pair.target) for pair in new]
    counts["left_out_in_descriptions"] = len(messages) - len(new)
    return splits, {"catalogues": counts | {"pairs": len(new)}}


def _synopsis(
    config: ml_collections.ConfigDict, lists: pathlib.Path
) -> tuple[Splits, Counts]:
    records = debian_lists.read_lists(debian_lists.fetch_lists(lists, ("en",))["en"])
    found, counts = synopsis.examples(
        records,
        max_source=config.max_source,
        min_target=config.min_target,
        max_target=config.max_target,
        max_alike=config.max_alike,
        shorten=config.shorten,
    )
    splits = {
        name: [pairs.Pair(pair.source, pair.target) for pair in rows]
        for name, rows in found.items()
    }
    return splits, {"descriptions": counts}


def _files(
    config: ml_collections.ConfigDict, lists: pathlib.Path
) -> tuple[Splits, Counts]:
    del lists
    files = {name: _shards(config[name], name) for name in debian.SPLITS}
    for name in ("validation", "test"):
        for path in sorted({*files["train"]} & {*files[name]}):
            raise errors.InputError(
                f"config.train and config.{name} both name {path}: what is held out "
                "is not learnt from"
            )
    splits, counts = _limited(
        config,
        {
            name: [
                pair
                for path in files[name]
                for pair in pairs.load_pairs(
                    path, config.source_key, config.target_key, header=config.header
                )
            ]
            for name in debian.SPLITS
        },
    )
    if config.apart:
        held_out = {
            debian.fold(text)
            for name in ("validation", "test")
            for pair in splits[name]
            for text in (pair.source, pair.target)
        }
        before = len(splits["train"])
        splits["train"] = [
            pair
            for pair in splits["train"]
            if not {debian.fold(pair.source), debian.fold(pair.target)} & held_out
        ]
        counts["train"]["left_out_held_out"] = before - len(splits["train"])
    return splits, counts


def _shards(given: str, setting: str) -> list[str]:
    """The files behind comma-separated names and patterns."""
    paths: list[str] = []
    for name in filter(None, (part.strip() for part in given.split(","))):
        path = str(pathlib.Path(name).expanduser())
        # A name that is a file is no pattern, whatever characters it has.
        found = (
            [path]
            if pathlib.Path(path).is_file()
            else sorted(glob.glob(path, recursive=True))
        )
        if not found:
            raise errors.InputError(f"config.{setting} names {name!r}: no such file")
        paths += [own for own in found if own not in paths]
    if not paths:
        raise errors.InputError(
            f"config.{setting} is empty: name .tsv or .jsonl files, with commas between"
        )
    return paths


def _hub(
    config: ml_collections.ConfigDict, lists: pathlib.Path
) -> tuple[Splits, Counts]:
    del lists
    splits: dict[str, Iterable[pairs.Pair]] = {}
    for name in debian.SPLITS:
        if name == "test" and config.test_set:
            splits[name] = hub.load_test_set(config.test_set, config.langpair)
            continue
        splits[name] = hub.load_hub(
            config.dataset,
            config.name,
            f"{name}[:{config.limit}]" if config.limit else name,
            config.source_field,
            config.target_field,
            revision=config.revision,
        )
    return _limited(config, splits)


def _limited(
    config: ml_collections.ConfigDict, splits: Mapping[str, Iterable[pairs.Pair]]
) -> tuple[Splits, Counts]:
    kept: Splits = {}
    counts: Counts = {}
    for name, rows in splits.items():
        kept[name], counts[name] = pairs.within_limits(
            rows, config.max_source, config.max_target, config.shorten
        )
    return kept, counts


TASKS: Mapping[str, Task] = {
    "repair": _repair,
    "ende": _ende,
    "synopsis": _synopsis,
    "files": _files,
    "hub": _hub,
}
CONFIGS = {
    "repair": repair_data,
    "ende": ende_data,
    "synopsis": synopsis_data,
    "files": files_data,
    "hub": wmt_data,
}


def prepare(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes the data of one task.

    Args:
        config: see `configs/*_data.py`.
        workdir: receives the files.

    Returns:
        The content of `data.json`: settings, counts of each split, what was left out,
        list files and versions.

    Raises:
        InputError: a setting is wrong or the corpus cannot be had.
    """
    if config.get("task") not in TASKS:
        raise errors.InputError(
            f"config.task is {config.get('task')!r}; known are "
            f"{', '.join(sorted(TASKS))}"
        )
    build.check_settings(config, CONFIGS[config.task].get_config())
    build.row_keys(config.seed, 1)
    if not config.tokenizer:
        build.positive(config, "num_pieces")
    for name in ("max_source", "max_target", "limit"):
        if config.get(name, 0) < 0:
            raise errors.InputError(
                f"config.{name} is {config[name]}: at least 0 (any)"
            )
    if config.get("shorten") and not config.max_source:
        raise errors.InputError(
            "config.shorten is set and config.max_source 0: name the length"
        )
    workdir.mkdir(parents=True, exist_ok=True)
    # Until all is written, no record of an earlier call may speak for it.
    (workdir / "data.json").unlink(missing_ok=True)
    given = config.get("lists")
    lists = pathlib.Path(given) if given else workdir / "lists"
    if config.tokenizer:
        _copy_tokenizer(config.tokenizer, workdir)
    splits, decisions = TASKS[config.task](config, lists)
    for name, rows in splits.items():
        if not rows:
            raise errors.InputError(
                f"the {name} split of {config.task} is empty: the limits on length, and"
                " config.apart where it is set, leave nothing of its data"
            )
    for name, rows in splits.items():
        rows[:] = [
            dataclasses.replace(row, source=config.prefix + row.source) for row in rows
        ]
        pairs.save_pairs(workdir / f"{name}.jsonl", rows)
    if not config.tokenizer:
        _remove_tokenizer(workdir)
        tokenizer.train_sentencepiece(
            _vocabulary_texts(config.task, splits["train"]),
            config.num_pieces,
            workdir / tokenizer.MODEL_FILE,
            seed=config.seed,
        )
    pieces = tokenizer.load_tokenizer(workdir)
    counts = {name: _counts(rows, pieces) for name, rows in splits.items()}
    known = {row.source for row in splits["train"]}
    for name in ("validation", "test"):
        shared = sum(row.source in known for row in splits[name])
        counts[name]["sources_also_in_train"] = shared
    record = {
        "settings": config.to_dict(),
        "vocab_size": pieces.vocab_size,
        "splits": counts,
        "decisions": decisions,
        "lists": sorted(path.name for path in lists.glob("*_i18n_Translation-*")),
        "versions": {
            "python": platform.python_version(),
            "sentencepiece": importlib.metadata.version("sentencepiece"),
        },
    }
    command.write_json(workdir / "data.json", record)
    return record


def _copy_tokenizer(name: str, workdir: pathlib.Path) -> None:
    """Copies a folder's tokenizer, or a `spiece.model` file, and tries it."""
    source = zoo.locate(name).expanduser()
    paths = {tokenizer.MODEL_FILE: source}
    if source.is_dir():
        paths = {file: source / file for file in tokenizer.FILES}
    found = {to: path.read_bytes() for to, path in paths.items() if path.is_file()}
    if not found:
        raise errors.InputError(
            f"config.tokenizer is {name!r}: neither a file nor a folder with one of"
            f" {', '.join(tokenizer.FILES)}"
        )
    _remove_tokenizer(workdir)
    for file, content in found.items():
        (workdir / file).write_bytes(content)
    tokenizer.load_tokenizer(workdir)


def _remove_tokenizer(workdir: pathlib.Path) -> None:
    for file in tokenizer.FILES:
        (workdir / file).unlink(missing_ok=True)


def _vocabulary_texts(task: str, rows: Sequence[pairs.Pair]) -> Iterator[str]:
    for row in rows:
        # Common typos would otherwise get pieces of their own.
        yield repair.strip_sentence(row.target) if task == "repair" else row.source
        yield row.target


def _counts(rows: Sequence[pairs.Pair], pieces: tokenizer.Tokenizer) -> dict[str, int]:
    counts: collections.Counter[str] = collections.Counter(examples=len(rows))
    for row in rows:
        for side, text in (("source", row.source), ("target", row.target)):
            ids = pieces.encode(text)
            longest = f"longest_{side}_tokens"
            counts[longest] = max(counts[longest], len(ids))
            counts[f"{side}_tokens"] += len(ids)
            counts[f"{side}_characters"] += len(text)
            counts["unknown_tokens"] += ids.count(pieces.unk_id)
            counts["texts_changed_by_tokenizer"] += pieces.decode(ids) != text
    return dict(counts)


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    del values
    record = prepare(config, workdir)
    for label, table in (("", "splits"), ("decided on ", "decisions")):
        for name, counts in record[table].items():
            told = ", ".join(f"{key} {value}" for key, value in counts.items())
            print(f"{label}{name}: {told or 'nothing left out'}")


if __name__ == "__main__":
    command.run(main)
