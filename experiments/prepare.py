"""Makes a task's data: three JSONL splits, a SentencePiece model and a record of both.

    python -m experiments.prepare --config=configs/repair_data.py --workdir=DIR

DIR receives train.jsonl, validation.jsonl and test.jsonl (objects with `source` and
`target`), spiece.model, data.json, and lists/, where apt keeps what it downloaded.
"""

import collections
import importlib.metadata
import pathlib
import platform
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections
from absl import flags

from configs import ende_data, repair_data
from experiments import build, command
from specjax import errors
from specjax.data import debian, debian_lists, pairs, repair, tokenizer

Splits = dict[str, list[pairs.Pair]]


def _repair(config: ml_collections.ConfigDict, lists: pathlib.Path) -> Splits:
    records = debian_lists.read_lists(debian_lists.fetch_lists(lists, ("en",))["en"])
    splits: Splits = {name: [] for name in debian.SPLITS}
    sources = set()

    def add(text: debian.Text) -> None:
        pair = repair.example(text.text, config.seed, config.typo_rate)
        splits[debian.split_of(text.package)].append(pair)
        sources.add(repair.strip_sentence(text.text))

    for text in debian.sentences(
        records, config.min_length, config.max_length, config.max_alike
    ):
        add(text)
    if config.synopses:
        # They have no full stop and begin in either case: to learn words from, not to
        # be judged by.
        for text in debian.synopses(records, config.min_length, config.max_length):
            is_new = repair.strip_sentence(text.text) not in sources
            if is_new and debian.split_of(text.package) == "train":
                add(text)
    return splits


def _ende(config: ml_collections.ConfigDict, lists: pathlib.Path) -> Splits:
    paths = debian_lists.fetch_lists(lists, ("en", "de"))
    splits: Splits = {name: [] for name in debian.SPLITS}
    for pair in debian.pairs(
        debian_lists.read_lists(paths["en"]),
        debian_lists.read_lists(paths["de"]),
        by_sentence=config.by_sentence,
        max_length=config.max_length,
        max_ratio=config.max_ratio,
    ):
        row = pairs.Pair(pair.source, pair.target)
        splits[debian.split_of(pair.package)].append(row)
    return splits


TASKS = {"repair": _repair, "ende": _ende}
CONFIGS = {"repair": repair_data, "ende": ende_data}


def prepare(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> dict[str, Any]:
    """Writes the data of one task.

    Args:
        config: see `configs/repair_data.py` and `configs/ende_data.py`.
        workdir: receives the files.

    Returns:
        The content of `data.json`: settings, counts of each split, list files and
        versions.

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
    workdir.mkdir(parents=True, exist_ok=True)
    lists = pathlib.Path(config.lists) if config.lists else workdir / "lists"
    splits = TASKS[config.task](config, lists)
    for name, rows in splits.items():
        if not rows:
            raise errors.InputError(
                f"the {name} split of {config.task} is empty: config.min_length or"
                f" config.max_length leaves nothing of the lists in {lists}"
            )
        pairs.save_pairs(workdir / f"{name}.jsonl", rows)
    model = workdir / "spiece.model"
    tokenizer.train_sentencepiece(
        _vocabulary_texts(config.task, splits["train"]),
        config.num_pieces,
        model,
        seed=config.seed,
    )
    pieces = tokenizer.SentencePieceTokenizer.from_file(model)
    record = {
        "settings": config.to_dict(),
        "vocab_size": pieces.vocab_size,
        "splits": {name: _counts(rows, pieces) for name, rows in splits.items()},
        "lists": sorted(path.name for path in lists.glob("*_i18n_Translation-*")),
        "versions": {
            "python": platform.python_version(),
            "sentencepiece": importlib.metadata.version("sentencepiece"),
        },
    }
    command.write_json(workdir / "data.json", record)
    return record


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
    for name, counts in record["splits"].items():
        print(
            f"{name}: " + ", ".join(f"{key} {value}" for key, value in counts.items())
        )


if __name__ == "__main__":
    command.run(main)
