"""`experiments.train` from data to export, and after a kill as if it had not been."""

import json
import pathlib
import random
import signal
import subprocess
import sys

import jax
import ml_collections
import numpy as np
import pytest

from configs import ende_draft, ende_target, repair_draft, repair_target
from experiments import train
from specjax import checkpoints, errors
from specjax.data import pairs, tokenizer
from specjax.models import t5_weights

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = "ab cde fgh ijk lmn opq rst uvw xyz The A Of".split()

KILLED = """
import json, os, pathlib, signal, sys
import ml_collections
from experiments import train
from specjax import checkpoints

save = checkpoints.save

def save_or_die(directory, step, *args, **kwargs):
    if step == 6:
        os.kill(os.getpid(), signal.SIGKILL)
    save(directory, step, *args, **kwargs)

checkpoints.save = save_or_die
config = ml_collections.ConfigDict(json.loads(sys.argv[1]))
train.train(config, pathlib.Path(sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax raises a float to an integer power."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    """Forty pairs: lower case to the words as they are."""
    folder = tmp_path_factory.mktemp("data")
    shuffled = random.Random(0)
    texts = [" ".join(shuffled.choices(WORDS, k=4)) for _ in range(40)]
    rows = [pairs.Pair(text.lower(), text) for text in texts]
    pairs.save_pairs(folder / "train.jsonl", rows[:32])
    pairs.save_pairs(folder / "validation.jsonl", rows[32:])
    tokenizer.train_sentencepiece(texts, 105, folder / "spiece.model")
    return folder


def tiny_config(folder: pathlib.Path) -> ml_collections.ConfigDict:
    config = repair_target.get_config()
    config.update(log_every=1, evaluate_every=4, checkpoint_every=2)
    config.model.update(
        vocab_size=205, d_model=16, d_kv=4, num_heads=4, d_ff=16, dropout_rate=0.1
    )
    config.model.update(num_encoder_layers=1, num_decoder_layers=1)
    config.optimizer.update(steps=8, warmup_steps=2, decay_steps=4)
    config.data.update(folder=str(folder), buckets=(32,), tokens_per_batch=256)
    config.data.validation_rows = 6
    return config


def losses(workdir: pathlib.Path) -> list[tuple[int, float]]:
    lines = (workdir / "train.jsonl").read_text().splitlines()
    found = map(json.loads, lines)
    return [(line["step"], line["loss"]) for line in found if "loss" in line]


def test_from_data_to_export(folder, tmp_path):
    config = tiny_config(folder)
    state = train.train(config, tmp_path, show=lambda line: None)
    assert [number for number, _ in losses(tmp_path)] == list(range(1, 9))
    # 32 rows make 4 batches of 8: two epochs.
    assert (int(state.epoch), int(state.index)) == (2, 0)
    assert checkpoints.steps(tmp_path / "checkpoints") == [4, 6, 8]
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["step"] == 8 and metrics["validation_nll"] > 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["config"]["optimizer"]["steps"] == 8

    exported = t5_weights.load_t5(tmp_path / "export")
    for ours, theirs in zip(
        *map(jax.tree.leaves, (state.model, exported)), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-6)
    assert tokenizer.load_tokenizer(tmp_path / "export").vocab_size == 205

    # Done: nothing more happens, and the newest checkpoint is exported as it is.
    (tmp_path / "export" / "model.safetensors").unlink()
    assert train.export_newest(config, tmp_path) == 8
    assert (tmp_path / "export" / "model.safetensors").is_file()

    # A start from an exported model.
    config.init = str(tmp_path / "export")
    start = train.initial_state(config, [])
    np.testing.assert_array_equal(start.model.embedding[...], exported.embedding[...])
    assert start.model.config.dropout_rate == 0.1


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(folder, tmp_path):
    config = tiny_config(folder)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = train.train(config, whole, show=lambda line: None)

    child = subprocess.run(
        [sys.executable, "-c", KILLED, json.dumps(config.to_dict()), str(broken)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    assert checkpoints.steps(broken / "checkpoints") == [2, 4]
    assert losses(broken)[-1][0] == 6

    said = []
    state = train.train(config, broken, show=said.append)
    assert said[0] == "resumed at step 4 of 8"
    assert losses(broken) == losses(whole)
    pure = map(checkpoints.to_pure_dict, (state, expected))
    for ours, theirs in zip(*map(jax.tree.leaves, pure), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_another_run_in_the_folder_is_refused(folder, tmp_path):
    config = tiny_config(folder)
    state = train.initial_state(config, [])
    checkpoints.save(tmp_path / "checkpoints", 1, state, config.to_dict())
    config.seed = 5
    with pytest.raises(errors.InputError, match=r"config.seed = 0, not 5"):
        train.train(config, tmp_path, show=lambda line: None)


def test_long_examples_stay_out_aloud(folder):
    config = tiny_config(folder)
    config.data.max_tokens = 14
    said = []
    data = train._load_data(config, said.append)
    assert 0 < len(data.train) < 32
    assert f"{32 - len(data.train)} of 32 examples are longer" in "".join(said)


def test_a_cut_target_has_no_end(folder, tmp_path):
    config = tiny_config(folder)
    rows = [pairs.Pair("ab cde", "ab The", finished) for finished in (True, False)]
    pairs.save_pairs(tmp_path / "cut.jsonl", rows)
    config.data.train = str(tmp_path / "cut.jsonl")
    (_, whole), (_, cut) = train._load_data(config, print).train
    assert whole == [*cut, 1] and 1 not in cut


def test_dictionary_reads_the_training_pairs(folder):
    """A piece of the targets alone starts away from where it starts without pairs."""
    config = tiny_config(folder)
    examples = train._load_data(config, print).train
    without = train.initial_state(config, examples).model.embedding[...]
    config.init = "dictionary"
    start = train.initial_state(config, examples).model
    moved = np.abs(np.asarray(start.embedding[...] - without)).max(axis=1) > 0.1
    sources, targets = (set().union(*side) for side in zip(*examples, strict=True))
    assert moved[list(targets - sources)].all() and targets - sources
    unseen = list(set(range(205)) - sources - targets)
    assert not moved[unseen].any()
    # What a checkpoint is restored into needs no data.
    template = train._template(config).model
    assert jax.tree.structure(template) == jax.tree.structure(start)


def test_bad_settings_are_named(folder):
    config = tiny_config(folder)
    config.init = "mimetik"
    with pytest.raises(errors.InputError, match="'mimetik'"):
        train.initial_state(config, [])
    config = tiny_config(folder)
    config.model.vocab_size = 100
    with pytest.raises(errors.InputError, match="has 205 ids"):
        train._load_data(config, print)
    config.data.folder = "nowhere"
    with pytest.raises(errors.InputError, match=r"config.data.folder is 'nowhere'"):
        train._load_data(config, print)


@pytest.mark.parametrize(
    "module", [repair_target, repair_draft, ende_target, ende_draft]
)
def test_shipped_configs_make_records(module):
    config = module.get_config().lock()
    assert train.model_config(config).vocab_size in (4096, 8000)
    assert train.optimizer_config(config).steps > 1000


def test_command_line_in_a_notebook(tmp_path):
    command = [sys.executable, "-m", "experiments.train", "-f", "kernel.json"]
    settings = ["--config=configs/repair_draft.py", f"--workdir={tmp_path}"]
    child = subprocess.run(
        [*command, *settings, "--config.data.folder=nowhere"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 2, child.stderr
    assert "error: config.data.folder is 'nowhere'" in child.stderr
