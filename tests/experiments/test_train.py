"""`experiments.train` from data to export: settings, scores, speed, what is kept."""

import dataclasses
import functools
import json
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import (
    demo,
    ende_draft,
    ende_short,
    ende_target,
    english_draft,
    english_target,
    repair_draft,
    repair_target,
)
from experiments import train, train_data, train_settings, train_state
from specjax import checkpoints, errors, zoo
from specjax.data import tokenizer
from specjax.models import t5_weights
from specjax.training import step
from tests import pairs
from tests.tiny_run import lines, losses, tiny_config

pytestmark = pytest.mark.usefixtures("standard_promotion")


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
    card = (tmp_path / "export" / "README.md").read_text()
    assert "8 steps" in card and f"| {metrics['validation_nll']:.4g} |" in card
    assert "![loss" in card and (tmp_path / "export" / "curves.svg").is_file()

    # Done: nothing more happens, and the newest checkpoint is exported as it is.
    (tmp_path / "export" / "model.safetensors").unlink()
    assert train.export_saved(config, tmp_path) == 8
    assert (tmp_path / "export" / "model.safetensors").is_file()

    # A start from an exported model.
    config.init = str(tmp_path / "export")
    start = train_state.initial_state(config, [])
    np.testing.assert_array_equal(start.model.embedding[...], exported.embedding[...])
    assert start.model.config.dropout_rate == 0.1


def test_the_best_is_kept_and_exported(folder, tmp_path, monkeypatch):
    """Step 4 by the scores that it is given here, and none that is newer."""
    config = tiny_config(folder)
    config.update(keep=1, best="exact_match")
    config.export.which = "best"
    config.export.dtype = "float32"
    scores = iter([0.7, 0.3])
    models = []

    def evaluate(model, *others):
        models.append(jax.tree.map(np.array, model))
        return {"exact_match": next(scores)}

    monkeypatch.setattr(train, "evaluate", evaluate)
    said: list[str] = []
    train.train(config, tmp_path, show=said.append)
    assert checkpoints.steps(tmp_path / "checkpoints") == [4, 8]
    assert said[-1].startswith("exported step 4 to")

    def assert_exported(model):
        exported = t5_weights.load_t5(tmp_path / "export")
        for leaves in zip(*map(jax.tree.leaves, (model, exported)), strict=True):
            np.testing.assert_array_equal(*leaves)

    assert_exported(models[0])
    config.export.which = "last"
    assert train.export_saved(config, tmp_path) == 8
    assert_exported(models[1])
    config.export.which, config.best = "best", "validation_nll"
    with pytest.raises(errors.InputError, match="was saved with validation_nll"):
        train.export_saved(config, tmp_path)


def test_decodes_are_scored(folder):
    """Against what greedy decoding is: the argmax of a pass over each prefix."""
    config = tiny_config(folder)
    config.evaluate.scores = ("exact_match", "character_error_rate")
    # Untrained mimetic weights would end every text at once.
    config.init = "random"
    data = train_data.load_data(config, print)
    # Sharper than at random, so that no two logits are near each other.
    model = train_state.initial_state(config, data.train).model
    model.head[...] = 5.0 * model.head[...]
    own = config.evaluate
    texts = []
    forward = jax.jit(step.teacher_forced)
    for source in data.sources[: own.rows]:
        written: list[int] = []
        for _ in range(own.max_length - 1):
            fed = written + [0] * (own.max_length - len(written))
            batch = step.Batch(
                inputs=jnp.array([source + [0] * (32 - len(source))]),
                inputs_mask=jnp.arange(32)[None] < len(source),
                targets=jnp.array([fed]),
                targets_mask=jnp.ones((1, len(fed)), bool),
            )
            written.append(int(forward(model, batch)[0, len(written)].argmax()))
            if written[-1] == 1:
                break
        texts.append(data.pieces.decode([token for token in written if token != 1]))
    assert len(set(texts)) == 3 and min(map(len, texts)) > 0

    data.references[:3] = texts
    scores = train.decode_scores(config, model, data)
    assert scores == {"decoded_exact_match": 1.0, "decoded_character_error_rate": 0.0}
    data.references[0] += "!"
    scores = train.decode_scores(config, model, data)
    assert scores["decoded_exact_match"] == pytest.approx(2 / 3)
    assert scores["decoded_character_error_rate"] == 1 / sum(map(len, [*texts, "!"]))


@pytest.mark.slow
def test_all_that_can_be_asked_for_is_logged(folder, tmp_path):
    config = tiny_config(folder)
    config.update(decode_every=3, measure_peak=True, tensorboard=True, z_loss=1e-4)
    config.update(accumulate=2, best="decoded_chrf", log_every=8, keep=9)
    config.evaluate.scores = ("bleu", "chrf", "rouge1", "rouge_l")
    train.train(config, tmp_path, show=lambda line: None)
    found = lines(tmp_path)
    # A line of steps at every checkpoint, and one of scores where there are any.
    assert [own["step"] for own in found] == [2, 3, 3, 4, 4, 6, 6, 8, 8]
    _, _, decoded, _, forced, *_, steps, both = found
    names = {f"decoded_{name}" for name in config.evaluate.scores}
    assert set(decoded) == {"step", *names}
    assert set(forced) == {"step", "validation_nll", "token_accuracy", "exact_match"}
    # At the end everything is scored.
    assert set(both) == set(decoded) | set(forced)
    assert json.loads((tmp_path / "metrics.json").read_text()) == both
    assert 0 < steps["matmul_share"] < 1 and steps["z_loss"] > 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["effective"]["matmul_flops_per_second"] > 1e8
    assert manifest["effective"]["train_rows"] == 32
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    # Every second step is saved, and wherever there are scores.
    assert checkpoints.steps(tmp_path / "checkpoints") == [2, 3, 4, 6, 8]


def test_dictionary_reads_the_training_pairs(folder):
    """A piece of the targets alone starts away from where it starts without pairs."""
    config = tiny_config(folder)
    examples = train_data.load_data(config, print).train
    without = train_state.initial_state(config, examples).model.embedding[...]
    config.init = "dictionary"
    start = train_state.initial_state(config, examples).model
    moved = np.abs(np.asarray(start.embedding[...] - without)).max(axis=1) > 0.1
    sources, targets = (set().union(*side) for side in zip(*examples, strict=True))
    assert moved[list(targets - sources)].all() and targets - sources
    unseen = list(set(range(205)) - sources - targets)
    assert not moved[unseen].any()
    # What a checkpoint is restored into needs no data.
    template = train_state.template(config).model
    assert jax.tree.structure(template) == jax.tree.structure(start)


def test_a_start_from_a_model_that_ships(folder, tmp_path):
    """By its name, as a target is named."""
    config = tiny_config(tmp_path)
    config.init = "zoo/repair/draft"
    ships = zoo.folder("repair/draft")
    draft = t5_weights.load_t5(ships)
    with config.unlocked():
        config.model = dataclasses.asdict(draft.config) | {"dropout_rate": 0.2}
    for path in (ships / "spiece.model", folder / "train.jsonl"):
        shutil.copy(path, tmp_path)
    shutil.copy(folder / "validation.jsonl", tmp_path)
    train_settings.check(config)
    said: list[str] = []
    assert train_data.load_data(config, said.append).train
    assert not any("config.init" in line for line in said)  # it has a tokenizer
    start = train_state.initial_state(config, []).model
    np.testing.assert_array_equal(start.embedding[...], draft.embedding[...])
    assert start.config.dropout_rate == 0.2
    with_draft = train_data.fingerprint_files(config)
    config.init = str(ships)
    assert train_data.fingerprint_files(config) == with_draft
    config.init = "mimetic"
    assert train_data.fingerprint_files(config) != with_draft
    config.init = "zoo/repair/none"
    with pytest.raises(errors.InputError, match="config.init: no model 'repair/none'"):
        train_settings.check(config)
    config.init = "nowhere"
    with pytest.raises(errors.InputError, match="config.init is 'nowhere': .*zoo/"):
        train_settings.check(config)


SETTINGS = {
    "init": ("", "config.init is ''"),
    "data.folder": ("nowhere", "config.data.folder is 'nowhere'"),
    "data.validation_rows": (0, "config.data.validation_rows is 0: at least 1"),
    "data.buckets": ((32, 16), r"config.data.buckets: length buckets \[32, 16\] a"),
    "export.dtype": ("int8", "config.export.dtype is 'int8'"),
    "log_every": (0, "config.log_every is 0"),
    "checkpoint_every": (0, "config.checkpoint_every is 0"),
    "keep": (0, "config.keep is 0"),
    "accumulate": (0, "config.accumulate is 0"),
    "z_loss": (-1.0, "config.z_loss is -1.0: a number, at least 0"),
    "compute_dtype": ("float16", "config.compute_dtype is 'float16'"),
    "decode_every": (-1, "config.decode_every is -1"),
    "evaluate.rows": (0, "config.evaluate.rows is 0"),
    "evaluate.max_length": (1, "config.evaluate.max_length is 1"),
    "optimizer.weight_decay": (float("inf"), "config.optimizer.weight_decay is inf"),
    "best": ("nll", "config.best is 'nll': a metric, validation_nll"),
    "export.which": ("newest", "config.export.which is 'newest': last or best"),
    "seed": (-1, "config.seed is -1"),
    "label_smoothing": (3.0, "config.label_smoothing is 3.0"),
    "optimizer.learning_rate": (-1.0, "config.optimizer.learning_rate is -1.0"),
    "optimizer.schedule": ("linear", "the schedule 'linear' is unknown"),
    "optimizer.clip": (0.0, "config.optimizer.clip is 0.0: above 0"),
    "optimizer.b2": (1.0, r"config.optimizer.b2 is 1.0: in \[0, 1\)"),
    "optimizer.steps": (0, "config.optimizer.steps is 0"),
    "optimizer.nesterov": (True, "config.optimizer has no setting nesterov"),
    "model.depth": (3, "config.model has no setting depth"),
    "distill.name": ("kl", "config.distill.name is 'kl'"),
    "distill.target_temperature": (float("inf"), "distill.target_temperature is inf"),
    "distill.draft_temperature": (2.0, "config.distill is set and config.distill.tar"),
    "distill.beta": (0.3, "distill.beta is 0.3, and .* forward_kl does not read it"),
    "distill.decay": (2.0, "distill.decay is 2.0, and .* forward_kl does not read it"),
    "distill.texts.temperature": (0.5, "texts.temperature is 0.5 and .* no model wr"),
    "distill.target": ("nowhere", "config.distill.target is 'nowhere': no such"),
    "epochs": (3, "--config has a setting epochs that this command does not know"),
}


def test_settings_that_do_not_go_together(folder, monkeypatch):
    config = tiny_config(folder)
    config.best = "decoded_bleu"
    with pytest.raises(errors.InputError, match="does not measure; it measures exact"):
        train_settings.check(config)
    config.update(best="", decode_every=2)
    config.evaluate.scores = ("bleu", "blue")
    with pytest.raises(errors.InputError, match="config.evaluate.scores has 'blue'"):
        train_settings.check(config)
    config.evaluate.scores = ()
    with pytest.raises(errors.InputError, match="config.evaluate.scores empty"):
        train_settings.check(config)
    config.evaluate.scores = ("bleu",)
    train_settings.check(config)
    config.export.which = "best"
    with pytest.raises(errors.InputError, match="config.best empty"):
        train_settings.check(config)
    config.best = "decoded_bleu"
    train_settings.check(config)
    assert train_settings.best(config) == checkpoints.Best("decoded_bleu", True)
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    with pytest.raises(errors.InputError, match="sacrebleu is not installed"):
        train_settings.check(config)
    config.update(decode_every=0, best="validation_nll", tensorboard=True)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(errors.InputError, match="tensorboardX is not installed"):
        train_settings.check(config)


@pytest.mark.parametrize("name", SETTINGS)
def test_bad_settings_end_before_any_work(folder, tmp_path, name):
    value, message = SETTINGS[name]
    config = tiny_config(folder)
    with config.unlocked():
        *path, last = name.split(".")
        place = functools.reduce(getattr, path, config)
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
    take = step.train_step

    def spoilt(state, *arguments, **settings):
        state, metrics = take(state, *arguments, **settings)
        if int(state.step) == 4:
            metrics["grad_norm"] = jax.numpy.float32("nan")
        return state, metrics

    monkeypatch.setattr(step, "train_step", spoilt)
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
    take, score = step.train_step, train.evaluate
    save = checkpoints.save_in_background

    def after(seconds, function):
        def call(*arguments, **settings):
            clock[0] += seconds
            return function(*arguments, **settings)

        return call

    monkeypatch.setattr(step, "train_step", after(2.0, take))
    monkeypatch.setattr(train, "evaluate", after(100.0, score))
    monkeypatch.setattr(checkpoints, "save_in_background", after(1000.0, save))
    train.train(config, tmp_path, show=lambda line: None)
    lines = map(json.loads, (tmp_path / "train.jsonl").read_text().splitlines())
    speeds = [line["seconds_per_step"] for line in lines if "loss" in line]
    assert speeds == [2.0] * 4


@pytest.mark.slow
def test_distillation_raises_alpha(folder, tmp_path):
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


@pytest.mark.parametrize(
    "module",
    [
        *(repair_target, repair_draft, ende_short, ende_target, ende_draft),
        *(english_target, english_draft),
    ],
)
def test_shipped_configs_make_records(module):
    config = module.get_config().lock()
    assert train_settings.model_config(config).vocab_size in (1024, 2048, 4096)
    assert train_settings.optimizer_config(config).steps >= 600


def test_command_line_in_a_notebook(tmp_path):
    command = [sys.executable, "-m", "experiments.train", "-f", "kernel.json"]
    settings = ["--config=configs/repair_target.py", f"--workdir={tmp_path}"]
    child = subprocess.run(
        [*command, *settings, "--config.data.folder=nowhere"],
        cwd=pairs.ROOT,
        capture_output=True,
        text=True,
    )
    assert child.returncode == 2, child.stderr
    assert "error: config.data.folder is 'nowhere'" in child.stderr
