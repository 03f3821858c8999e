"""What ships inside the package is whole, small enough, and of one tokenizer."""

import pathlib
import subprocess

import pytest

from specjax import zoo
from specjax.data import tokenizer as tokenizers
from specjax.drafters import files
from specjax.errors import InputError
from specjax.models import t5_weights

FILES = ("config.json", "model.safetensors", "spiece.model", "README.md")
PAIR_BYTES = 30_000_000
ZOO_BYTES, CHECKOUT_BYTES = 45_000_000, 60_000_000
PAIRS = sorted({name.rpartition("/")[0] for name in zoo.names()})

each_pair = pytest.mark.parametrize("pair", PAIRS or [None])


def folders(pair):
    if pair is None:
        pytest.skip("no pair ships yet")
    return {role: zoo.folder(f"{pair}/{role}") for role in ("target", "draft")}


def test_names_are_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "_FOLDER", tmp_path)
    assert zoo.names() == []
    for name in ("b/target", "b/draft", "a/target"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").touch()
    (tmp_path / "b" / "notes").mkdir()
    assert zoo.names() == ["a/target", "b/draft", "b/target"]
    assert zoo.folder("b/draft") == tmp_path / "b" / "draft"
    for unknown in ("b", "b/notes", "../b/draft", "b/draft/", ""):
        with pytest.raises(InputError, match="a/target, b/draft, b/target") as caught:
            zoo.folder(unknown)
        assert repr(unknown) in str(caught.value)


def test_one_pair_serves_two_tasks():
    for role in ("target", "draft"):
        assert zoo.folder(f"synopsis/{role}") == zoo.folder(f"repair/{role}")
    with pytest.raises(InputError, match="no model 'synopsis/notes' ships here"):
        zoo.folder("synopsis/notes")


def test_all_of_it_is_small():
    root = pathlib.Path(zoo.__file__).parent
    assert sum(path.stat().st_size for path in root.rglob("*")) <= ZOO_BYTES


def test_a_checkout_is_small():
    root = pathlib.Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        pytest.skip("no checkout: an unpacked release")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True
    )
    files = [root / name for name in listed.stdout.split("\0") if name]
    assert len(files) > 100
    assert sum(path.stat().st_size for path in files if path.is_file()) < CHECKOUT_BYTES


@each_pair
def test_a_pair_is_whole_and_small(pair):
    total = 0
    for folder in folders(pair).values():
        for name in FILES:
            assert (folder / name).is_file(), f"{folder.name} has no {name}"
        assert len((folder / "README.md").read_text(encoding="utf-8")) > 200
        total += sum(path.stat().st_size for path in folder.rglob("*"))
    assert total <= PAIR_BYTES


@each_pair
def test_a_pair_loads_and_shares_its_tokenizer(pair):
    loaded = {
        role: (t5_weights.load_t5(folder), tokenizers.load_tokenizer(folder))
        for role, folder in folders(pair).items()
    }
    (target, tokenizer), (draft, other) = loaded["target"], loaded["draft"]
    tokenizers.check_same_tokenizer(tokenizer, other)
    for model in (target, draft):
        assert model.vocab_size >= tokenizer.vocab_size
    config = draft.config
    assert config.num_decoder_layers <= target.config.num_decoder_layers
    assert config.d_model <= target.config.d_model


@each_pair
def test_drafters_are_for_their_target(pair):
    """`load_drafter` refuses one that was made for another target."""
    target, kinds = folders(pair)["target"], []
    for name in zoo.names():
        of, _, role = name.rpartition("/")
        if of != pair or role in ("target", "draft"):
            continue
        header = files.read_header(zoo.folder(name))
        assert header["kind"] == role
        assert header["target"] == t5_weights.fingerprint(target)
        kinds.append(role)
    if pair == "ende":
        assert {"early_exit", "medusa", "parallel", "bigram"} <= set(kinds)


def test_the_package_takes_its_files_along():
    """What is not listed as package data stays behind in a wheel."""
    tomllib = pytest.importorskip("tomllib")
    path = pathlib.Path(__file__).resolve().parent.parent / "pyproject.toml"
    settings = tomllib.loads(path.read_text(encoding="utf-8"))
    listed = settings["tool"]["setuptools"]["package-data"]["specjax"]
    needed = {*FILES, files.DRAFTER_FILE, files.ARRAYS_FILE}
    assert {f"zoo/**/{name}" for name in needed} <= set(listed)
