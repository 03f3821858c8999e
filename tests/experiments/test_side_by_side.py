"""Both ways side by side: a wrong token is found, and costs choose gamma."""

import types

import jax.numpy as jnp
import pytest

from experiments import baseline, decode, side_by_side
from specjax.data import batches
from specjax.sampling import Sampling
from tests import pairs

ROW, POSITION = 3, 4


@pytest.fixture
def one_wrong_token(monkeypatch):
    """Speculation that once writes another token than the target would."""
    generate = baseline.speculative_generate

    def wrong(target, drafter, inputs, *arguments, **settings):
        output = generate(target, drafter, inputs, *arguments, **settings)
        wrong.calls += 1
        if (wrong.calls - wrong.skipped) != ROW + 1:
            return output
        token = output.tokens[0, POSITION]
        other = jnp.where(token == 7, 8, 7)
        return output.replace(tokens=output.tokens.at[0, POSITION].set(other))

    # What is decoded before the lines: twice to tell compiling apart.
    wrong.calls, wrong.skipped = 0, 2
    monkeypatch.setattr(baseline, "speculative_generate", wrong)
    # Each line is decoded once: its bucket counts as known.
    decode_batch = side_by_side.decode_batch

    def once(*arguments):
        return decode_batch(*arguments[:-1], False)

    monkeypatch.setattr(side_by_side, "decode_batch", once)


def test_a_wrong_token_is_found_and_fails(folders, tmp_path, one_wrong_token):
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, "--config.runs=greedy")
    assert run.code == 1, run.err
    assert "greedy outputs differ where the two tokens" in " ".join(run.out.split())
    metrics = run.metrics
    assert metrics["identical"] is False
    (mismatch,) = metrics["mismatches"]
    assert (mismatch["row"], mismatch["position"]) == (ROW, POSITION)
    assert mismatch["top2_gap"] > 1e-2
    assert [record["identical"] for record in run.decodes] == [
        row != ROW for row in range(len(pairs.LINES))
    ]
    wrong = run.decodes[ROW]
    differing = [
        place
        for place, (one, other) in enumerate(
            zip(wrong["tokens"], wrong["autoregressive_tokens"], strict=True), start=1
        )
        if one != other
    ]
    assert differing == [POSITION]
    assert "NO: 1 differ" in run.out


@pytest.mark.parametrize(
    ("gaps", "dtype", "code"),
    [
        ([], "float32", 0),
        ([9e-5], "float32", 0),
        ([9e-5, 2e-4], "float32", 1),
        ([float("nan")], "float32", 1),
        ([0.1], "bfloat16", 0),
        ([0.1, 1.0], "bfloat16", 1),
    ],
)
def test_only_a_tie_is_forgiven(gaps, dtype, code):
    from rich.console import Console

    mismatches = [{"row": 0, "position": 1, "top2_gap": gap} for gap in gaps]
    run = {"verifier": "token", "lossless": True, "mismatches": []}
    tie = baseline.TIES[dtype]
    for name in ("greedy", "sampled"):
        results = {"greedy": run, "sampled": run} | {
            name: run | {"mismatches": mismatches}
        }
        assert decode._exit_code(results, tie, Console(quiet=True)) == code
        lossy = {name: run | {"mismatches": mismatches, "lossless": False}}
        assert decode._exit_code(lossy, tie, Console(quiet=True)) == 0


def test_what_compiling_takes_is_told_apart(monkeypatch):
    """The costs' programs are the decodes' own: they are compiled before any line."""
    seconds = iter([5.0, 1.0, 7.0, 2.0])
    monkeypatch.setattr(side_by_side, "_timed", lambda call: (None, next(seconds)))
    pair = types.SimpleNamespace(target=None, drafter=None)
    setup = side_by_side.Setup(pair, None, pairs.MAX_LENGTH)
    (batch,) = batches.inference_batches([[3, 1]], 1, (4,))
    mode = side_by_side.Mode("greedy", Sampling(temperature=None), None, pairs.GAMMA)
    tally = side_by_side.Tally()
    with pairs.costs_are():
        costs = side_by_side.measure_costs(setup, batch, jnp.zeros(1), mode, tally)
    assert tally.compile_seconds == (5 - 1) + (7 - 2)
    assert costs.gamma == pairs.GAMMA
