"""The draft's length by flag: what is built and refused, and training the head."""

from __future__ import annotations

import json
import shutil

import jax
import ml_collections
import numpy as np
import pytest

from configs import demo
from experiments import build, train_acceptance
from specjax.data import pairs as text_pairs
from specjax.drafters.lengths import Bandit, Confidence, EntropyBound, Fixed, Heuristic
from specjax.drafters.optimal_length import Optimal
from specjax.errors import InputError
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "repair_acceptance.py"


def config_of(folders, *settings: str) -> ml_collections.ConfigDict:
    """The demo's, on the tiny pair; settings as on the command line."""
    config = demo.get_config()
    config.target.checkpoint, config.draft.checkpoint = (
        str(folders.target),
        str(folders.draft),
    )
    for setting in settings:
        path, _, value = setting.partition("=")
        try:
            value = json.loads(value)
        except ValueError:
            pass  # a word
        own, *rest = path.split(".")[::-1]
        part = config
        for name in rest[::-1]:
            part = part[name]
        with part.ignore_type():
            part[own] = value
    return config


def rule_of(folders, *settings: str):
    own = (f"draft.length.{setting}" for setting in settings)
    return build.build_pair(config_of(folders, *own)).drafter.rule


def test_rules_by_flag(folders):
    """Settings that are left out have their usual value."""
    wanted = {
        ("rule=fixed", "fixed.length=3"): Fixed(3),
        ("rule=heuristic", "heuristic.up=3"): Heuristic(up=3),
        ("rule=confidence", "confidence.threshold=0.7"): Confidence(0.7),
        ("rule=entropy", "entropy.start=0.3"): EntropyBound(start=0.3),
        ("rule=optimal", "optimal.cost=0.2"): Optimal(cost=0.2),
        ("rule=bandit", "bandit.blend=0.3"): Bandit(
            (Heuristic(), Confidence(), EntropyBound()), blend=0.3
        ),
        ("rule=bandit", "bandit.rules=fixed, confidence", "fixed.length=2"): Bandit(
            (Fixed(2), Confidence())
        ),
    }
    for settings, rule in wanted.items():
        assert rule_of(folders, *settings) == rule
    assert rule_of(folders) is None


WRONG = {
    "draft.length.rule=longest": "config.draft.length.rule is 'longest': it must be",
    "draft.length.rule=fixed": "config.draft.length.fixed.length is not set",
    "draft.length.rule=optimal": "config.draft.length.optimal.cost is not set: c",
    "draft.length.rule=acceptance": "config.draft.length.acceptance.head is not set",
    "draft.length.fixed.length=3": "config.draft.length.fixed is set and config.draft",
    "draft.length.rule=entropy draft.length.confidence.threshold=0.3": "does not read",
    "draft.length.rule=entropy draft.length.entropy.kappa=0": "entropy.kappa is 0",
    "draft.length.rule=bandit draft.length.bandit.rules=bandit": "has 'bandit': some",
    "draft.length.rule=bandit draft.length.bandit.rules=entropy": "among two or more",
    "draft.length.rule=heuristic drafter=ngram": "the drafter 'ngram' does not write",
    "draft.length.rule=heuristic tree=-1,0,0": "config.tree is set: a tree has its own",
    "draft.length.rule=heuristic gamma=auto": "set gamma to the most tokens",
}


@pytest.mark.parametrize("settings", WRONG)
def test_what_means_nothing_is_refused(folders, settings):
    with pytest.raises(InputError) as caught:
        build.build_pair(config_of(folders, *settings.split()))
    assert WRONG[settings] in str(caught.value)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    path = tmp_path_factory.mktemp("sources") / "lines.jsonl"
    lines = [text_pairs.Pair(line, line) for line in pairs.LINES]
    text_pairs.save_pairs(path, lines)
    return path


def train(folders, path, workdir, *settings: str) -> pairs.Run:
    flags = (
        f"--config={CONFIG}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.draft.checkpoint={folders.draft}",
        f"--config.buckets={pairs.BUCKET}",
        f"--config.max_length={pairs.MAX_LENGTH}",
        "--config.batch_size=4",
        "--config.steps=60",
        "--config.hidden=8",
        "--config.learning_rate=0.01",
        f"--input={path}",
        f"--workdir={workdir}",
    )
    flags = pairs.less(flags, settings)
    main, define = train_acceptance.main, train_acceptance._define
    with jax.numpy_dtype_promotion("standard"):  # as optax has it
        return pairs.run(main, workdir, *flags, *settings, define=define)


@pytest.fixture(scope="module")
def trained(folders, sources, tmp_path_factory):
    run = train(folders, sources, tmp_path_factory.mktemp("head"))
    assert run.code == 0, run.err
    return run


@pytest.mark.slow
def test_a_head_is_trained_and_ends_drafts(folders, trained, decoded, tmp_path):
    metrics = trained.metrics
    assert metrics["places"] > 5 * metrics["held_out_places"] / 2 > 0
    assert 0 < metrics["acceptance"] < 1 and metrics["least_loss"] < 1e-6  # greedy
    assert all(np.isfinite(metrics[name]) for name in ("loss", "loss_of_a_constant"))
    settings = (
        "--config.runs=greedy",
        "--config.draft.length.rule=acceptance",
        "--config.draft.length.acceptance.threshold=0.5",
        f"--config.draft.length.acceptance.head={trained.workdir}/head",
    )
    with pairs.costs_are(c=0.1, v=1.2):
        run = pairs.run_decode(folders, tmp_path, *settings)
    assert run.code == 0, run.err
    assert [r["tokens"] for r in run.decodes] == [r["tokens"] for r in decoded.decodes]
    fast = run.metrics["speculative"]
    drafted = fast["drafted"] / fast["target_calls"]
    assert 1 <= drafted < pairs.GAMMA
    # What is predicted counts the passes that were made; the formula knows no rules.
    assert run.metrics["formula_speedup"] is None
    plain = run.metrics["autoregressive"]["tokens"]
    lines = len(pairs.LINES)
    predicted = (2 * lines + plain) / (
        2.5 * lines + fast["target_calls"] * (0.1 * drafted + 1.2)
    )
    assert run.metrics["predicted_speedup"] == pytest.approx(predicted)


@pytest.mark.slow
def test_a_head_of_another_pair_is_refused(folders, trained, tmp_path):
    head = f"draft.length.acceptance.head={trained.workdir}/head"
    other = shutil.copytree(folders.draft, tmp_path / "draft")
    pairs.edit_weights(other, lambda tensors: tensors["shared.weight"].__imul__(2))
    config = config_of(folders, "draft.length.rule=acceptance", head)
    config.draft.checkpoint = str(other)
    with pytest.raises(InputError, match="was trained for another draft"):
        build.build_pair(config)
    config.draft.checkpoint = str(folders.draft)
    config.target.checkpoint = str(shutil.copytree(folders.target, tmp_path / "target"))
    pairs.edit_weights(
        tmp_path / "target", lambda tensors: tensors["shared.weight"].__imul__(2)
    )
    with pytest.raises(InputError, match="was made for another target"):
        build.build_pair(config)
    config = config_of(folders, "draft.length.rule=acceptance", f"{head}/nowhere")
    with pytest.raises(InputError, match="acceptance.head: .*no drafter is kept"):
        build.build_pair(config)


TRAINING = {
    "held_out=0": "config.held_out is 0.0: a share between 0 and 1",
    "held_out=0.01": "config.held_out is 0.01 of 7 lines",
    "learning_rate=0": "config.learning_rate is 0.0",
    "temperature=-1": "config.temperature.temperature is -1.0",
    "hidden=0": "config.hidden is 0: at least 1",
    "draft.checkpoint=absent": "config.draft.checkpoint is 'absent'",
}


@pytest.mark.parametrize("setting", TRAINING)
def test_what_cannot_be_trained_is_refused(folders, sources, tmp_path, setting):
    run = train(folders, sources, tmp_path / "new", f"--config.{setting}")
    assert run.code == 2 and run.out == ""
    assert TRAINING[setting] in run.err and run.err.count("\n") == 1
    assert not (tmp_path / "new").exists()
