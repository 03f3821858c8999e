"""The command that makes a task's data, on lists of a hundred made-up packages."""

import json
import random
import sys

import pytest

from configs import ende_data, repair_data
from experiments import command, prepare
from specjax import errors
from specjax.data import pairs, tokenizer

# ml_collections loads config files with a method that Python is about to remove.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")

NOUNS = "reader writer parser server client driver daemon editor viewer player".split()
VERBS = "opens closes reads writes shows hides sends parses prints saves".split()
MORE = "files pages mails images tables songs frames packets tokens names".split()
GERMAN = {"The": "Der", "it": "er", "and": "und", "also": "auch"}


def _body(rng: random.Random) -> list[str]:
    return [
        f"The {rng.choice(NOUNS)} {rng.choice(VERBS)} {rng.choice(MORE)}, and it also"
        f" {rng.choice(VERBS)} {rng.choice(MORE)} of {rng.choice(NOUNS)} {number}."
        for number in rng.sample(range(1000), 3)
    ]


def _german(text: str) -> str:
    return " ".join(GERMAN.get(word, word) for word in text.split())


@pytest.fixture(scope="module")
def lists(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lists")
    rng = random.Random(0)
    english, german = [], []
    for i in range(120):
        head = f"Package: {rng.choice(NOUNS)}{i}x\nDescription-md5: {i}\n"
        body = _body(rng)
        name = f"{rng.choice(NOUNS)} of {rng.choice(MORE)} number {i}"
        english.append(f"{head}Description-en: {name}\n {' '.join(body)}\n")
        body = [_german(text) for text in body]
        german.append(f"{head}Description-de: Programm {i}\n {' '.join(body)}\n")
    for language, records in (("en", english), ("de", german)):
        path = folder / f"x_i18n_Translation-{language}"
        path.write_text("\n".join(records), encoding="utf-8")
    return folder


def _read(folder):
    return {
        name: pairs.load_pairs(folder / f"{name}.jsonl")
        for name in ("train", "validation", "test")
    }


def _run(lists, folder, module, *settings):
    arguments = ["prepare", f"--config={module.__file__}", f"--workdir={folder}"]
    arguments += [f"--config.lists={lists}", *settings]
    # The flags of a config file are found in sys.argv alone.
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as caught:
        patch.setattr(sys, "argv", arguments)
        command.run(prepare.main)
    return caught.value.code


def test_repair(lists, tmp_path, capsys):
    small = ("--config.num_pieces=150", "-f", "kernel.json")
    assert _run(lists, tmp_path, repair_data, *small) == 0
    splits = _read(tmp_path)
    record = json.loads((tmp_path / "data.json").read_text())
    printed = capsys.readouterr().out
    for name, rows in splits.items():
        assert record["splits"][name]["examples"] == len(rows) > 0
        assert f"{name}: examples {len(rows)}" in printed
        assert all(row.source == row.source.lower() for row in rows)
    assert all(row.target.endswith(".") for row in splits["test"])
    assert any(not row.target.endswith(".") for row in splits["train"])
    assert not {r.target for r in splits["test"]} & {r.target for r in splits["train"]}
    assert tokenizer.load_tokenizer(tmp_path).vocab_size == record["vocab_size"] == 250
    again = tmp_path / "again"
    assert _run(lists, again, repair_data, *small) == 0
    for name in ("train.jsonl", "test.jsonl", "spiece.model"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes()


def test_ende(lists, tmp_path):
    assert _run(lists, tmp_path, ende_data, "--config.num_pieces=150") == 0
    splits = _read(tmp_path)
    assert sum(len(rows) for rows in splits.values()) > 350
    for row in splits["validation"]:
        assert row.target == _german(row.source) or row.target.startswith("Programm")
    sources = [row.source for rows in splits.values() for row in rows]
    assert len(set(sources)) == len(sources)


def test_wrong_settings_end_in_a_sentence(lists, tmp_path, capsys):
    assert _run(lists, tmp_path, repair_data, "--config.task=none") == 2
    assert "known are ende, repair" in capsys.readouterr().err
    assert _run(lists, tmp_path, repair_data, "--config.min_length=139") == 2
    assert "split of repair is empty" in capsys.readouterr().err


def test_prepare_is_a_function(lists, tmp_path):
    config = repair_data.get_config()
    config.lists, config.num_pieces = str(lists), 5000
    with pytest.raises(errors.InputError, match="5000 pieces"):
        prepare.prepare(config, tmp_path)
