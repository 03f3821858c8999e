"""The command that makes a task's data, on lists of a hundred made-up packages."""

import json
import random
import sys

import pytest

from configs import (
    cnn_dailymail_data,
    ende_data,
    files_data,
    repair_data,
    synopsis_data,
    wmt_data,
    xsum_data,
)
from experiments import command, prepare
from specjax import errors
from specjax.data import debian, debian_lists, hub, pairs, tokenizer
from tests.data.test_catalogues import compiled

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
    arguments += [f"--config.lists={lists}"] * (lists is not None)
    arguments += settings
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
    assert "known are ende, files, hub, repair, synopsis" in capsys.readouterr().err
    assert _run(lists, tmp_path, repair_data, "--config.min_length=139") == 2
    assert "split of repair is empty" in capsys.readouterr().err


def test_prepare_is_a_function(lists, tmp_path):
    config = repair_data.get_config()
    config.lists, config.num_pieces = str(lists), 5000
    with pytest.raises(errors.InputError, match="5000 pieces"):
        prepare.prepare(config, tmp_path)


def test_repair_has_copies_in_the_training_split_alone(lists, tmp_path):
    config = repair_data.get_config()
    config.lists, config.num_pieces = str(lists), 150
    once = prepare.prepare(config, tmp_path)
    first = _read(tmp_path)
    config.copies, config.prefix = 3, "repair: "
    thrice = prepare.prepare(config, tmp_path)
    splits = _read(tmp_path)
    size = len(first["train"])
    assert len(splits["train"]) == 3 * size and len(set(splits["train"])) > 2 * size
    assert [row.target for row in splits["train"]] == 3 * [
        row.target for row in first["train"]
    ]
    assert [row.source for row in splits["train"][:size]] == [
        f"repair: {row.source}" for row in first["train"]
    ]
    assert len(splits["test"]) == len(first["test"])
    same = thrice["decisions"]["train"]["copies_with_the_same_typos"]
    assert same == 3 * size - len(set(splits["train"])) > 0
    assert once["decisions"]["train"]["copies_with_the_same_typos"] == 0
    config.copies = 0
    with pytest.raises(errors.InputError, match="config.copies is 0"):
        prepare.prepare(config, tmp_path)


def test_ende_learns_from_catalogues_too(lists, tmp_path, capsys):
    place = tmp_path / "more" / "de" / "LC_MESSAGES"
    place.mkdir(parents=True)
    known = debian_lists.read_lists(debian_lists.fetch_lists(lists)["en"])[0].synopsis
    given = {"_Open it": "Öffne _es", known: "Schon bekannt", "%s": "%s!"}
    (place / "app.mo").write_bytes(compiled(given))
    small = ("--config.num_pieces=150", f"--config.catalogues={tmp_path / 'more'}")
    assert _run(lists, tmp_path, ende_data, *small) == 0
    splits = _read(tmp_path)
    assert splits["train"][-1] == pairs.Pair("Open it", "Öffne es")
    assert all(row.target != "Schon bekannt" for row in splits["train"])
    assert "decided on catalogues: messages 3, " in capsys.readouterr().out
    found = json.loads((tmp_path / "data.json").read_text())["decisions"]["catalogues"]
    assert found["left_out_in_descriptions"] == found["pairs"] == 1
    assert found["left_out_format"] == 1


def test_synopsis(lists, tmp_path):
    assert _run(lists, tmp_path, synopsis_data, "--config.num_pieces=150") == 0
    splits = _read(tmp_path)
    record = json.loads((tmp_path / "data.json").read_text())
    assert record["decisions"]["descriptions"]["records"] == 120
    for name, rows in splits.items():
        assert rows and all(row.source.startswith("summarize: The ") for row in rows)
        shared = record["splits"][name].get("sources_also_in_train", 0)
        assert shared == 0


def _files(folder, **contents):
    for name, content in contents.items():
        (folder / name.replace("_", ".")).write_bytes(content)
    return [
        f"--config.train={folder}/train*",
        f"--config.validation={folder}/held.tsv",
        f"--config.test={folder}/held.tsv",
        "--config.num_pieces=110",
    ]


def test_files(tmp_path, capsys):
    many = "".join(f"word {i} of it\tWord {i}.\n" for i in range(60)).encode()
    given = _files(
        tmp_path,
        train1_jsonl=b'{"source": "once again", "target": "Once again."}\n',
        train2_tsv=many,
        held_tsv=b"word 1 of it\tWord 1.\nnew\tNew.\nmuch too long\tLong.\n",
    )
    out = tmp_path / "out"
    given += ["--config.max_source=12", "--config.prefix=fix: "]
    assert _run(None, out, files_data, *given) == 0
    splits = _read(out)
    assert splits["train"][0] == pairs.Pair("fix: once again", "Once again.")
    assert len(splits["train"]) == 11 and len(splits["test"]) == 2
    printed = capsys.readouterr().out
    assert "decided on train: left_out_long_source 50" in printed
    assert "sources_also_in_train 1" in printed
    # Held-out texts, whatever their dress, are not learnt from where that is asked for.
    apart = [*given, "--config.apart", f"--config.tokenizer={out}"]
    assert _run(None, tmp_path / "apart", files_data, *apart) == 0
    kept = _read(tmp_path / "apart")
    left_out = [row for row in splits["train"] if row.target == "Word 1."]
    assert len(left_out) == 1
    assert kept["train"] == [row for row in splits["train"] if row not in left_out]
    assert kept["test"] == splits["test"]
    assert "left_out_held_out 1" in capsys.readouterr().out
    # The tokenizer of that run, for data with a header and other names.
    (tmp_path / "h.tsv").write_text("n\ta\tb\n1\told\tOld.\n")
    again = tmp_path / "again"
    (again).mkdir()
    (again / "tokenizer_config.json").write_text("left by another run")
    (tmp_path / "t[1].tsv").write_text("n\ta\tb\n1\tolder\tOlder.\n")
    files = dict.fromkeys(debian.SPLITS, "h.tsv") | {"train": "t[1].tsv"}
    named = [f"--config.{name}={tmp_path}/{file}" for name, file in files.items()]
    named += ["--config.header", "--config.source_key=a", "--config.target_key=b"]
    for source in (out, out / "spiece.model"):
        assert (
            _run(None, again, files_data, *named, f"--config.tokenizer={source}") == 0
        )
        model = (again / "spiece.model").read_bytes()
        assert model == (out / "spiece.model").read_bytes()
        assert sorted(path.name for path in again.glob("*token*")) == []
    assert _read(again)["test"] == [pairs.Pair("old", "Old.")]
    # Named twice, by itself and by a pattern, a file counts once.
    twice = (
        f"--config.train={tmp_path}/t[1].tsv,{tmp_path}/t*.tsv,{tmp_path}/t[[]1].tsv"
    )
    source = f"--config.tokenizer={out}"
    run = [*named[1:], "--config.header", "--config.source_key=a", source]
    (tmp_path / "train2.tsv").unlink()
    run += ["--config.target_key=b", twice]
    assert _run(None, tmp_path / "twice", files_data, *run) == 0
    assert len(_read(tmp_path / "twice")["train"]) == 1
    shared = f"--config.train={tmp_path}/*.tsv"
    assert _run(None, tmp_path / "shared", files_data, *run, shared) == 2
    assert "config.train and config.validation both name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (b"a\tb\nno tab\n", "train.tsv, line 2 has 1 tab-separated columns"),
        (b"", "train.tsv is empty"),
        (b"a\tb\n\xff\tc\n", "train.tsv, line 2 is not UTF-8"),
    ],
)
def test_a_wrong_file_is_named(tmp_path, capsys, train, message):
    given = _files(tmp_path, train_tsv=train, held_tsv=b"a\tb\n")
    assert _run(None, tmp_path / "out", files_data, *given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out" / "train.jsonl").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train=", "config.train is empty: name .tsv or"),
        ("test=none.tsv", "config.test names 'none.tsv': no such file"),
        ("tokenizer=none", "config.tokenizer is 'none': neither a file nor a folder"),
        ("tokenizer=zoo/none", "no model 'none' ships here"),
        ("prefxi=a", "the config has no --config.prefxi"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, capsys, setting, message):
    given = _files(tmp_path, train_tsv=b"a\tb\n", held_tsv=b"a\tb\n")
    assert _run(None, tmp_path / "out", files_data, *given, f"--config.{setting}") == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("module", [wmt_data, cnn_dailymail_data, xsum_data])
def test_the_papers_tasks_map_fields_and_add_prefixes(tmp_path, monkeypatch, module):
    asked = []

    def load_hub(dataset, name, split, source, target, *, revision):
        asked.append((dataset, name, split, source, target, revision))
        number = int(split[:-1].rpartition(":")[2])
        return (pairs.Pair(f"Text {i}. " * 400, f"Short {i}.") for i in range(number))

    monkeypatch.setattr(hub, "load_hub", load_hub)
    monkeypatch.setattr(
        hub, "load_test_set", lambda *names: [pairs.Pair("Test.", str(names))]
    )
    config = module.get_config()
    config.num_pieces, config.limit = 110, 30
    record = prepare.prepare(config, tmp_path)
    splits = _read(tmp_path)
    assert asked[0][2] == "train[:30]" and len(splits["train"]) == 30
    for rows in splits.values():
        assert all(row.source.startswith(config.prefix) for row in rows)
    if module is wmt_data:
        assert splits["test"][0].target == "('wmt14/full', 'en-de')"
        assert len(splits["train"][0].source) > 3000 and len(asked) == 2
        assert asked[0][3:5] == ("translation.en", "translation.de")
    else:
        assert record["decisions"]["train"] == {"shortened": 30} and len(asked) == 3
        assert 1900 < len(splits["train"][0].source) <= 2000 + len(config.prefix)
    assert record["settings"]["metrics"]
