"""The hub's and sacrebleu's layouts, on tiny copies of them; no network is used."""

import json
import sys

import pytest

from specjax import errors
from specjax.data import hub, pairs

# What `datasets` and its companions warn of on the way is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def datasets(tmp_path, monkeypatch):
    module = pytest.importorskip("datasets", reason="needs the extra `hub`")
    monkeypatch.setattr(module.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(module.config, "HF_HUB_OFFLINE", True)
    return module


def _rows(folder, rows, parquet=None):
    folder.mkdir(parents=True)
    for split in ("train", "validation", "test"):
        path = folder / f"{split}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        if parquet:
            table = parquet.load_dataset("json", data_files=str(path), split="train")
            table.to_parquet(str(folder / f"{split}-00000-of-00001.parquet"))
            path.unlink()
    return str(folder)


WMT = [
    {"translation": {"de": "Wiederaufnahme", "en": "Resumption"}},
    {"translation": {"de": "Ich erkläre", "en": "I declare"}},
]
CNN = [{"article": "LONDON -- One.", "highlights": "One .\nTwo .", "id": "ab"}]
XSUM = [{"document": "The first.\nThe second.", "summary": "Both.", "id": "1"}]


@pytest.mark.parametrize("kind", ["json", "parquet"])
@pytest.mark.parametrize(
    ("rows", "fields", "expected"),
    [
        (WMT, ("translation.en", "translation.de"), ("Resumption", "Wiederaufnahme")),
        (CNN, ("article", "highlights"), ("LONDON -- One.", "One .\nTwo .")),
        (XSUM, ("document", "summary"), ("The first.\nThe second.", "Both.")),
    ],
)
def test_fields_are_mapped(tmp_path, datasets, kind, rows, fields, expected):
    folder = _rows(tmp_path / "set", rows, datasets if kind == "parquet" else None)
    found = list(hub.load_hub(folder, "", "validation", *fields))
    assert len(found) == len(rows) and found[0] == pairs.Pair(*expected)
    assert len(list(hub.load_hub(folder, "", "train[:1]", *fields))) == 1


def test_wrong_fields_and_splits_are_named(tmp_path, datasets):
    folder = _rows(tmp_path / "set", WMT)
    for fields in (
        ("translation.en", "target"),
        ("translation", "translation.de"),
        ("translation.en.x", "translation.de"),
    ):
        with pytest.raises(errors.InputError, match="row 0 .* has no text under"):
            list(hub.load_hub(folder, "", "train", *fields))
    with pytest.raises(errors.InputError, match="split 'dev' of the data set .*cannot"):
        list(hub.load_hub(folder, "", "dev", "translation.en", "translation.de"))
    with pytest.raises(errors.InputError, match="'no/such' x cannot be loaded"):
        list(hub.load_hub("no/such", "x", "train", "a", "b"))


def test_a_missing_package_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(errors.InputError, match="not installed: .* extra hub"):
        list(hub.load_hub("wmt/wmt14", "de-en", "train", "a", "b"))
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(errors.InputError, match="not installed: .* extra data"):
        hub.load_test_set("wmt14/full", "en-de")


@pytest.fixture
def test_sets(tmp_path, monkeypatch):
    """An empty folder of newstest2014, where nothing can be downloaded."""
    pytest.importorskip("sacrebleu", reason="needs the extra `data`")
    from sacrebleu.dataset import DATASETS

    folder = tmp_path / "wmt14" / "full"
    folder.mkdir(parents=True)
    known = DATASETS["wmt14/full"]
    monkeypatch.setattr(known, "_outdir", str(folder))
    monkeypatch.setattr(known, "_rawdir", str(folder / "raw"))
    monkeypatch.setattr(known, "data", ["file:///nowhere/test-full.tgz"])
    return folder


def _segments(folder, kind, language, lines):
    path = folder / "raw" / "test-full" / f"newstest2014-deen-{kind}.{language}.sgm"
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(f'<seg id="{i}">{x}</seg>' for i, x in enumerate(lines, 1))
    path.write_text(f'<doc docid="a">\n{body}\n</doc>\n', encoding="utf-8")


def test_a_test_set_is_read_as_sacrebleu_unpacks_it(test_sets, monkeypatch):
    from sacrebleu.dataset import DATASETS

    _segments(test_sets, "src", "en", ["Gutach: More safety", "They\u2028 stop"])
    _segments(test_sets, "ref", "de", ["Gutach: Noch mehr Sicherheit", "Sie halten"])
    monkeypatch.setattr(DATASETS["wmt14/full"], "maybe_download", lambda: None)
    assert hub.load_test_set("wmt14/full", "en-de") == [
        pairs.Pair("Gutach: More safety", "Gutach: Noch mehr Sicherheit"),
        pairs.Pair("They stop", "Sie halten"),
    ]
    (test_sets / "wmt14_full.en-de.ref").write_text("one line\n", encoding="utf-8")
    with pytest.raises(errors.InputError, match="has 2 lines and .* 1: delete both"):
        hub.load_test_set("wmt14/full", "en-de")


def test_a_test_set_that_cannot_be_had_is_one_sentence(test_sets):
    with pytest.raises(errors.InputError, match="wmt14/full en-de cannot be downl"):
        hub.load_test_set("wmt14/full", "en-de")
    with pytest.raises(errors.InputError, match="knows no test set 'wmt99'"):
        hub.load_test_set("wmt99", "en-de")
    with pytest.raises(errors.InputError, match="has no 'en-xx', but .*en-de"):
        hub.load_test_set("wmt14/full", "en-xx")
