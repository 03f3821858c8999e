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

from configs import (
    demo,
    ende_draft,
    ende_short,
    ende_target,
    repair_draft,
    repair_target,
)
from experiments import train, train_settings
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
    config.model.vocab_size = 100
    with pytest.raises(errors.InputError, match="has 205 ids"):
        train._load_data(config, print)
    config = tiny_config(folder)
    config.model.pad_id = 3
    with pytest.raises(errors.InputError, match=r"config.model.pad_id is 3"):
        train._load_data(config, print)


SETTINGS = {
    "init": ("mimetik", "config.init is 'mimetik'"),
    "data.folder": ("nowhere", "config.data.folder is 'nowhere'"),
    "data.validation_rows": (0, "config.data.validation_rows is 0: at least 1"),
    "data.buckets": ((32, 16), r"length buckets \[32, 16\] are wrong"),
    "export.dtype": ("int8", "config.export.dtype is 'int8'"),
    "log_every": (0, "config.log_every is 0"),
    "checkpoint_every": (0, "config.checkpoint_every is 0"),
    "keep": (0, "config.keep is 0"),
    "seed": (-1, "config.seed is -1"),
    "label_smoothing": (3.0, "config.label_smoothing is 3.0"),
    "optimizer.learning_rate": (-1.0, "config.optimizer.learning_rate is -1.0"),
    "optimizer.schedule": ("linear", "the schedule 'linear' is unknown"),
    "optimizer.clip": (0.0, "config.optimizer.clip is 0.0: above 0"),
    "optimizer.b2": (1.0, "config.optimizer.b2 is 1.0: below 1"),
    "optimizer.steps": (0, "config.optimizer.steps is 0"),
    "optimizer.momentum": (0.9, "config.optimizer has no setting momentum"),
    "model.depth": (3, "config.model has no setting depth"),
    "distill.name": ("kl", "config.distill.name is 'kl'"),
    "distill.draft_temperature": (0.0, "config.distill.draft_temperature is 0.0"),
    "distill.target": ("nowhere", "config.distill.target is 'nowhere': no such"),
    "epochs": (3, "--config has a setting epochs that this command does not know"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings_end_before_any_work(folder, tmp_path, name):
    value, message = SETTINGS[name]
    config = tiny_config(folder)
    with config.unlocked():
        *path, last = name.split(".")
        place = config[path[0]] if path else config
        place[last] = value
    workdir = tmp_path / "new"
    with pytest.raises(errors.InputError, match=message):
        train.train(config, workdir, show=lambda line: None)
    assert not workdir.exists()


def test_a_config_of_another_command(tmp_path):
    with pytest.raises(errors.InputError, match="--config has no setting"):
        train.train(demo.get_config(), tmp_path)


def test_what_is_not_finite_is_never_saved(folder, tmp_path, monkeypatch):
    config = tiny_config(folder)
    config.update(log_every=100, checkpoint_every=2, evaluate_every=100)
    take = train.step.train_step

    def spoilt(state, *arguments, **settings):
        state, metrics = take(state, *arguments, **settings)
        if int(state.step) == 4:
            metrics["grad_norm"] = jax.numpy.float32("nan")
        return state, metrics

    monkeypatch.setattr(train.step, "train_step", spoilt)
    with pytest.raises(errors.InputError, match="grad_norm is nan at step 4"):
        train.train(config, tmp_path, show=lambda line: None)
    assert checkpoints.steps(tmp_path / "checkpoints") == [2]


def test_speed_counts_steps_alone(folder, tmp_path, monkeypatch):
    """Also where steps are logged, scored and saved at different times."""
    config = tiny_config(folder)
    config.update(log_every=4, evaluate_every=3, checkpoint_every=3)
    config.optimizer.update(steps=8)
    clock = [0.0]
    monkeypatch.setattr(train.time, "monotonic", lambda: clock[0])
    take, score, save = train.step.train_step, train.evaluate, checkpoints.save

    def after(seconds, function):
        def call(*arguments, **settings):
            clock[0] += seconds
            return function(*arguments, **settings)

        return call

    monkeypatch.setattr(train.step, "train_step", after(2.0, take))
    monkeypatch.setattr(train, "evaluate", after(100.0, score))
    monkeypatch.setattr(checkpoints, "save", after(1000.0, save))
    train.train(config, tmp_path, show=lambda line: None)
    lines = map(json.loads, (tmp_path / "train.jsonl").read_text().splitlines())
    speeds = [line["seconds_per_step"] for line in lines if "loss" in line]
    assert speeds == [2.0, 2.0]


@pytest.mark.slow
def test_distillation_raises_alpha(folder, tmp_path):
    """And the cross entropy alone, for as many steps, raises it less."""
    config = tiny_config(folder)
    config.optimizer.update(steps=40, decay_steps=20, learning_rate=1e-2)
    config.update(log_every=40, evaluate_every=40, checkpoint_every=40)
    train.train(config, tmp_path / "target", show=lambda line: None)

    config.model.dropout_rate = 0.0
    config.update(seed=1, evaluate_every=10)
    config.optimizer.steps = 20
    config.distill.target = str(tmp_path / "target" / "export")
    alphas = {}
    for name in ("forward_kl", "total_variation"):
        config.distill.name = name
        train.train(config, tmp_path / name, show=lambda line: None)
        lines = map(
            json.loads, (tmp_path / name / "train.jsonl").read_text().split("\n")[:-1]
        )
        scores = [line for line in lines if "validation_alpha" in line]
        first, last = scores[0], scores[-1]
        assert 0 < first["validation_alpha"] < last["validation_alpha"] < 1
        assert last["validation_divergence"] < first["validation_divergence"]
        alphas[name] = last["validation_alpha"]
    gap = scores[-1]["validation_divergence"] + alphas["total_variation"]
    assert gap == pytest.approx(1.0, abs=1e-3)

    config.distill.target, config.data.folder = str(folder), str(folder)
    with pytest.raises(errors.InputError, match="has no config.json"):
        train.train(config, tmp_path / "new", show=lambda line: None)


def test_an_empty_target_is_counted(folder, tmp_path):
    config = tiny_config(folder)
    rows = [pairs.Pair("ab cde", "ab"), pairs.Pair("fgh", "")]
    pairs.save_pairs(tmp_path / "some.jsonl", rows)
    config.data.train = str(tmp_path / "some.jsonl")
    said = []
    assert train._load_data(config, said.append).train[1][1] == [1]
    assert any("1 of 2 examples have an empty target" in line for line in said)


@pytest.mark.parametrize(
    "module", [repair_target, repair_draft, ende_short, ende_target, ende_draft]
)
def test_shipped_configs_make_records(module):
    config = module.get_config().lock()
    assert train_settings.model_config(config).vocab_size in (4096, 8000)
    assert train_settings.optimizer_config(config).steps >= 600


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
