"""The command that trains drafters: learns, resumes bit for bit, exports, refuses."""

from __future__ import annotations

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

from configs import train_drafter as default
from experiments import build_drafter, train_drafter, train_log
from specjax import checkpoints, errors
from specjax.data import pairs as data_pairs
from specjax.drafters import files
from specjax.models import t5_weights
from specjax.training import slots
from tests import pairs
from tests.tiny_run import lines, losses

pytestmark = pytest.mark.usefixtures("standard_promotion")


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def data(folders, tmp_path_factory) -> pathlib.Path:
    """Texts in the words of the tiny pair's tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    words = " ".join(pairs.TEXTS).split()
    rows = [
        data_pairs.Pair(" ".join(words[i : i + 3]), " ".join(words[i + 1 : i + 5]))
        for i in range(40)
    ]
    data_pairs.save_pairs(folder / "train.jsonl", rows[:32])
    data_pairs.save_pairs(folder / "validation.jsonl", rows[32:])
    shutil.copy(folders.target / "spiece.model", folder)
    return folder


@pytest.fixture
def config(folders, data):
    """Eight steps of eight rows."""
    config = default.get_config()
    config.update(target=str(folders.target), gamma=2)
    config.update(log_every=1, evaluate_every=4, checkpoint_every=2)
    config.optimizer.update(steps=8, warmup_steps=2, decay_steps=4, learning_rate=1e-2)
    config.data.update(folder=str(data), buckets=(24,), max_tokens=24)
    config.data.update(tokens_per_batch=192, validation_rows=6)
    config.settings.medusa.heads = 2
    return config


def test_a_run_learns_and_exports(config, folders, tmp_path):
    state = train_drafter.train(config, tmp_path, quiet)
    assert state.step == 8
    taken = [loss for _, loss in losses(tmp_path)]
    assert len(taken) == 8 and taken[-1] < taken[0]
    scored = [line for line in lines(tmp_path) if "loss" not in line]
    assert [line["step"] for line in scored] == [4, 8]
    assert scored[-1] == json.loads((tmp_path / "metrics.json").read_text())
    last = scored[-1]
    # One slot or two: the length is the sum of what survives.
    assert last["acceptance_1"] <= last["expected_length"] <= 2
    assert {"agreement_2", "expected_length_greedy", "validation_loss"} <= last.keys()

    folder = tmp_path / "export"
    target = t5_weights.load_t5(folders.target)
    print_of = t5_weights.fingerprint(folders.target)
    kind = build_drafter.TRAINABLE["medusa"]
    read = files.load_drafter(kind, folder, target, print_of)
    for stored, own in zip(*map(jax.tree.leaves, (read, state.model)), strict=True):
        np.testing.assert_allclose(stored, own, atol=1e-3)
    about = files.read_header(folder)["about"]
    assert about["expected_length"] == last["expected_length"] and about["step"] == 8
    assert about["minutes"] == round(
        train_log.minutes(train_log.read_lines(tmp_path)), 1
    )
    text = (folder / "README.md").read_text()
    assert "medusa of 2,0" in text and "blocks of 2" in text
    assert f"| expected_length | {last['expected_length']:.4g} |" in text

    # And is gone on from.
    config.update(init=str(folder))
    again = train_drafter.initial_state(config, target, print_of)
    assert again.step == 0
    for stored, own in zip(*map(jax.tree.leaves, (read, again.model)), strict=True):
        np.testing.assert_array_equal(stored, own)


@pytest.mark.slow
def test_what_is_trained_drafts_through_the_commands(config, folders, tmp_path):
    target = t5_weights.load_t5(folders.target)
    print_of = t5_weights.fingerprint(folders.target)
    made = train_drafter.initial_state(config, target, print_of).model
    files.save_drafter(made, tmp_path / "drafter", print_of)
    with pairs.costs_are():
        run = pairs.run_decode(
            folders,
            tmp_path / "decoded",
            "--config.drafter=medusa",
            f"--config.draft.checkpoint={tmp_path / 'drafter'}",
            "--config.gamma=2",
        )
    assert run.code == 0, run.err
    assert run.metrics["identical"] is True


def test_minutes_are_of_all_steps():
    made = [
        {"step": 2, "loss": 1.0, "seconds_per_step": 30.0},
        {"step": 2, "expected_length": 1.0},
        {"step": 6, "loss": 1.0, "seconds_per_step": 15.0},
    ]
    assert train_log.minutes(made) == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [3, 5, 6])
def test_a_stopped_run_goes_on_bit_for_bit(config, tmp_path, monkeypatch, stopped):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = train_drafter.train(config, whole, quiet)
    take = slots.slot_step

    def fail(state, *arguments, **settings):
        if int(state.step) == stopped:
            raise KeyboardInterrupt
        return take(state, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(slots, "slot_step", fail)
        with pytest.raises(KeyboardInterrupt):
            train_drafter.train(config, broken, quiet)
    said: list[str] = []
    state = train_drafter.train(config, broken, said.append)
    assert said[0] == f"resumed at step {stopped - stopped % 2} of 8"
    assert lines(broken) == lines(whole)
    arrays = (
        jax.tree.leaves(checkpoints.to_pure_dict(own)) for own in (state, expected)
    )
    for ours, theirs in zip(*arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.slow
def test_another_run_in_the_folder_is_refused(config, tmp_path):
    config.optimizer.steps = 2
    train_drafter.train(config, tmp_path, quiet)
    config.loss.weights = "none"
    with pytest.raises(errors.InputError, match="config.loss.weights = cat, not none"):
        train_drafter.train(config, tmp_path, quiet)
    config.loss.weights, config.optimizer.steps = "cat", 1
    with pytest.raises(errors.InputError, match="a run of 2 steps, past"):
        train_drafter.train(config, tmp_path, quiet)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("kind", "hydra", "config.kind is 'hydra': it must be one of"),
        ("gamma", 0, "config.gamma is 0: at least 1"),
        ("gamma", 3, "gamma is 3 and the medusa drafter has 2 heads"),
        ("loss.name", "x", "config.loss.name is 'x'"),
        ("loss.weights", "x", "config.loss.weights is 'x'"),
        ("optimizer.steps", 0, "config.optimizer.steps is 0"),
        ("settings.medusa.rank", 999, "medusa's rank is 999: 0 to 32"),
        ("data.folder", "", "config.data.folder is ''"),
        ("target", "nowhere", "config.target is 'nowhere': no such folder"),
        ("init", "nowhere", "config.init is 'nowhere': no such folder"),
        ("export.dtype", "int8", "config.export.dtype is 'int8'"),
    ],
)
def test_bad_settings_are_named(config, tmp_path, setting, value, message):
    section, _, name = setting.rpartition(".")
    own = config
    for part in filter(None, section.split(".")):
        own = own[part]
    own[name] = value
    with pytest.raises(errors.InputError, match=message):
        train_drafter.train(config, tmp_path / "run", quiet)
    assert not (tmp_path / "run").exists()


def test_what_another_kind_reads_is_refused(config, folders, tmp_path, monkeypatch):
    monkeypatch.setitem(build_drafter.TRAINABLE, "other", object)
    config.kind = "other"
    with pytest.raises(errors.InputError, match="settings.medusa.heads is set and"):
        train_drafter.check(config)
    # A model is no drafter of this kind.
    config.update(kind="medusa", init=str(folders.draft))
    with pytest.raises(errors.InputError, match="starts from an earlier drafter"):
        train_drafter.train(config, tmp_path / "run", quiet)
