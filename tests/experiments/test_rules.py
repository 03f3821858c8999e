"""Rules side by side: what is counted, compared and picked, on a tiny pair."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import build, picking, rule_costs, rules
from specjax import tree_picker, verify
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.metrics import overlap
from specjax.models import t5_config, t5_weights
from specjax.report import rules as report
from specjax.sampling import Sampling
from specjax.types import Law
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "rules.py"
TINY = dataclasses.replace(pairs.SHAPE, num_encoder_layers=1, num_decoder_layers=1)
TREE = (-1, 0, 0, 1, 1, 1)


@pytest.fixture
def tiny_preset(monkeypatch):
    monkeypatch.setitem(t5_config._PRESETS, "t5-tiny", TINY)


def run_rules(workdir, folders, *settings) -> pairs.Run:
    flags = (
        f"--config={CONFIG}",
        f"--workdir={workdir}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.draft.checkpoint={folders.draft}",
        f"--config.input={folders.input}",
        f"--config.buckets={pairs.BUCKET}",
        f"--config.max_length={pairs.MAX_LENGTH}",
        "--config.cost.model=t5-tiny",
        "--config.cost.repeats=2",
        "--config.cost.seconds=1e-3",
    )
    flags = pairs.less(flags, settings)
    return pairs.run(rules.main, workdir, *flags, *settings)


@pytest.mark.slow
def test_rules_of_a_tiny_pair(folders, tiny_preset, tmp_path):
    run = run_rules(
        tmp_path,
        folders,
        "--config.rules=token,block,traversal,lenient",
        "--config.gammas=2",
        "--config.nodes=2",
        "--config.seeds=8",
    )
    assert run.code == 0, run.err
    found = run.metrics
    rows = {(own["run"], own["rule"], own["draft"]): own for own in found["decodes"]}
    assert len(rows) == len(found["decodes"]) == 3 + 2 + 2 + 2
    verify_costs, draft_costs = (
        {int(count): cost for count, cost in found["pass_costs"][side].items()}
        for side in ("verify", "draft")
    )
    assert verify_costs[1] == 1.0 and {1, 2, 3} == set(draft_costs)
    for own in rows.values():
        assert own["lossless"] == (own["rule"] != "lenient")
        tokens = own["block_efficiency"]
        assert 1 < tokens <= own["draft_passes"] + 1
        assert tokens == pytest.approx(own["tokens"] / own["target_calls"])
        assert 0 < own["standard_error"] < 1
        cost = tree_picker.round_cost(
            tuple(own["parents"]), draft=draft_costs, verify=verify_costs
        )
        assert own["predicted_speedup"] == pytest.approx(tokens / cost)
    # Greedily every lossless way writes the same, and 8 draws are not 1.
    greedy = {draft: own for (run, rule, draft), own in rows.items() if run == "greedy"}
    same = {own["tokens"] for own in rows.values() if own["rule"] == "any lossless"}
    assert len(same) == 1 and set(greedy) == {
        "chain of 2",
        "tree of 2",
        "fastest tree",
    }
    token = rows["sampled", "token", "chain of 2"]
    assert token["tokens"] > 4 * same.pop()
    lenient = rows["sampled", "lenient", "chain of 2"]
    assert lenient["block_efficiency"] > token["block_efficiency"]
    assert rows["sampled", "traversal", "tree of 2"]["nodes"] == 2
    for rows_by_rank in found["acceptance"].values():
        assert all(0.3 < sum(row) <= 1 for row in rows_by_rank[:1])
    block = rows["sampled", "block", "chain of 2"]
    (first,) = (own for own in found["comparisons"] if own["rule"] == "block")
    assert first["difference"] == pytest.approx(
        block["block_efficiency"] - token["block_efficiency"]
    )
    assert 0 < first["standard_error"] < token["standard_error"] * 2
    timed = found["rule_costs"]["rules"]
    assert {"token, chain of 2", "traversal, tree of 2"} <= set(timed)
    assert all(own["seconds"] > 0 for own in timed.values())
    assert found["rule_costs"]["step_seconds"] > 0
    for words in ("(lossy)", "fastest tree", "block (chain of 2) against token"):
        assert words in " ".join(run.out.split())
    assert run.effective["rules"] == ["token", "block", "traversal", "lenient"]


SETTINGS = {
    "rules=tokne": "config.rules has 'tokne'",
    "gammas=0": "config.gammas has 0",
    "nodes=0": "config.nodes is 0",
    "seeds=0": "config.seeds is 0",
    "drafter=ngram": "config.drafter is 'ngram'",
    "cost.model=t5-bsae": "There is no T5 preset 't5-bsae'",
    "cost.repeats=0": "config.cost.repeats is 0",
    "cost.seconds=0.0": "config.cost.seconds is 0.0",
    "sampling.temperature=0.0": "config.sampling.temperature is 0",
    "seed=-1": "config.seed is -1",
    "input=nowhere": "nowhere: no such file",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_bad_settings(folders, tiny_preset, tmp_path, setting, monkeypatch):
    monkeypatch.setattr(build, "build_pair", None)
    workdir = tmp_path / "new"
    run = run_rules(workdir, folders, f"--config.{setting}")
    assert run.code == 2 and SETTINGS[setting] in run.err, run.err
    assert run.err.count("\n") == 1 and not workdir.exists()


def case(rule: str, draft: str, parents) -> rules.Case:
    return rules.Case("sampled", rule, build.VERIFIERS[rule], draft, parents, None)


def counts(emitted, calls) -> rules.Counts:
    return rules.Counts(np.array(emitted), np.array(calls), 1.0)


def test_standard_error_of_a_ratio():
    """That of repeating the whole with other draws."""
    rng = np.random.default_rng(0)
    ratios, errors = [], []
    for _ in range(400):
        calls = rng.integers(5, 12, 100)
        emitted = calls + rng.binomial(2 * calls, 0.6)
        own = counts(emitted, calls)
        ratios.append(own.block_efficiency)
        errors.append(rules.standard_error(own.influence))
    assert np.mean(ratios) == pytest.approx(2.2, abs=0.01)
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.15)
    assert math.isnan(rules.standard_error(np.ones(1)))


def test_comparisons_are_paired_and_at_equal_nodes():
    """Lines that are hard for one rule are hard for the other."""
    tree, pair = (-1, 0, 0), rules.chain(2)
    cases = [
        case("token", "chain of 2", pair),
        case("block", "chain of 2", pair),
        case("recursive_distinct", "tree of 2", tree),
        case("traversal", "tree of 2", tree),
        case("traversal", "tree of 9", tuple([-1] + [0] * 9)),
        case("best_path", "tree of 2", pair),
    ]
    plain, more = counts([10, 30], [10, 10]), counts([11, 31], [10, 10])
    found = rules.compare(cases, [plain, more, plain, more, more, more], [2])
    named = {(own["rule"], own["draft"], own["than"]): own for own in found}
    assert set(named) == {
        ("block", "chain of 2", "token"),
        ("traversal", "tree of 2", "block"),
        ("traversal", "tree of 2", "recursive_distinct"),
        ("traversal", "tree of 9", "block"),
        ("best_path", "tree of 2", "block"),
    }
    block = named["block", "chain of 2", "token"]
    assert block["difference"] == pytest.approx(0.1)
    assert block["standard_error"] == pytest.approx(0, abs=1e-12)
    assert block["than_tokens"] == 2.0
    one = {name[0] for name, own in named.items() if own["one_rule"]}
    assert one == {"best_path"}


@pytest.mark.parametrize(
    ("difference", "error", "one_rule", "words"),
    [
        (
            0.1,
            0.02,
            False,
            "+0.100 tokens per call (+5.0%), standard error 0.020: more",
        ),
        (-0.1, 0.02, False, "LOSES by 5.0 standard errors"),
        (0.03, 0.02, False, "NOT DECIDED"),
        (0.0, 0.0, False, "NOT DECIDED"),
        (0.1, math.nan, False, "NOT DECIDED"),
        (-0.1, 0.02, True, "ONE RULE"),
    ],
)
def test_verdicts(difference, error, one_rule, words):
    said = report.verdict(
        {
            "rule": "block",
            "draft": "chain of 4",
            "than": "token",
            "than_draft": "chain of 4",
            "difference": difference,
            "standard_error": error,
            "than_tokens": 2.0,
            "one_rule": one_rule,
        }
    )
    assert said.startswith("block (chain of 4) against token (chain of 4): ")
    assert words in said


def test_made_up_blocks_are_drawn_as_their_rule_needs():
    """Siblings differ where they must; about two drafts in three stand."""
    own = rule_costs.Case(verify.traversal_verify, TREE, "distinct")
    seen = set()
    for noise, block, scored in rule_costs.made_blocks(own, 4000, 3):
        assert scored.logits.shape == (1, 6, 4000) and noise.by == "step"
        assert block.law.probs.shape == (1, 3, 4000)  # of all but the leaves
        assert block.parents[0].tolist() == list(TREE)
        one, two, *below = block.tokens[0].tolist()
        assert one != two and len(set(below)) == 3
        shared = overlap(Law(scored.law.probs[:, :3]), block.law)
        assert jnp.all((shared > 0.55) & (shared < 0.85)), shared
        seen.add(tuple(block.tokens[0].tolist()))
    assert len(seen) == 4
    own = rule_costs.Case(verify.token_verify, rules.chain(3), None)
    _, block, _ = rule_costs.made_blocks(own, 50, 3)[0]
    assert block.parents is None and block.law.probs.shape == (1, 3, 50)


@pytest.fixture(scope="module")
def target(folders):
    return t5_weights.load_t5(folders.target)


def parts_of(folders, copies: int = 1):
    tokenizer = tokenizers.load_tokenizer(folders.target)
    rows = [tokenizer.encode(line) for line in pairs.LINES] * copies
    parts = batches.inference_batches(rows, len(rows), (pairs.BUCKET,))
    return list(parts), build.row_keys(1, len(rows))


@pytest.mark.slow
def test_a_draft_that_is_the_target_needs_no_second_child(folders, target, monkeypatch):
    monkeypatch.setattr(
        picking, "pass_costs", lambda *arguments: ({1: 1.0, 9: 1.1}, {1: 0.1, 9: 0.1})
    )
    parts, keys = parts_of(folders)
    settings = dict(
        siblings="distinct",
        sampling=Sampling(num_tokens=pairs.KNOWN),
        max_length=pairs.MAX_LENGTH,
        nodes=3,
    )
    picked = picking.pick_for_pair(
        target, target, parts, keys, verifier=verify.traversal_verify, **settings
    )
    assert picked.parents == (-1, 0, 1, 2)
    assert 3 < picked.expected_tokens <= 4
    with pytest.raises(tree_picker.InputError, match="nodes is 0"):
        picking.pick_for_pair(
            target,
            target,
            parts,
            keys,
            verifier=verify.traversal_verify,
            **settings | {"nodes": 0},
        )
    with pytest.raises(tree_picker.InputError, match="token_rule judges chains"):
        picking.pick_for_pair(
            target, target, parts, keys, verifier=verify.token_verify, **settings
        )


def test_paths_part_at_the_root_alone():
    table = np.array([[0.5, 0.3, 0.1], [0.4, 0.3, 0.2]])
    found = picking.for_siblings(table, "paths")
    assert found.tolist() == [[0.5, 0.3, 0.1], [0.4, 0.0, 0.0]]
    assert picking.for_siblings(table, "independent") is table
    tree = tree_picker.best_tree(found, 6)
    assert {tree.count(node) for node in range(1, 7)} <= {0, 1}
    # Acceptance by node, where a rule's own depends on the ranks that follow.
    warm, greedy = Sampling(), Sampling(temperature=None)
    by = picking.measured_by
    expected = {
        (verify.best_path_verify, "paths"): (verify.recursive_verify, "independent"),
        (verify.traversal_verify, "distinct"): (
            verify.recursive_distinct_verify,
            "distinct",
        ),
        (verify.coupled_verify, "chosen"): (verify.coupled_verify, "chosen"),
        (verify.exact_match_verify, "paths"): (
            verify.exact_match_verify,
            "independent",
        ),
    }
    for (rule, siblings), measured in expected.items():
        assert by(rule, warm, siblings) == measured
        # Greedily nothing is drawn, and the tree that measures branches everywhere.
        assert by(rule, greedy, siblings) == (rule, "distinct")
