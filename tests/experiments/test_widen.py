"""The commands widen what they load, and nothing but costs changes."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from configs import demo
from experiments import build
from specjax import errors
from specjax.models import t5_config, t5_weights
from specjax.training.draft_init import draft_from_target
from tests import pairs

LARGER = dataclasses.replace(pairs.SHAPE, d_model=48, d_kv=12, num_decoder_layers=3)


@pytest.fixture
def config(folders, monkeypatch):
    """Settings of the tiny pair, and two more published sizes."""
    known = t5_config._PRESETS
    monkeypatch.setitem(known, "larger", dataclasses.replace(LARGER, vocab_size=244))
    monkeypatch.setitem(known, "smaller", dataclasses.replace(LARGER, d_ff=40))
    config = demo.get_config()
    config.target.checkpoint = str(folders.target)
    config.draft.checkpoint = str(folders.draft)
    return config


def test_models_are_widened_and_rows_without_a_meaning_stay_so(config):
    config.target.widen = config.draft.widen = "larger"
    pair = build.build_pair(config)
    assert pair.num_tokens == pairs.KNOWN
    for model in (pair.target, pair.drafting_model, pair.draft_model):
        assert model.config.d_model == 48 and model.vocab_size == 244
        assert model.config.num_decoder_layers == 3


def test_a_config_without_the_setting_leaves_them_alone(config):
    del config.target.widen, config.draft.widen
    pair = build.build_pair(config)
    assert pair.target.config == pairs.SHAPE
    assert pair.drafting_model.config.num_decoder_layers == 1


@pytest.mark.slow
def test_a_draft_that_reads_the_encoder_reads_the_widened_one(
    config, folders, tmp_path
):
    folder = shutil.copytree(folders.draft, tmp_path / "shared")
    target = t5_weights.load_t5(folders.target)
    t5_weights.save_t5(draft_from_target(target, (), (0,)), folder)
    config.draft.checkpoint = str(folder)
    config.target.widen = "larger"
    pair = build.build_pair(config)
    assert pair.drafting_model.config.encoder_width == 48
    assert pair.drafting_model.config.d_model == pairs.SHAPE.d_model
    config.draft.widen = "larger"
    assert build.build_pair(config).drafting_model.config.d_model == 48


REFUSED = {
    ("target", "t5-v1_1-bse"): "config.target.widen: There is no T5 preset",
    ("draft", "none"): "config.draft.widen: There is no T5 preset",
    ("target", "smaller"): "config.target.widen: a model with d_ff 48 cannot",
}


@pytest.mark.parametrize("given", REFUSED)
def test_bad_settings_are_named(config, given):
    role, name = given
    config[role].widen = name
    with pytest.raises(errors.InputError) as caught:
        build.build_pair(config)
    assert str(caught.value).startswith(REFUSED[given])


def test_a_drafter_without_a_model_has_none_to_widen(config):
    config.drafter, config.draft.widen = "ngram", "larger"
    with pytest.raises(errors.InputError, match="^config.draft.widen is 'larger' and"):
        build.build_pair(config)


@pytest.mark.slow
def test_it_decodes_to_the_same_text_with_the_same_acceptance(
    config, folders, decoded, tmp_path
):
    with pairs.costs_are():
        run = pairs.run_decode(
            folders,
            tmp_path,
            "--config.target.widen=larger",
            "--config.draft.widen=larger",
        )
    assert run.code == 0, run.err
    assert run.read("manifest.json")["config"]["target"]["widen"] == "larger"
    for line, own in zip(run.decodes, decoded.decodes, strict=True):
        for name in ("text", "tokens", "target_calls", "accepted", "sampled"):
            assert line[name] == own[name]
    assert run.metrics["alpha"] == pytest.approx(decoded.metrics["alpha"], abs=1e-4)
    assert jax.tree.all(
        jax.tree.map(np.allclose, run.metrics["survival"], decoded.metrics["survival"])
    )
