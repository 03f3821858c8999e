"""`experiments.lossless`: its verdicts, its exit code, what it refuses."""

from __future__ import annotations

import dataclasses

import pytest

from experiments import baseline, build, lossless
from specjax import token_verify, verify
from specjax.proof import verdicts
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "lossless.py"
SLOW = pytest.mark.slow
GOOD = verdicts.Line(
    name="token",
    kind="soft",
    lossless=True,
    joint_p=0.5,
    where="T=1, round 1",
    raw_p=0.1,
    z=1.25,
    accepted_p=0.5,
    accepted_where="T=1, round 1",
    greedy=True,
    independent=True,
)
CAUGHT = dataclasses.replace(
    GOOD, name="typical", lossless=False, joint_p=0.0, z=None, greedy=None
)


def run_lossless(workdir, *settings) -> pairs.Run:
    return pairs.run(
        lossless.main,
        workdir,
        f"--config={CONFIG}",
        f"--workdir={workdir}",
        *settings,
        define=lossless._define,
    )


@pytest.fixture
def seen(monkeypatch):
    """The verdicts are given; what was asked for is kept."""
    asked = {}

    def give(lines):
        def on_tables(rules, rows, rounds, seed):
            asked.update(rules=list(rules), rows=rows, rounds=rounds, seed=seed)
            return lines

        monkeypatch.setattr(lossless, "on_tables", on_tables)
        return asked

    return give


def test_all_good_is_0_and_written(seen, tmp_path):
    asked = seen([GOOD, CAUGHT])
    run = run_lossless(tmp_path)
    assert run.code == 0, run.err
    assert asked["rules"] == list(build.VERIFIERS)
    assert (asked["rows"], asked["rounds"]) == (6000, 3)
    assert "lossy, caught" in run.out and "lossless" in run.out
    assert run.metrics["lossless"] and run.metrics["faults"] == []
    assert run.metrics["rules"][0]["joint_p"] == 0.5
    assert run.effective["controls"] == ["lenient", "typical"]


BAD = {
    "token, soft drafts: its tokens do not follow the target's law at T=1, round 1 "
    "(p = 1e-09, corrected 1e-06)": dataclasses.replace(GOOD, joint_p=1e-6, raw_p=1e-9),
    "token, soft drafts: it accepts another number of drafts": dataclasses.replace(
        GOOD, z=8.0, accepted_p=1e-6
    ),
    "greedily it writes other tokens": dataclasses.replace(GOOD, greedy=False),
    "depend on other rows": dataclasses.replace(GOOD, independent=False),
    "typical, soft drafts: it is lossy and was not caught": dataclasses.replace(
        CAUGHT, joint_p=0.2
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_each_fault_is_1_and_named(seen, tmp_path, fault):
    seen([GOOD, BAD[fault], CAUGHT])
    run = run_lossless(tmp_path, "--fast", "--config.rules=token")
    assert run.code == 1 and not run.metrics["lossless"]
    assert fault in run.metrics["faults"][0]
    assert "FAILS" in run.out or "NOT CAUGHT" in run.out


def test_fast_and_chosen_rules(seen, tmp_path):
    asked = seen([GOOD])
    run = run_lossless(tmp_path, "--fast", "--config.rules=block,token")
    assert asked["rules"] == ["block", "token", "lenient", "typical"]
    assert (asked["rows"], asked["rounds"], asked["seed"]) == (1000, 1, 0)
    assert run.code == 0


REFUSED = {
    "--config.rules=token,lenient": "'lenient', which is knowingly lossy: there is",
    "--config.rules=token,tokn": "config.rules has 'tokn': it takes some of token, blo",
    "--config.rows=0": "config.rows is 0",
    "--config.fast.rounds=0": "config.fast.rounds is 0",
    "--config.seed=-1": "config.seed is -1",
    "--config.gamma=-3": "config.gamma is set and there is no pair",
    "--config.sampling.temperature=0.5": "config.sampling is set and there is no pair",
    "--config.fast.rows=5": "config.fast.rows is 5 and is not read here: add --fast",
    "--input=lines.txt": "--input=lines.txt is for a pair: set config.target.check",
    "--config.target.checkpoint=zoo/repair/target": "--input is missing",
}


@pytest.mark.parametrize("flag", REFUSED)
def test_what_is_refused(seen, tmp_path, flag):
    seen([GOOD])
    run = run_lossless(tmp_path / "new", flag)
    assert run.code == 2 and REFUSED[flag] in run.err, run.err
    assert run.err.count("\n") == 1 and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("draft.checkpoint=", "config.draft.checkpoint is empty"),
        ("tokens=99", "config.tokens is 99: at most config.max_length less"),
        ("draws=0", "config.draws is 0"),
        ("sampling.temperature=-1.0", "config.sampling.temperature is -1.0"),
        ("sampling.temperature=0.0", "config.sampling.temperature is 0: nothing"),
    ],
)
def test_a_pair_with_bad_settings(seen, folders, tmp_path, setting, message):
    seen([GOOD])
    run = run_lossless(tmp_path / "new", *pair_flags(folders), f"--config.{setting}")
    assert run.code == 2 and message in run.err, run.err
    assert not (tmp_path / "new").exists()


def test_fast_has_its_own_number_of_samples(seen, tmp_path):
    seen([GOOD])
    run = run_lossless(tmp_path / "new", "--fast", "--config.rows=9999")
    assert run.code == 2 and "config.rows is 9999 and is not read here" in run.err


def pair_flags(folders) -> tuple[str, ...]:
    return (
        f"--config.target.checkpoint={folders.target}",
        f"--config.draft.checkpoint={folders.draft}",
        f"--input={folders.input}",
        f"--config.buckets={pairs.BUCKET}",
        "--config.max_length=8",
        "--config.batch_size=35",
        "--config.draws=30",
        "--config.tokens=1",
        "--config.gamma=2",
    )


@SLOW
def test_a_pair_is_as_the_target_alone(seen, folders, tmp_path):
    seen([GOOD])
    run = run_lossless(tmp_path, *pair_flags(folders), "--config.rules=block,coupled")
    assert run.code == 0, run.out
    names = [result["name"] for result in run.metrics["pair"]]
    assert names == ["block", "coupled", "coupled, chosen"]
    for result in run.metrics["pair"]:
        assert result["sampled_p"] > 1e-3 and result["greedy"] == []
        assert 0 < result["compared"] <= len(pairs.LINES)
        assert result["coupled"] == (None if result["name"] == "block" else [])
    assert "identical" in run.out and "as the target" in run.out


@SLOW
def test_a_pair_that_writes_something_else(seen, folders, tmp_path, monkeypatch):
    """Greedily in one place, and always the same first token in samples."""
    generate = baseline.speculative_generate

    def wrong(*arguments, sampling, **settings):
        output = generate(*arguments, sampling=sampling, **settings)
        row, place, token = (3, 2, 8) if sampling.greedy else (slice(None), 1, 9)
        return output.replace(tokens=output.tokens.at[row, place].set(token))

    seen([GOOD])
    monkeypatch.setattr(baseline, "speculative_generate", wrong)
    run = run_lossless(tmp_path, *pair_flags(folders), "--config.rules=token")
    assert run.code == 1
    (result,) = run.metrics["pair"]
    sampled, greedy = result["faults"]
    assert "is not what the target samples alone" in sampled
    assert "greedily line 4 leaves the target's own at position 2, where" in greedy
    assert result["greedy"][0]["top2_gap"] > 1e-2 and result["sampled_p"] < 1e-3


@SLOW
def test_on_tables(tmp_path, monkeypatch):
    """A right rule, a wrong one that claims to be lossless, and the controls."""
    rules = {
        "token": token_verify,
        "wrong": verify.lenient(0.5).replace(lossless=True),
        "lenient": verify.lenient(0.5),
    }
    monkeypatch.setattr(build, "VERIFIERS", rules)
    run = run_lossless(tmp_path, "--config.rows=700", "--config.rounds=1")
    assert run.code == 1
    by_name = {}
    for line in run.metrics["rules"]:
        by_name.setdefault(line["name"], []).append(line)
    assert all(line["good"] for line in by_name["token"] + by_name["lenient"])
    assert all(line["greedy"] and line["independent"] for line in by_name["token"])
    assert [line["z"] is None for line in by_name["wrong"]] == [True] * 4
    assert any(fault.startswith("wrong, soft") for fault in run.metrics["faults"])
    assert all(fault.startswith("wrong") for fault in run.metrics["faults"])
