"""`experiments.evaluate` scores text right and refuses what it cannot score."""

import pathlib
import shutil
import sys

import numpy as np
import pytest

from experiments import baseline, evaluate
from specjax.data import pairs as text_pairs
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "repair_evaluate.py"


def run_evaluate(folders, path, workdir, *settings) -> pairs.Run:
    flags = (
        f"--config={CONFIG}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.draft.checkpoint={folders.draft}",
        f"--config.buckets={pairs.BUCKET}",
        f"--config.max_length={pairs.MAX_LENGTH}",
        "--config.batch_size=3",
        "--config.prefix=",
        f"--input={path}",
        f"--workdir={workdir}",
    )
    flags = pairs.less(flags, settings)
    return pairs.run(evaluate.main, workdir, *flags, *settings, define=evaluate._define)


@pytest.fixture(scope="module")
def references(decoded, tmp_path_factory) -> pathlib.Path:
    """The target's own output, but for two lines."""
    path = tmp_path_factory.mktemp("references") / "test.jsonl"
    texts = [record["text"] for record in decoded.decodes]
    texts[1] += " x"
    texts[4] = "quite another text"
    rows = zip(pairs.LINES, texts, strict=True)
    text_pairs.save_pairs(path, [text_pairs.Pair(*row) for row in rows])
    return path


def test_scores_of_known_outputs(folders, decoded, references, tmp_path):
    run = run_evaluate(folders, references, tmp_path)
    assert run.code == 0, run.err
    metrics = run.metrics
    lines = run.read("outputs.jsonl")
    assert [line["source"] for line in lines] == list(pairs.LINES)
    assert [line["target"] for line in lines] == [r["text"] for r in decoded.decodes]
    finished = [record["finished"] for record in decoded.decodes]
    assert [line["target_finished"] for line in lines] == finished
    assert metrics["target"]["cut"] == finished.count(False) > 0
    assert metrics["target"]["exact_match"] == pytest.approx(5 / 7)
    assert metrics["target"]["exact_match"] > metrics["draft"]["exact_match"]
    for name in ("bleu", "chrf", "rouge1", "rouge2", "rouge_l"):
        assert metrics["target"][name] > metrics["draft"][name], name
    # Each line weighs as its tokens do, and they are decoded alike.
    assert metrics["alpha"]["greedy"] == pytest.approx(decoded.metrics["alpha"])
    sampled = decoded.metrics["sampled"]["alpha"]
    assert metrics["alpha"]["sampled"] == pytest.approx(sampled)
    assert run.effective["lines"] == 7
    # The n-gram drafter, asked at every place, agrees where a copy is right.
    ngram = metrics["alpha_ngram"]
    assert 0 < ngram["greedy"] < 1 and 0 < ngram["sampled"] < 1
    assert metrics["source"]["exact_match"] == 0 < metrics["source"]["chrf"]


def test_without_a_draft_there_is_no_alpha(folders, references, tmp_path):
    settings = ("--config.draft.checkpoint=", "--config.limit=3")
    run = run_evaluate(folders, references, tmp_path, *settings)
    assert run.code == 0, run.err
    assert (
        set(run.metrics) == {"source", "target"} and len(run.read("outputs.jsonl")) == 3
    )


def test_sources_are_scored_without_the_tasks_prefix(folders, tmp_path):
    path = tmp_path / "test.tsv"
    path.write_text("fix: a small server\ta small server\n")
    settings = ("--config.draft.checkpoint=", "--config.prefix=fix: ")
    run = run_evaluate(folders, path, tmp_path / "run", *settings)
    assert run.code == 0 and run.metrics["source"]["character_error_rate"] == 0
    other = ("--config.draft.checkpoint=", "--config.prefix=mend: ")
    run = run_evaluate(folders, path, tmp_path / "other", *other)
    assert run.code == 2 and "pair 1 does not begin with config.prefix" in run.err


SETTINGS = {
    "batch_size=0": "config.batch_size is 0",
    "limit=-1": "config.limit is -1",
    "max_length=1": "config.max_length is 1",
    "seed=-1": "config.seed is -1",
    "buckets=64,32": "length buckets [64, 32] are wrong",
    "buckets=4": "line 1 has",
    "dtype=float16": "config.dtype is 'float16'",
    "target.checkpoint=absent": "config.target.checkpoint is 'absent'",
    "draft.checkpoint=absent": "config.draft.checkpoint is 'absent'",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_bad_settings(folders, references, tmp_path, monkeypatch, setting):
    monkeypatch.setattr(baseline, "decode", None)
    workdir = tmp_path / "new"
    run = run_evaluate(folders, references, workdir, f"--config.{setting}")
    assert run.code == 2 and SETTINGS[setting] in run.err, run.err
    assert run.err.count("\n") == 1 and not workdir.exists()


def test_a_draft_with_other_dead_rows(folders, references, tmp_path):
    """Its padding is its own: here more of it than the target has."""
    draft = tmp_path / "draft"
    shutil.copytree(folders.draft, draft)

    def pad(tensors):
        for name in ("shared.weight", "lm_head.weight"):
            rows = np.full((20, tensors[name].shape[1]), 9.0, np.float32)
            tensors[name] = np.concatenate([tensors[name], rows])

    pairs.edit_weights(draft, pad)
    pairs.edit_config(draft, vocab_size=pairs.KNOWN + 20)
    flag = f"--config.draft.checkpoint={draft}"
    run = run_evaluate(folders, references, tmp_path / "run", flag)
    assert run.code == 0, run.err
    plain = run_evaluate(folders, references, tmp_path / "plain")
    assert run.read("outputs.jsonl") == plain.read("outputs.jsonl")


@pytest.mark.parametrize("package", ["sacrebleu", "rapidfuzz", "rouge_score"])
def test_scorers_that_are_not_installed(
    folders, references, tmp_path, monkeypatch, package
):
    monkeypatch.setitem(sys.modules, package, None)
    run = run_evaluate(folders, references, tmp_path / "new")
    assert run.code == 2 and f"{package} is not installed: pip install" in run.err
