"""Drafts learn from a target: on whose texts, from where, and how near they get."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from experiments import (
    distill,
    teacher,
    train,
    train_data,
    train_settings,
    train_state,
)
from specjax import errors
from specjax.models import t5, t5_weights
from specjax.training import flops, init
from tests import tiny_run

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, a tokenizer, and a target; that no one has trained it does not matter."""
    folder = tiny_run.make_folder(tmp_path_factory.mktemp("distill"))
    shape = train_settings.model_config(tiny_run.tiny_config(folder))
    target = init.mimetic_init(t5.T5(shape, jax.random.key(5)))
    t5_weights.save_t5(target, folder)
    return folder


def config_of(folder, **changes):
    config = tiny_run.tiny_config(folder)
    config.model.dropout_rate = 0.0
    config.distill.target = str(folder)
    config.evaluate.rows = 6
    config.update(changes)
    return config


def silent(line):
    del line


@pytest.mark.slow
def test_a_draft_that_is_the_target_agrees_with_it_and_one_that_is_not_does_not(folder):
    config = config_of(folder)
    data = train_data.load_data(config, silent)
    master = teacher.load_teacher(config)
    held_out = master.held_out(config, data)
    same = train.evaluate(master.target, data.validation, master, held_out)
    assert same["alpha_greedy"] == pytest.approx(1.0, abs=1e-5)
    assert same["alpha_sampled"] == pytest.approx(1.0, abs=1e-5)
    assert same["validation_divergence"] == pytest.approx(0.0, abs=1e-5)
    other = init.mimetic_init(t5.T5(master.target.config, jax.random.key(6)))
    apart = train.evaluate(other, data.validation, master, held_out)
    assert apart["alpha_greedy"] < 0.9 and apart["alpha_sampled"] < 0.9


@pytest.mark.slow
def test_mixed_texts_resume_bit_for_bit(folder, tmp_path):
    """Whose texts, and what is written, are functions of the step and of the draft."""
    config = config_of(folder)
    config.distill.texts.update(truth=0.2, target=0.4, draft=0.4)
    # A schedule that is alike whenever the run ends.
    config.optimizer.update(schedule="inverse_sqrt", decay_steps=300)
    whole = train.train(config, tmp_path / "whole", show=silent)
    for steps in (4, 8):
        config.optimizer.steps = steps
        parts = train.train(config, tmp_path / "parts", show=silent)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        if one.dtype == np.float32:
            np.testing.assert_array_equal(one, other)
    assert tiny_run.losses(tmp_path / "whole") == tiny_run.losses(tmp_path / "parts")
    lines = tiny_run.lines(tmp_path / "whole")
    writers = {name for line in lines for name in line if name.endswith("_texts")}
    assert writers == {"truth_texts", "target_texts", "draft_texts"}


@pytest.mark.slow
def test_a_draft_without_an_encoder_trains_and_is_saved(folder, tmp_path):
    config = config_of(folder)
    config.model.update(num_encoder_layers=0, encoder_width=16)
    config.distill.texts.update(truth=0.0, draft=1.0)
    train.train(config, tmp_path, show=silent)
    lines = tiny_run.lines(tmp_path)
    assert all(line["draft_texts"] == 1 for line in lines if "loss" in line)
    scores = [line for line in lines if "alpha_greedy" in line]
    assert 0 < scores[-1]["alpha_sampled"] < 1
    saved = t5_weights.load_t5(tmp_path / "export")
    assert saved.shares_encoder and saved.config.encoder_width == 16


@pytest.mark.slow
def test_layers_of_the_target_to_start_from(folder, tmp_path):
    config = config_of(folder, init="target")
    config.init_layers.update(encoder=(0,), decoder=(0,))
    config.optimizer.update(steps=1, learning_rate=1e-9)
    train.train(config, tmp_path, show=silent)
    (score,) = [own for own in tiny_run.lines(tmp_path) if "alpha_greedy" in own]
    assert score["alpha_sampled"] == pytest.approx(1.0, abs=1e-3)


def test_no_writer_writes_padding_of_a_wider_draft(folder):
    config = config_of(folder)
    config.model.vocab_size = 605  # the tokenizer has 205 ids
    config.distill.texts.update(truth=0.0, draft=1.0)
    data = train_data.load_data(config, silent)
    master = teacher.load_teacher(config)
    state = train_state.initial_state(config, data.train)
    written, writer = master.texts_of_step(state, data.validation[0], 0)
    assert writer == "draft" and written.targets_mask.any()
    assert written.targets.max() < data.pieces.vocab_size == 205


REFUSED = {
    "distill.texts.truth": (0.5, r"config.distill.texts: the shares of .* to 0.5"),
    "init_layers.decoder": ((0,), "config.init_layers names layers of the target"),
    "label_smoothing": (0.1, "config.label_smoothing is 0.1 and config.distill names"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_mean_nothing(folder, tmp_path, name):
    config = config_of(folder)
    value, message = REFUSED[name]
    config.update_from_flattened_dict({name: value})
    with pytest.raises(errors.InputError, match=message):
        train.train(config, tmp_path, show=silent)
    assert not list(tmp_path.iterdir())


NEEDS_TARGET = {
    "init": ("target", "config.init=target is set and config.distill.target empty"),
    "model.encoder_width": (16, "config.model.encoder_width is set and"),
    "distill.texts": (dict(truth=0.0, draft=1.0), "config.distill.texts is set and"),
}


@pytest.mark.parametrize("name", NEEDS_TARGET)
def test_what_needs_a_target(folder, tmp_path, name):
    config = config_of(folder)
    config.distill.target = ""
    value, message = NEEDS_TARGET[name]
    with config.unlocked():
        if name == "model.encoder_width":
            config.model.num_encoder_layers = 0
        if isinstance(value, dict):
            config.distill.texts.update(value)
        else:
            config.update_from_flattened_dict({name: value})
    with pytest.raises(errors.InputError, match=message):
        train.train(config, tmp_path, show=silent)


@pytest.mark.slow
def test_a_target_that_changed_since_is_refused(folder, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(folder, target)
    config = config_of(folder)
    config.distill.target = str(target)
    config.optimizer.update(steps=2, schedule="inverse_sqrt", decay_steps=300)
    train.train(config, tmp_path / "run", show=silent)
    model = t5_weights.load_t5(target)
    model.head[...] = 1.01 * model.head[...]
    t5_weights.save_t5(model, target)
    config.optimizer.steps = 4
    message = "holds a run with another target of distill: the files have changed"
    with pytest.raises(errors.InputError, match=message):
        train.train(config, tmp_path / "run", show=silent)


@pytest.mark.slow
def test_a_target_must_be_whole(folder, tmp_path):
    config = config_of(folder)
    config.model.update(num_encoder_layers=0, encoder_width=16)
    config.optimizer.update(steps=1, warmup_steps=1, decay_steps=1)
    train.train(config, tmp_path / "draft", show=silent)
    config = config_of(folder)
    config.distill.target = str(tmp_path / "draft" / "export")
    with pytest.raises(errors.InputError, match="a draft without an encoder: it takes"):
        train.train(config, tmp_path / "run", show=silent)


def test_decodes_that_cannot_be_whole_are_said(folder):
    said: list[str] = []
    config = config_of(folder)
    config.evaluate.max_length = 4
    train._show_cut_references(
        config, train_data.load_data(config, silent), said.append
    )
    assert "max_length = 4 leaves 3 tokens, and 6 of the 6" in said[0]


def test_work_of_the_writer_counts(folder):
    """A pass of whoever writes, beside the draft's step and the target's pass."""
    config = config_of(folder)
    shape = train_settings.model_config(config)
    wide = dataclasses.replace(shape, d_ff=64)
    target = t5.T5(wide, jax.random.key(0))
    data = train_data.load_data(config, silent)
    batch = data.validation[0]
    sizes = (*batch.inputs.shape, batch.targets.shape[1])
    step, one, other = (
        flops.train_flops(shape, *sizes),
        flops.forward_flops(shape, *sizes),
        flops.forward_flops(wide, *sizes),
    )
    assert one != other
    assert train._flops(shape, None, batch, "truth") == step
    assert train._flops(shape, target, batch, "truth") == step + other
    assert train._flops(shape, target, batch, "target") == step + 2 * other
    assert train._flops(shape, target, batch, "draft") == step + other + one


def test_each_command_names_the_other(folder, tmp_path):
    config = config_of(folder)
    with pytest.raises(errors.InputError, match="experiments.distill trains a draft"):
        train.main(config, tmp_path, None)
    config.distill.target = ""
    with pytest.raises(errors.InputError, match="experiments.train trains without"):
        distill.main(config, tmp_path, None)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ["truth", "target", "draft"])
def test_alpha_rises_whoever_writes(folder, tmp_path, writer):
    config = config_of(folder, seed=1, evaluate_every=100)
    config.distill.texts.update({"truth": 0.0} | {writer: 1.0})
    config.optimizer.update(steps=60, learning_rate=1e-2)
    data = train_data.load_data(config, silent)
    master = teacher.load_teacher(config)
    held_out = master.held_out(config, data)
    draft = train_state.initial_state(config, data.train, master.target).model
    before = master.alphas(draft, held_out)["alpha_sampled"]
    draft = train.train(config, tmp_path, show=silent).model
    after = master.alphas(draft, held_out)["alpha_sampled"]
    assert before + 0.05 < after < 1.0
