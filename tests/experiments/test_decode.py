"""`experiments.decode` from flags to files, on a tiny pair."""

import dataclasses
import math
import os
import pathlib

import jax
import pytest

from experiments import decode, side_by_side
from specjax import theory
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.report import table
from tests import pairs

GREEDY, SAMPLED = "--config.runs=greedy", "--config.runs=sampled"
KEYS = {
    "gamma": int,
    "autoregressive": dict,
    "speculative": dict,
    "speedup": float,
    "predicted_speedup": float,
    "formula_speedup": float,
    "alpha": float,
    "acceptance_rate": float,
    "survival": list,
    "block_efficiency": float,
    "cost_ratio": float,
    "verify_ratio": float,
    "encode_ratio": float,
    "compile_seconds": float,
    "mismatches": list,
}
SPEED = {"tokens", "seconds", "tokens_per_second", "cut"}
COUNTS = {"target_calls", "drafted", "accepted"}


def numbers(value):
    """Every number in nested JSON."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield value


def check_counts(metrics, records, gamma):
    """The counts of one mode agree among themselves and with the lines' own."""
    fast = metrics["speculative"]
    calls, accepted = fast["target_calls"], fast["accepted"]
    assert fast["tokens"] == sum(len(record["tokens"]) for record in records)
    assert calls == sum(record["target_calls"] for record in records)
    assert accepted == sum(record["accepted"] for record in records)
    assert fast["drafted"] == gamma * calls
    assert 0 < accepted < fast["drafted"], "nothing is shown by all or none accepted"
    assert metrics["acceptance_rate"] == pytest.approx(accepted / fast["drafted"])
    assert metrics["block_efficiency"] == pytest.approx(fast["tokens"] / calls)
    assert len(metrics["survival"]) == gamma
    assert sum(metrics["survival"]) * calls == pytest.approx(accepted)
    # Tokens cut off at EOS or for want of budget were accepted all the same.
    assert 1 < metrics["block_efficiency"] <= 1 + sum(metrics["survival"])
    for way in ("autoregressive", "speculative"):
        rate = metrics[way]["tokens"] / metrics[way]["seconds"]
        assert metrics[way]["tokens_per_second"] == pytest.approx(rate)


def test_metrics_have_every_figure(decoded):
    assert decoded.code == 0, decoded.err
    metrics = decoded.metrics
    for mode in (metrics, metrics["sampled"]):
        for name, kind in KEYS.items():
            assert isinstance(mode[name], kind), name
        assert set(mode["autoregressive"]) == SPEED
        assert set(mode["speculative"]) == SPEED | COUNTS
        assert mode["gamma"] == pairs.GAMMA
        assert 0 < mode["alpha"] < 1
        assert mode["speedup"] > 0 and mode["predicted_speedup"] > 0
        assert all(map(math.isfinite, numbers(mode)))
    assert metrics["identical"] is True and metrics["mismatches"] == []
    assert metrics["sampled"]["identical"] is None


def test_lines_follow_the_input(decoded, folders):
    records = decoded.decodes
    assert [record["input"] for record in records] == list(pairs.LINES)
    assert len({len(record["tokens"]) for record in records}) > 2
    tokenizer = tokenizers.load_tokenizer(folders.target)
    known = tokenizer.vocab_size
    for record in records:
        assert record["identical"] is True
        assert record["autoregressive_tokens"] == record["tokens"]
        for own in (record, record["sampled"]):
            tokens = own["tokens"]
            assert own["text"] == tokenizer.decode(tokens)
            assert 1 <= len(tokens) <= pairs.MAX_LENGTH - 1
            assert all(0 <= token < known for token in tokens), "a dead row was written"
            ended = tokens[-1] == tokenizer.eos_id
            assert ended or len(tokens) == pairs.MAX_LENGTH - 1
            assert own["finished"] is ended
            assert tokenizer.eos_id not in tokens[:-1]
    greedy, sampled = (
        [own["tokens"] for own in owns]
        for owns in (records, [record["sampled"] for record in records])
    )
    assert greedy != sampled
    assert any(tokens[-1] == tokenizer.eos_id for tokens in greedy)
    names = {path.name for path in decoded.workdir.iterdir()}
    assert names == {"manifest.json", *decode.WRITTEN}
    page = (decoded.workdir / "decode.html").read_text(encoding="utf-8")
    assert all(record["input"] in page for record in records)
    assert "https://" not in page  # it needs nothing else


def test_outputs_that_were_cut_are_counted(decoded):
    cut = [not record["finished"] for record in decoded.decodes]
    assert 0 < sum(cut) < len(cut)
    assert decoded.metrics["speculative"]["cut"] == sum(cut)
    assert decoded.metrics["autoregressive"]["cut"] == sum(cut)
    sampled = [not record["sampled"]["finished"] for record in decoded.decodes]
    assert decoded.metrics["sampled"]["speculative"]["cut"] == sum(sampled)
    assert "outputs cut at max_length" in decoded.out


def test_what_was_decoded_before_a_stop_stays_and_is_not_taken_for_the_whole(
    decoded, folders, tmp_path, monkeypatch
):
    (tmp_path / "decodes.jsonl").write_text("of an earlier run\n")
    record, calls = side_by_side._record, []

    def stop_at_the_third(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return record(*arguments)

    monkeypatch.setattr(side_by_side, "_record", stop_at_the_third)
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, GREEDY)
    assert run.code == 130
    assert not (tmp_path / "decodes.jsonl").exists()
    rows = [own["row"] for own in run.read("decodes.jsonl.partial")]
    assert len(rows) == 2
    for own in run.read("decodes.jsonl.partial"):
        assert own["tokens"] == decoded.decodes[own["row"]]["tokens"]


def test_counts_agree(decoded):
    metrics, records = decoded.metrics, decoded.decodes
    check_counts(metrics, records, pairs.GAMMA)
    sampled = [record["sampled"] for record in records]
    check_counts(metrics["sampled"], sampled, pairs.GAMMA)
    plain = metrics["autoregressive"]["tokens"]
    assert plain == metrics["speculative"]["tokens"]


def test_manifest_names_what_was_in_use(decoded, folders):
    manifest = decoded.read("manifest.json")
    effective = manifest["effective"]
    assert effective["gamma"] == {"greedy": pairs.GAMMA, "sampled": pairs.GAMMA}
    assert effective["dead_rows"] == pairs.DEAD_ROWS
    assert effective["num_tokens"] == pairs.KNOWN
    assert effective["input"] == str(folders.input)
    unchanged = {"temperature": 1.0, "top_k": None, "top_p": None}
    for side in ("sampling", "draft_sampling"):
        assert effective[side]["greedy"]["temperature"] == "greedy"
        assert effective[side]["sampled"] == unchanged
    assert manifest["config"]["gamma"] == pairs.GAMMA
    assert manifest["config"]["seed"] == 0
    assert manifest["config"]["dtype"] == "float32"
    assert {"python", "jax", "jaxlib", "flax", "numpy"} <= set(manifest["versions"])
    assert manifest["device"]["platform"] == "cpu"
    assert f"--config.gamma={pairs.GAMMA}" in manifest["command"]


def test_what_is_shown(decoded):
    out = decoded.out
    for text in ("drafted, accepted", "greedy", "sampled", "speedup", "alpha"):
        assert text in out
    for line in pairs.LINES:
        assert line in out
    assert f"ids from {pairs.KNOWN} on" in out
    for mode in ("greedy", "sampled"):
        metrics = decoded.metrics if mode == "greedy" else decoded.metrics[mode]
        assert (f"{mode}: speculation LOSES" in out) == (
            metrics["speedup"] < table.LOSS
        )
    assert decoded.err == ""


@pytest.mark.slow
def test_bfloat16(decoded, folders, tmp_path):
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, GREEDY, "--config.dtype=bfloat16")
    assert run.code == 0, run.out
    check_counts(run.metrics, run.decodes, pairs.GAMMA)
    # Another rounding: some tokens may differ, most do not.
    same = [
        one == other
        for own, exact in zip(run.decodes, decoded.decodes, strict=True)
        for one, other in zip(own["tokens"], exact["tokens"], strict=False)
    ]
    assert sum(same) > len(same) / 2


@pytest.mark.slow
def test_costs_are_measured(decoded, folders, tmp_path):
    jax.clear_caches()
    with pairs.quick_costs():
        run = pairs.run_decode(folders, tmp_path, GREEDY)
    assert run.code == 0, run.err
    assert run.metrics["cost_ratio"] > 0 and run.metrics["verify_ratio"] > 0
    assert run.metrics["encode_ratio"] > 0
    made_up = decoded.metrics
    for name in ("cost_ratio", "verify_ratio", "encode_ratio", "predicted_speedup"):
        assert run.metrics[name] != made_up[name]
    # Tracing at least took time, and is no part of the decodes' own.
    assert run.metrics["compile_seconds"] >= 0  # 0 where another test compiled it


def test_gamma_is_obeyed(decoded, folders, tmp_path):
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, GREEDY, "--config.gamma=2")
    assert run.code == 0 and run.effective["gamma"] == {"greedy": 2}
    check_counts(run.metrics, run.decodes, 2)
    assert [r["tokens"] for r in run.decodes] == [r["tokens"] for r in decoded.decodes]
    drafted = run.metrics["speculative"]["drafted"]
    assert drafted != decoded.metrics["speculative"]["drafted"]
    # One run alone: nothing is said of the other.
    assert "sampled" not in run.metrics and "sampled" not in run.decodes[0]
    assert "sampled" not in run.out


def test_another_seed_changes_the_samples_alone(decoded, folders, tmp_path):
    with pairs.costs_are():
        same = pairs.run_decode(folders, tmp_path / "same", SAMPLED)
        other = pairs.run_decode(folders, tmp_path, SAMPLED, "--config.seed=1")
    tokens = [record["sampled"]["tokens"] for record in decoded.decodes]
    assert [record["sampled"]["tokens"] for record in same.decodes] == tokens
    assert [record["sampled"]["tokens"] for record in other.decodes] != tokens
    # The only run stands at the top, and under its name as always.
    assert same.metrics["identical"] is None and "greedy" not in same.metrics
    top = dict(same.metrics)
    assert top.pop("sampled") == top
    for record in same.decodes:
        assert record["tokens"] == record["sampled"]["tokens"]
        assert record["text"] == record["sampled"]["text"]
    check_counts(same.metrics, [r["sampled"] for r in same.decodes], pairs.GAMMA)


def test_sampling_reaches_both_models(decoded, folders, tmp_path):
    settings = (
        "--config.sampling.temperature=0.5",
        "--config.draft_sampling.temperature=2",
    )
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, SAMPLED, *settings)
    assert run.code == 0, run.err
    assert run.effective["sampling"]["sampled"]["temperature"] == 0.5
    assert run.effective["draft_sampling"]["sampled"]["temperature"] == 2.0
    # A flat draft in front of a sharp target.
    assert run.metrics["alpha"] < decoded.metrics["sampled"]["alpha"] / 2


def test_a_frozen_target_of_temperature_0_writes_the_greedy_text(
    decoded, folders, tmp_path
):
    with pairs.costs_are():
        run = pairs.run_decode(
            folders, tmp_path, SAMPLED, "--config.sampling.temperature=0"
        )
    greedy = [record["tokens"] for record in decoded.decodes]
    assert [record["sampled"]["tokens"] for record in run.decodes] == greedy


def test_block_verification(decoded, folders, tmp_path):
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, SAMPLED, "--config.verifier=block")
    assert run.code == 0, run.err
    check_counts(run.metrics, [r["sampled"] for r in run.decodes], pairs.GAMMA)
    assert run.metrics["alpha"] == pytest.approx(decoded.metrics["sampled"]["alpha"])
    assert [r["sampled"] for r in run.decodes] != [
        r["sampled"] for r in decoded.decodes
    ]


def test_ngram_drafter_needs_no_draft(decoded, folders, tmp_path):
    settings = ("--config.drafter=ngram", "--config.draft.checkpoint=")
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, GREEDY, *settings)
    assert run.code == 0, run.err
    assert [r["tokens"] for r in run.decodes] == [r["tokens"] for r in decoded.decodes]
    fast = run.metrics["speculative"]
    # It drafts as much as it finds, which is less than gamma at every call.
    assert 0 < fast["drafted"] < pairs.GAMMA * fast["target_calls"]
    assert 0 < fast["accepted"] < fast["drafted"]
    assert 0 < run.metrics["alpha"] < 1


@pytest.mark.slow
def test_the_tasks_prefix_is_put_before_each_line(decoded, folders, tmp_path):
    path = tmp_path / "prefixed.txt"
    path.write_text("".join(f"small {line}\n" for line in pairs.LINES))
    own = dataclasses.replace(folders, input=path)
    with pairs.costs_are():
        by_hand = pairs.run_decode(own, tmp_path / "one", GREEDY)
        prefix = "--config.task_prefix=small "
        run = pairs.run_decode(folders, tmp_path / "two", GREEDY, prefix)
    tokens = [record["tokens"] for record in run.decodes]
    assert tokens == [record["tokens"] for record in by_hand.decodes]
    assert tokens != [record["tokens"] for record in decoded.decodes]
    assert [record["input"] for record in run.decodes] == list(pairs.LINES)


@pytest.mark.slow
def test_batches_change_no_token(decoded, folders, tmp_path):
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, GREEDY, "--config.batch_size=3")
    assert run.code == 0, run.err
    for own, alone in zip(run.decodes, decoded.decodes, strict=True):
        for name in ("input", "tokens", "target_calls", "accepted"):
            assert own[name] == alone[name]
    # Seven lines in batches of three: the rows that fill up count for nothing.
    check_counts(run.metrics, run.decodes, pairs.GAMMA)
    # A batch's loops go on until its slowest row ends: that is what is predicted from.
    tokenizer = tokenizers.load_tokenizer(folders.target)
    lines = [tokenizer.encode(line) for line in pairs.LINES]
    parts = list(batches.inference_batches(lines, 3, (pairs.BUCKET,)))
    rows = [part.rows[part.valid].tolist() for part in parts]
    assert sorted(map(len, rows)) == [1, 3, 3]
    plain = [
        [len(run.decodes[row]["autoregressive_tokens"]) for row in own] for own in rows
    ]
    fast = [[run.decodes[row]["target_calls"] for row in own] for own in rows]
    assert any(len(set(own)) > 1 for own in fast), "or the longest is any"
    costs = pairs.costs(pairs.GAMMA)
    assert run.metrics["predicted_speedup"] == pytest.approx(
        theory.speedup_from_counts(
            sum(map(max, plain)),
            sum(map(max, fast)),
            pairs.GAMMA,
            costs.cost_ratio,
            costs.verify_ratio,
            3 * costs.encode_ratio,
            3 * costs.draft_encode_ratio,
        )
    )


@pytest.fixture
def short_search(monkeypatch):
    """gamma=auto looks at the gamma of the other tests and at 1."""
    monkeypatch.setattr(side_by_side, "_AUTO_GAMMAS", (1, pairs.GAMMA))


def test_auto_takes_what_pays(decoded, folders, tmp_path, short_search):
    with pairs.costs_are(c=0.001, v=1.0):
        run = pairs.run_decode(folders, tmp_path, GREEDY, "--config.gamma=auto")
    assert run.code == 0, run.err
    assert run.metrics["gamma"] == pairs.GAMMA
    assert run.effective["gamma"] == {"greedy": pairs.GAMMA}
    assert run.read("manifest.json")["config"]["gamma"] == "auto"
    check_counts(run.metrics, run.decodes, pairs.GAMMA)
    assert "chose plain decoding" not in run.out


def test_auto_may_decide_for_plain_decoding(decoded, folders, tmp_path, short_search):
    with pairs.costs_are(c=5.0, v=3.0):
        run = pairs.run_decode(folders, tmp_path, GREEDY, "--config.gamma=auto")
    assert run.code == 0, run.err
    assert "gamma=auto chose plain decoding" in " ".join(run.out.split())
    metrics = run.metrics
    assert metrics["gamma"] == 0 and run.effective["gamma"] == {"greedy": 0}
    assert metrics["speculative"]["drafted"] == 0
    assert metrics["acceptance_rate"] is None and metrics["survival"] == []
    assert metrics["block_efficiency"] == 1.0 and metrics["predicted_speedup"] == 1.0
    assert [r["tokens"] for r in run.decodes] == [r["tokens"] for r in decoded.decodes]


def test_in_a_notebook_with_relative_paths(folders, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = pairs.Folders(
        *(os.path.relpath(getattr(folders, n)) for n in ("target", "draft", "input"))
    )
    monkeypatch.setattr(pairs, "DEMO", os.path.relpath(pairs.DEMO))
    workdir = pathlib.Path("runs", "one")
    with pairs.costs_are():
        run = pairs.run_decode(relative, workdir, GREEDY, "-f", "/tmp/kernel-1.json")
    assert run.code == 0, run.err
    assert len(run.decodes) == len(pairs.LINES)
    assert (tmp_path / workdir / "manifest.json").is_file()


def test_a_second_run_replaces_the_first(folders, tmp_path):
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "decodes.jsonl").write_text("old\n")
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, GREEDY)
    assert run.metrics["gamma"] == pairs.GAMMA
    assert len(run.decodes) == len(pairs.LINES)
