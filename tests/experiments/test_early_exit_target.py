"""The recipe for a target that drafts for itself, from its settings to its log."""

from __future__ import annotations

import ml_collections
import pytest

from configs import early_exit_target, repair_target
from experiments import train, train_settings
from specjax.errors import InputError
from specjax.training.layer_skip import LayerSkip
from tests import tiny_run

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> ml_collections.ConfigDict:
    """A run of seconds, of two decoder layers."""
    made = tiny_run.tiny_config(tiny_run.make_folder(tmp_path_factory.mktemp("data")))
    own = early_exit_target.get_config()
    made.update(layer_dropout=own.layer_dropout, exit_loss=own.exit_loss)
    made.model.num_decoder_layers = 2
    return made


def test_settings(config):
    assert train_settings.layer_skip_config(repair_target.get_config()) is None
    assert train_settings.layer_skip_config(config) == LayerSkip(0.1, 0.5)
    train_settings.check(config)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layer_dropout", 1.0, "config.layer_dropout is 1.0"),
        ("exit_loss", -1.0, "config.exit_loss is -1.0"),
        ("model.num_decoder_layers", 1, "has 1 decoder layer: it needs 2"),
        ("distill.target", "zoo/repair/target", "config.distill names a target"),
    ],
)
def test_settings_that_mean_nothing(config, name, value, message):
    wrong = config.copy_and_resolve_references()
    wrong.update_from_flattened_dict({name: value})
    with pytest.raises(InputError, match=message):
        train_settings.check(wrong)


@pytest.mark.slow
def test_a_run(config, tmp_path):
    """The exits' loss is part of the loss, and logged."""
    train.train(config, tmp_path, show=lambda line: None)
    steps = [line for line in tiny_run.lines(tmp_path) if "exit_loss" in line]
    assert len(steps) == config.optimizer.steps
    for line in steps:
        assert line["loss"] == pytest.approx(line["nll"] + 0.5 * line["exit_loss"])
