"""What is predicted before speculation runs: its arithmetic, its texts, its words."""

from __future__ import annotations

import csv
import itertools
import re

import numpy as np
import pytest

from configs import predict as predict_config
from experiments import acceptance, baseline, build, predict
from specjax import metrics, theory
from specjax.data import batches
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.sampling import Sampling
from specjax.verify import token_verify
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "predict.py"
COSTS = {
    "step": 0.01,
    "encode": 2.0,
    "draft_encode": 0.5,
    "gammas": [1, 3, 7],
    "verify": [1.1, 1.2, 1.6],
    "draft": [0.1, 0.3, 0.7],
}
GREEDY = predict.Way(0.0, Sampling(temperature=None), None)


def run_predict(folders: pairs.Folders, workdir, *settings: str) -> pairs.Run:
    """Runs the command on the pair; `settings` take the place of the usual ones."""
    flags = (
        f"--config={CONFIG}",
        f"--workdir={workdir}",
        f"--input={folders.input}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.draft.checkpoint={folders.draft}",
        f"--config.buckets={pairs.BUCKET}",
        f"--config.max_length={pairs.MAX_LENGTH}",
        "--config.task_prefix=",
        "--config.batch_size=7",
        "--config.draws=1",
    )
    flags = pairs.less(flags, settings)
    return pairs.run(predict.main, workdir, *flags, *settings, define=predict._define)


def made_up(kept: list[np.ndarray], longest: int) -> acceptance.Acceptance:
    """Texts with these chances, one batch each."""
    return acceptance.Acceptance(
        alpha=float(np.concatenate(kept).mean()),
        survival=acceptance.survival_of(kept, longest),
        tokens=[[len(own)] for own in kept],
        kept=[[own] for own in kept],
    )


def chances(seed: int, *lengths: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.uniform(size=length) for length in lengths]


@pytest.mark.parametrize("gamma", [1, 2, 5])
def test_target_calls_are_those_of_every_course(gamma):
    (kept,) = chances(0, 4)
    calls = 0.0
    for course in itertools.product((True, False), repeat=len(kept)):
        weight = np.prod(np.where(course, kept, 1 - kept))
        at = rounds = 0
        while at < len(kept):
            run = itertools.takewhile(bool, course[at : at + gamma])
            at, rounds = at + len(list(run)) + 1, rounds + 1
        calls += weight * rounds
    assert acceptance.round_starts(kept, gamma).sum() == pytest.approx(calls)


def test_equal_chances_are_those_of_theory():
    kept = np.full(20, 0.75)
    for gamma in (1, 3, 7, 25):
        survival = theory.iid_survival(0.75, gamma)
        calls = acceptance.round_starts(kept, gamma).sum()
        assert calls == pytest.approx(theory.expected_calls(survival, 20))
        np.testing.assert_allclose(acceptance.survival_of([kept], gamma), survival)


def test_survival_is_that_of_the_places_where_rounds_start():
    # Every round ends at a token that is never kept: drafts start after it, or first.
    kept = np.array([1.0, 0.0, 1.0, 0.0, 1.0, 0.0])
    assert acceptance.survival_of([kept], 2) == [1.0, 0.0]
    # Over all prefixes, half of the first drafts would stand.
    assert kept.mean() == 0.5


def test_predictions_are_those_of_theory():
    accepted = made_up(chances(1, 9, 13), 7)
    found = predict.predict(GREEDY, accepted, COSTS)
    first, *choices = found["choices"]
    assert first["gamma"] == 0 and [own["gamma"] for own in choices] == [*range(1, 8)]
    ratios = ("predicted", "formula", "loop", "tokens_per_call")
    assert [first[name] for name in ratios] == [1.0] * 4
    for own in choices:
        gamma, c, v = own["gamma"], own["c"], own["v"]
        assert c == pytest.approx(0.1)
        calls = sum(map(sum, accepted.calls(gamma)))
        assert own["formula"] == theory.walltime_factor(found["alpha"], gamma, c)
        survival = found["survival"][:gamma]
        assert own["loop"] == theory.speedup_from_survival(survival, c, v)
        assert own["tokens_per_call"] == pytest.approx(22 / calls)
        whole = (2 * 2.0 + 22) / (2 * 2.5 + calls * (gamma * 0.1 + v))
        assert own["predicted"] == pytest.approx(whole)
    assert [choices[i]["v"] for i in (0, 2, 6)] == COSTS["verify"]
    assert choices[4]["v"] == pytest.approx(1.4)  # halfway
    predicted = [own["predicted"] for own in found["choices"]]
    assert predicted[found["best"]] == max(predicted)


@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0])
def test_a_draft_as_slow_as_its_target_never_gains(alpha):
    slow = COSTS | {"draft": [1.0, 3.0, 7.0]}
    accepted = made_up([np.full(length, alpha) for length in (5, 30)], 7)
    found = predict.predict(GREEDY, accepted, slow)
    for own in found["choices"][1:]:
        assert (
            max(own["predicted"], own["formula"], own["loop"]) <= 1 + 1e-12
        )  # rounding
    assert found["best"] == 0 and "would not pay" in found["verdict"]


def test_the_verdict_names_the_flags():
    way = predict.Way(0.7, Sampling(temperature=0.7), None)
    found = predict.predict(way, made_up([np.ones(24)], 7), COSTS)
    # Three rounds of 8 tokens: 26 / (2.5 + 3 * (0.7 + 1.6)).
    assert found["best"] == 7 and found["survival"] == [1.0] * 7
    assert "T = 0.7: speculation would pay: 2.77x with gamma 7" in found["verdict"]
    flags = "--config.gamma=7 --config.runs=sampled --config.sampling.temperature=0.7"
    assert found["verdict"].endswith(flags)
    # 26 / (2.5 + 3 * (0.7 + 7)): as likely none at all.
    slow = COSTS | {"verify": [7.0] * 3}
    found = predict.predict(GREEDY, made_up([np.ones(24)], 7), slow)
    assert (
        "greedy: speculation would hardly pay: 1.02x with gamma 7" in found["verdict"]
    )


def test_the_longest_draft_is_the_drafters_own():
    heads = np.zeros((3, 4, 4), np.float32)
    medusa = MedusaDrafter(np.ones(4, np.float32), heads, None, None, tap=0)
    assert predict.longest_gamma(medusa, 16) == 3
    assert predict.longest_gamma(medusa, 2) == 2
    assert predict.longest_gamma(NgramDrafter(), 16) == 16


@pytest.mark.slow
def test_greedy_counts_are_those_of_the_decode(folders, decoded, tmp_path):
    with pairs.costs_are(c=0.1, v=1.2):
        run = run_predict(folders, tmp_path, "--config.max_gamma=5")
    assert run.code == 0, run.err
    greedy, sampled = run.metrics["temperatures"]
    assert (greedy["name"], sampled["name"]) == ("greedy", "T = 1")
    own = greedy["choices"][pairs.GAMMA]
    speculative = decoded.metrics["speculative"]
    assert greedy["tokens"] == speculative["tokens"]
    calls = speculative["target_calls"]
    assert own["tokens_per_call"] == pytest.approx(greedy["tokens"] / calls)
    assert greedy["alpha"] == pytest.approx(decoded.metrics["alpha"])
    assert 0.3 < sampled["alpha"] < 1 and not sampled["counted"]
    for found in (greedy, sampled):
        for choice in found["choices"][1:]:
            gamma, c, v = choice["gamma"], choice["c"], choice["v"]
            assert (c, v) == (pytest.approx(0.1), 1.2)
            formula = theory.walltime_factor(found["alpha"], gamma, c)
            assert choice["formula"] == formula
        assert found["verdict"] in " ".join(run.out.split())
    with open(tmp_path / "predict.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 6
    predicted = [choice["predicted"] for choice in greedy["choices"]]
    assert [float(row["predicted"]) for row in table[:6]] == predicted
    assert [row["best"] for row in table[:6]].index("True") == greedy["best"]
    text = (tmp_path / "predict.md").read_text()
    assert len(re.findall(r"^\| \**\d", text, re.M)) == 2 * 6
    assert greedy["verdict"] in text and sampled["verdict"] in text
    assert run.effective["max_gamma"] == 5


def ratio(tokens: np.ndarray, calls: np.ndarray) -> tuple[float, float]:
    """Tokens per call of all rows, and its standard error."""
    whole = tokens.sum() / calls.sum()
    spread = np.std(tokens - whole * calls) / np.sqrt(len(calls))
    return whole, spread / calls.mean()


@pytest.mark.slow
def test_sampled_counts_are_those_of_decodes(folders):
    config = predict_config.get_config()
    config.target.checkpoint = str(folders.target)
    config.draft.checkpoint = str(folders.draft)
    pair = build.build_pair(config)
    rows = [pair.tokenizer.encode(line) for line in pairs.LINES for _ in range(64)]
    (part,) = batches.inference_batches(rows, len(rows), (pairs.BUCKET,))
    settings = dict(
        sampling=Sampling(num_tokens=pair.num_tokens),
        draft_sampling=None,
        max_length=pairs.MAX_LENGTH,
    )
    first, second = (build.row_keys(seed, len(rows)) for seed in (0, 1))
    accepted = acceptance.accept(pair, [part], first, longest=pairs.GAMMA, **settings)
    assert accepted.kept is not None
    kept = np.concatenate(accepted.kept[0])
    assert kept.mean() == pytest.approx(accepted.alpha, abs=0.02)
    stats = baseline.speculate(
        pair.target,
        pair.drafter,
        part,
        second,
        verifier=token_verify,
        gamma=pairs.GAMMA,
        **settings,
    ).stats
    counted, error = ratio(np.asarray(stats.emitted), np.asarray(stats.target_calls))
    predicted, own_error = ratio(
        np.array(accepted.tokens[0]), np.array(accepted.calls(pairs.GAMMA)[0])
    )
    assert error < 0.03 and own_error < 0.03
    assert abs(counted - predicted) < 3 * np.hypot(error, own_error)


@pytest.mark.slow
def test_a_draft_that_is_its_target_is_always_right(folders, tmp_path):
    with pairs.costs_are(c=0.1, v=1.2):
        run = run_predict(
            folders,
            tmp_path,
            f"--config.draft.checkpoint={folders.target}",
            "--config.max_gamma=3",
            "--config.batch_size=1",
            "--config.draws=2",
            "--config.temperatures=0.7",
        )
    assert run.code == 0, run.err
    (found,) = run.metrics["temperatures"]
    assert found["texts"] == 2 * len(pairs.LINES)
    assert found["alpha"] == pytest.approx(1, abs=1e-5)
    assert found["survival"] == pytest.approx([1, 1, 1], abs=1e-5)
    # Every round writes 4 tokens, but for the last of a text, which lacks 3 at most.
    calls = found["tokens"] / found["choices"][3]["tokens_per_call"]
    assert found["tokens"] / 4 <= calls + 1e-3
    assert calls <= (found["tokens"] + 3 * found["texts"]) / 4 + 1e-3


@pytest.mark.slow
def test_depths_of_other_drafters_are_counted(folders, tmp_path, monkeypatch):
    def nodes(self, gamma):
        if gamma > 2:
            raise build.errors.InputError("two at most")
        return gamma

    monkeypatch.setattr(NgramDrafter, "nodes", nodes)
    with pairs.costs_are(c=0.01, v=1.2):
        run = run_predict(
            folders, tmp_path, "--config.drafter=ngram", "--config.temperatures=0"
        )
    assert run.code == 0, run.err
    (found,) = run.metrics["temperatures"]
    assert found["counted"] and len(found["choices"]) == 3
    assert 0 <= found["survival"][1] <= found["survival"][0] < 1
    assert 0 <= found["alpha"] < 1
    words = " ".join(run.out.split())
    assert "the drafter 'ngram' drafts at most 2 tokens" in words
    assert "survival was counted in one decode with gamma 2" in words


@pytest.mark.slow
def test_costs_are_measured(folders, tmp_path):
    run = run_predict(
        folders,
        tmp_path,
        "--config.max_gamma=1",
        "--config.temperatures=0",
        "--config.timing.seconds=1e-3",
        "--config.timing.repeats=2",
    )
    assert run.code == 0, run.err
    (found,) = run.metrics["temperatures"]
    costs, choices = found["costs"], found["choices"]
    assert costs["gammas"] == [1] and costs["step"] > 0 and costs["encode"] > 0
    assert [own["v"] for own in choices[1:]] == costs["verify"]
    assert [own["c"] for own in choices[1:]] == pytest.approx(costs["draft"])


INPUTS = {
    "an empty line": ("many files\n\n", "line 2 is empty"),
    "nothing": ("", "is empty: it needs a line"),
    "too long": (f"many files\n{' '.join(pairs.LINES)}\n", "line 2 has"),
}
SETTINGS = {
    "temperatures=()": "config.temperatures is (): numbers from 0 (greedy) on",
    "temperatures=0,-1": "config.temperatures has -1: numbers from 0",
    "temperatures=warm": "config.temperatures has 'warm'",
    "temperatures=True": "config.temperatures has True",
    "temperatures=1,1.0": "config.temperatures is (1, 1.0): each only once",
    "temperatures=0 config.sampling.top_k=5": "config.sampling is set and config.temp",
    "temperatures=0 config.draft_sampling.top_p=0.5": "config.draft_sampling is set",
    "sampling.top_p=1.5": "config.sampling.top_p is 1.5",
    "sampling.temperature=1": "flags: the config has no --config.sampling",
    "max_gamma=0": "config.max_gamma is 0: at least 1",
    "max_gamma=-2": "config.max_gamma is -2",
    "gamma=4": "flags: the config has no",
    "draws=0": "config.draws is 0: at least 1",
    "batch_size=0": "config.batch_size is 0",
    "max_length=1": "config.max_length is 1: at least 2",
    "timing.repeats=0": "config.timing.repeats is 0",
    "timing.seconds=0": "config.timing.seconds is 0.0: above 0",
    "seed=-1": "config.seed is -1",
    "buckets=64,32": "length buckets [64, 32] are wrong",
    "drafter=tree": "config.drafter is 'tree': it must be one of model, ngram",
    "draft.length.rule=confidence": "config.draft.length.rule is 'confidence'",
    "dtype=float16": "config.dtype is 'float16'",
    "target.checkpoint=absent": "config.target.checkpoint is 'absent': no such folder",
    "draft.checkpoint=absent": "config.draft.checkpoint is 'absent': no such folder",
    "draft.checkpoint=": "config.draft.checkpoint is empty",
}


@pytest.fixture
def refused(folders, tmp_path, monkeypatch):
    """Runs a prediction that must end before any work, and returns its sentence."""

    def work(*args, **settings):
        raise AssertionError("work began")

    monkeypatch.setattr(baseline, "decode", work)
    monkeypatch.setattr(metrics, "measure_costs", work)

    def run(*settings: str) -> str:
        run = run_predict(folders, tmp_path / "new", *settings)
        assert run.code == 2, run.out
        assert run.err.startswith("error: ") and run.err.count("\n") == 1, run.err
        assert run.out == "" and not (tmp_path / "new").exists()
        return run.err

    return run


@pytest.mark.parametrize("name", INPUTS)
def test_input(refused, tmp_path, name):
    content, expected = INPUTS[name]
    path = tmp_path / "lines.txt"
    path.write_text(content)
    sentence = refused(f"--input={path}")
    assert expected in sentence and f"--input={path}" in sentence


def test_no_input(refused, tmp_path):
    assert "no such file" in refused(f"--input={tmp_path / 'absent.txt'}")
    assert "--input is missing" in refused("--input=", "--config.input=")


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(refused, setting):
    flags = [f"--config.{own.removeprefix('config.')}" for own in setting.split()]
    assert SETTINGS[setting] in refused(*flags)
