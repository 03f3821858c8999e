"""The commands take a draft that reads its target's encoder like any other."""

import dataclasses
import shutil

import pytest

from specjax.data import tokenizer as tokenizers
from specjax.models import t5_weights
from specjax.training.draft_init import draft_from_target
from tests import pairs


@pytest.fixture(scope="module")
def shared(folders, tmp_path_factory) -> pairs.Folders:
    """The target's encoder and its first decoder layer."""
    folder = tmp_path_factory.mktemp("shared")
    target = t5_weights.load_t5(folders.target)
    t5_weights.save_t5(draft_from_target(target, (), (0,)), folder)
    for name in tokenizers.FILES:
        if (folders.target / name).is_file():
            (folder / name).write_bytes((folders.target / name).read_bytes())
    return dataclasses.replace(folders, draft=folder)


@pytest.mark.slow
def test_it_decodes(shared, decoded, tmp_path):
    with pairs.costs_are():
        run = pairs.run_decode(shared, tmp_path)
    assert run.code == 0, run.err
    metrics = run.metrics
    assert metrics["identical"] and 0 < metrics["alpha"] < 1
    speculative = metrics["speculative"]
    assert 0 < speculative["accepted"] < speculative["drafted"]
    assert [line["text"] for line in run.decodes] == [
        line["text"] for line in decoded.decodes
    ]


def test_another_width_is_refused_in_one_sentence(shared, tmp_path):
    narrow = shutil.copytree(shared.draft, tmp_path / "narrow")
    pairs.edit_config(narrow, encoder_d_model=24)
    pairs.edit_weights(narrow, _cut)
    own = dataclasses.replace(shared, draft=narrow)
    run = pairs.run_decode(own, tmp_path / "new")
    assert run.code == 2 and run.err.startswith("error: ")
    assert "width 24" in run.err and "width is 32" in run.err


def _cut(tensors):
    name = "encoder.projection.weight"
    tensors[name] = tensors[name][:, :24].copy()
