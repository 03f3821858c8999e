"""A run that was killed, or whose disk failed, ends as if nothing had happened."""

import errno
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from experiments import train, train_state
from specjax import checkpoints, errors
from specjax.data import tokenizer
from tests import pairs
from tests.tiny_run import lines, losses, tiny_config

pytestmark = pytest.mark.usefixtures("standard_promotion")

# Runs to the end, or dies by its own hand at the moment that the third argument names.
CHILD = """
import json, os, pathlib, signal, sys
import ml_collections
from experiments import train
from specjax import checkpoints
from specjax.training import step

config = ml_collections.ConfigDict(json.loads(sys.argv[1]))

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

def die_at(number, function, find):
    def call(*arguments, **settings):
        if find(*arguments) == number:
            die()
        return function(*arguments, **settings)
    return call

if sys.argv[3] == "copying":
    checkpoints.save_in_background = die_at(
        6, checkpoints.save_in_background, lambda folder, number, *rest: number
    )
elif sys.argv[3] == "written":
    checkpoints._hashes = die_at(
        "6.partial", checkpoints._hashes, lambda folder: folder.name
    )
elif sys.argv[3] == "dropping":
    checkpoints.best_step = die_at(
        6, checkpoints.best_step, lambda folder, best: checkpoints.steps(folder)[-1]
    )
elif sys.argv[3] == "stepping":
    step.train_step = die_at(6, step.train_step, lambda state, batch: int(state.step))
train.train(config, pathlib.Path(sys.argv[2]))
"""


def quiet(line: str) -> None:
    pass


def run_config(folder: pathlib.Path):
    """With all that could make a step differ the second time."""
    config = tiny_config(folder)
    config.update(accumulate=2, keep=2, z_loss=1e-4, decode_every=4)
    config.evaluate.scores = ("exact_match",)
    assert config.model.dropout_rate > 0
    return config


def start(config, workdir: pathlib.Path, moment: str) -> subprocess.Popen:
    # Programs that are compiled otherwise round otherwise: the child's must be ours.
    quick = str(int(jax.config.values["jax_disable_most_optimizations"]))
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, json.dumps(config.to_dict()), workdir, moment],
        cwd=pairs.ROOT,
        env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": quick},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_same(ours, theirs) -> None:
    pure = map(checkpoints.to_pure_dict, (ours, theirs))
    for leaves in zip(*map(jax.tree.leaves, pure), strict=True):
        np.testing.assert_array_equal(*leaves)


@pytest.mark.slow
def test_a_killed_run_resumes_bit_for_bit(folder, tmp_path):
    config = run_config(folder)
    whole = tmp_path / "whole"
    expected = train.train(config, whole, show=quiet)
    assert len(lines(whole)) == 10
    # Steps that must stand, and may: the thread that writes is not waited for.
    moments = {
        "copying": ([4], [2, 4]),
        "written": ([4], [2, 4]),
        "dropping": ([4, 6], [2, 4, 6]),
        "stepping": ([4], [2, 4, 6]),
        "from outside": ([], [2, 4, 6]),
    }
    for moment, (least, most) in moments.items():
        broken = tmp_path / moment
        child = start(config, broken, moment)
        if moment == "from outside":
            log = broken / "train.jsonl"
            while not log.is_file() or len(lines(broken)) < 4:
                time.sleep(0.001)
            child.send_signal(signal.SIGKILL)
        _, said_in_child = child.communicate(timeout=600)
        assert child.returncode == -signal.SIGKILL, said_in_child
        stand = checkpoints.steps(broken / "checkpoints")
        assert set(least) <= set(stand) <= set(most), moment
        said: list[str] = []
        state = train.train(config, broken, show=said.append)
        if stand:
            assert said[0] == f"resumed at step {stand[-1]} of 8"
        assert lines(broken) == lines(whole), moment
        assert_same(state, expected)
        names = {path.name for path in (broken / "checkpoints").iterdir()}
        assert not [name for name in names if not name.isdecimal()]


@pytest.mark.slow
def test_a_run_goes_on_where_one_was_cut_short(folder, tmp_path, monkeypatch):
    """In one process: a full disk, an error, damage, and the end as it should be."""
    config = run_config(folder)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    expected = train.train(config, whole, show=quiet)

    write, take = checkpoints._write_json, train.step.train_step

    def full(path, content):
        if path.parent.name == "4.partial":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    def fail(state, *arguments, **settings):
        if int(state.step) == 6:
            raise KeyboardInterrupt
        return take(state, *arguments, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write_json", full)
        patch.setattr(train.step, "train_step", fail)
        message = (
            "checkpoint 4 was not written .*No space left.*those of steps .2. stay"
        )
        with pytest.warns(UserWarning, match=message), pytest.raises(KeyboardInterrupt):
            train.train(config, broken, show=quiet)
    # The save that was under way when the run ended was waited for.
    assert checkpoints.steps(broken / "checkpoints") == [2, 6]
    assert [number for number, _ in losses(broken)] == [1, 2, 3, 4, 5, 6]

    (broken / "checkpoints" / "6" / "sha256.json").unlink()
    said: list[str] = []
    with pytest.warns(UserWarning, match="checkpoint 6 in .* cannot be read"):
        state = train.train(config, broken, show=said.append)
    assert said[0] == "resumed at step 2 of 8"
    assert (broken / "checkpoints" / "6.damaged").is_dir()
    assert lines(broken) == lines(whole)
    assert_same(state, expected)

    # Done: nothing more happens, but that what was lost is written again.
    (broken / "metrics.json").unlink()
    again = train.train(config, broken, show=quiet)
    scores = [path / "metrics.json" for path in (broken, whole)]
    assert scores[0].read_text() == scores[1].read_text()
    assert lines(broken) == lines(whole)
    assert_same(again, expected)


def test_a_last_checkpoint_that_fails_is_said(folder, tmp_path, monkeypatch):
    config = tiny_config(folder)
    config.update(evaluate_every=100, checkpoint_every=100)

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoints, "_save", full)
    with pytest.warns(UserWarning, match="checkpoint 8 was not written"):
        train.train(config, tmp_path, show=quiet)
    # All but the checkpoint is there.
    assert (tmp_path / "export" / "model.safetensors").is_file()


def test_another_run_in_the_folder_is_refused(folder, tmp_path):
    config = tiny_config(folder)
    state = train_state.initial_state(config, [])
    checkpoints.save(tmp_path / "checkpoints", 1, state, config.to_dict())
    for name, value, message in (
        ("seed", 5, r"config.seed = 0, not 5"),
        ("accumulate", 2, r"config.accumulate = 1, not 2"),
        # Their arrays differ too: the setting is what a user knows.
        ("model.d_ff", 24, r"config.model.d_ff = 16, not 24"),
        ("optimizer.name", "adafactor", r"config.optimizer.name = adamw, not adafac"),
        ("data.max_tokens", 9, r"config.data.max_tokens = 32, not 9"),
    ):
        other = tiny_config(folder)
        section, _, last = name.rpartition(".")
        (other[section] if section else other)[last] = value
        with pytest.raises(errors.InputError, match=message):
            train.train(other, tmp_path, show=quiet)


def test_a_run_from_before_a_setting_was_made_goes_on(folder, tmp_path):
    config = tiny_config(folder)
    state = train_state.initial_state(config, [])
    old = config.to_dict()
    for name in ("z_loss", "accumulate", "compute_dtype", "evaluate"):
        del old[name]
    del old["data"]["validation"]
    checkpoints.save(tmp_path / "checkpoints", 1, state, old)
    said: list[str] = []
    config.optimizer.learning_rate = 0.5
    assert train_state.restore(config, tmp_path, said.append).step == 1
    assert said == [
        "config.optimizer.learning_rate is now 0.5, was 0.0012",
        "resumed at step 1 of 8",
    ]
    # What it did then is what the default does now, and nothing else.
    config.z_loss = 1e-4
    with pytest.raises(errors.InputError, match="config.z_loss = 0.0, not 0.0001"):
        train_state.restore(config, tmp_path, said.append)


def test_a_longer_run_than_asked_for_is_not_exported_as_the_shorter(folder, tmp_path):
    config = tiny_config(folder)
    train.train(config, tmp_path, show=quiet)
    (tmp_path / "export" / "model.safetensors").unlink()
    config.optimizer.update(steps=6, decay_steps=2)
    with pytest.raises(errors.InputError, match="a run of 8 steps, past .*steps = 6"):
        train.train(config, tmp_path, show=quiet)
    assert not (tmp_path / "export" / "model.safetensors").exists()
    assert len(losses(tmp_path)) == 8


@pytest.mark.slow
def test_a_line_of_the_log_averages_the_same_steps_after_a_stop(folder, tmp_path):
    """Checkpoints stand where no line is due."""
    config = tiny_config(folder)
    config.update(log_every=5, evaluate_every=8, checkpoint_every=3)
    # A schedule that is alike whenever the run ends.
    config.optimizer.update(schedule="inverse_sqrt", decay_steps=300)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train.train(config, whole, show=quiet)
    config.optimizer.steps = 6
    train.train(config, parts, show=quiet)
    config.optimizer.steps = 8
    train.train(config, parts, show=quiet)
    assert [number for number, _ in losses(whole)] == [3, 5, 6, 8]
    assert losses(parts) == losses(whole)


def test_another_tokenizer_is_not_exported_with_the_model(folder, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(folder, data)
    config = tiny_config(data)
    config.optimizer.update(steps=2, decay_steps=1)
    train.train(config, tmp_path / "run", show=quiet)
    tokenizer.train_sentencepiece(pairs.TEXTS, 105, data / "spiece.model")
    with pytest.raises(errors.InputError, match="holds a run with another tokenizer"):
        train.export_saved(config, tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "value"), [("activation", "relu"), ("d_kv", 8), ("scaled_head", True)]
)
def test_weights_are_not_exported_as_another_model(folder, tmp_path, name, value):
    config = tiny_config(folder)
    state = train_state.initial_state(config, [])
    checkpoints.save(tmp_path / "checkpoints", 1, state, config.to_dict())
    other = tiny_config(folder)
    with other.unlocked():
        other.model[name] = value
    with pytest.raises(
        errors.InputError, match=f"holds a run with config.model.{name}"
    ):
        train.export_saved(other, tmp_path)
    # Without the manifest of the run there is a model, and no card.
    with pytest.warns(UserWarning, match="the export has no card"):
        assert train.export_saved(config, tmp_path) == 1
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.mark.slow
def test_a_run_with_buckets_in_pairs_goes_on(folder, tmp_path):
    """Also where the settings have been through JSON, which knows no tuples."""
    config = tiny_config(folder)
    config.data.buckets = ((8, 32), (32, 32))
    config.optimizer.update(steps=2, schedule="inverse_sqrt", decay_steps=300)
    train.train(config, tmp_path, show=quiet)
    config.optimizer.steps = 4
    said: list[str] = []
    train.train(config, tmp_path, show=said.append)
    assert "resumed at step 2 of 4" in said
    assert [number for number, _ in losses(tmp_path)] == [1, 2, 3, 4]
    # The card names both starts, and a line that was cut short spoils nothing.
    log = tmp_path / "train.jsonl"
    log.write_text(log.read_text()[:-20])
    assert train.export_saved(config, tmp_path) == 4
    card = (tmp_path / "export" / "README.md").read_text()
    assert "- from step 0: `" in card and "- from step 2: `" in card


@pytest.mark.parametrize(
    "name", ["other training examples", "other held-out examples", "another tokenizer"]
)
def test_other_data_under_the_same_name_is_refused(folder, tmp_path, name):
    config = tiny_config(folder)
    state = train_state.initial_state(config, [])
    kind = name.partition(" ")[2]
    saved = config.to_dict() | {"fingerprints": {kind: "of another"}}
    checkpoints.save(tmp_path / "checkpoints", 1, state, saved)
    with pytest.raises(errors.InputError, match=f"holds a run with {name}"):
        train.train(config, tmp_path, show=quiet)
