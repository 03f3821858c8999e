"""`experiments.decode` with trees, with shared noise and with lossy rules."""

import jax
import pytest

from experiments import build, build_tree
from tests import pairs

GREEDY, SAMPLED = "--config.runs=greedy", "--config.runs=sampled"
PARENTS = (-1, 0, 0, 0, 1, 1, 2)
TREE = "--config.tree=" + ",".join(map(str, PARENTS))
DEPTH = 2
UNSET = "--config.gamma=None"


def decode(folders, workdir, *settings, show=False):
    with pairs.costs_are():
        run = pairs.run_decode(folders, workdir, *settings, show=show)
    assert run.code == 0, run.out + run.err
    return run


def check_tree(run, metrics, records, siblings):
    """Of one mode: named, counted by level, and more than a token per call."""
    tree = {"parents": list(PARENTS), "siblings": siblings}
    assert metrics["tree"] == tree and run.effective["tree"] == tree
    assert metrics["gamma"] == DEPTH and metrics["lossless"] is True
    fast = metrics["speculative"]
    assert fast["target_calls"] == sum(own["target_calls"] for own in records)
    assert fast["tokens"] == sum(len(own["tokens"]) for own in records)
    assert fast["drafted"] == DEPTH * fast["target_calls"]
    assert 0 < fast["accepted"] < fast["drafted"]
    assert len(metrics["survival"]) == DEPTH and 0 < metrics["alpha"] < 1
    assert metrics["formula_speedup"] is None  # it is of chains
    assert metrics["predicted_speedup"] > 0
    text = " ".join(run.out.split())
    assert f"a tree of 6 nodes, 2 deep, siblings {siblings}" in text


def test_shared_noise_writes_the_targets_own_sample(decoded, folders, tmp_path):
    """From a tree, at a temperature, token for token."""
    run = decode(folders, tmp_path, SAMPLED, TREE, UNSET, "--config.verifier=coupled")
    assert run.metrics["verifier"] == run.effective["verifier"] == "coupled"
    check_tree(run, run.metrics, run.decodes, "distinct")
    assert run.effective["gamma"] == {"sampled": DEPTH}
    assert run.metrics["identical"] is True and run.metrics["mismatches"] == []
    for record in run.decodes:
        own = record["sampled"]
        assert own["identical"] is True
        assert own["autoregressive_tokens"] == own["tokens"] == record["tokens"]
    # Another rule draws other tokens from the same keys, and compares nothing.
    others = [record["sampled"] for record in decoded.decodes]
    assert all("identical" not in own for own in others)
    assert [own["tokens"] for own in others] != [r["tokens"] for r in run.decodes]


@pytest.mark.slow
def test_one_token_that_is_not_the_targets_own_sample_fails(
    folders, tmp_path, monkeypatch
):
    """A rule of rejection, said to share its noise."""
    wrong = build.VERIFIERS["token"].replace(noise="position")
    monkeypatch.setattr(build, "VERIFIERS", {**build.VERIFIERS, "coupled": wrong})
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, SAMPLED, "--config.verifier=coupled")
    assert run.code == 1
    assert "sampled outputs differ where" in " ".join(run.out.split())
    assert run.metrics["identical"] is False
    assert all(own["top2_gap"] > 1e-4 for own in run.metrics["mismatches"])


@pytest.mark.slow
def test_a_tree_in_both_runs_and_in_colour(decoded, folders, tmp_path):
    run = decode(
        folders, tmp_path, TREE, UNSET, "--config.verifier=traversal", show=True
    )
    check_tree(run, run.metrics, run.decodes, "distinct")
    sampled = [record["sampled"] for record in run.decodes]
    check_tree(run, run.metrics["sampled"], sampled, "distinct")
    tokens = [record["tokens"] for record in decoded.decodes]
    assert [record["tokens"] for record in run.decodes] == tokens
    assert run.metrics["identical"] is True
    # Three candidates stand more often than one.
    for own, chain in (
        (run.metrics, decoded.metrics),
        (run.metrics["sampled"], decoded.metrics["sampled"]),
    ):
        assert own["survival"][0] > chain["survival"][0]
    for line in pairs.LINES:
        assert line in run.out


@pytest.mark.parametrize(
    ("name", "siblings"),
    [
        ("exact_match", "distinct"),
        ("coupled", "distinct"),
        ("recursive", "independent"),
        ("recursive_distinct", "distinct"),
        ("kseq", "independent"),
        ("best_path", "paths"),
        ("traversal", "distinct"),
    ],
)
def test_siblings_are_what_the_rule_needs(name, siblings):
    config = build_config(verifier=name, tree=(-1, 0, 0, 1))
    verifier = build.build_verifier(config)
    tree = build_tree.build_tree(config, verifier)
    assert tree == build_tree.Tree((-1, 0, 0, 1), siblings) and tree.depth == 2
    # As asked for, where the rule is exact for it; a string is read alike.
    config.update(siblings=siblings, tree="-1, 0,0,1")
    assert build_tree.build_tree(config, verifier) == tree


@pytest.mark.slow
def test_a_trees_costs_are_measured(folders, tmp_path):
    jax.clear_caches()
    with pairs.quick_costs():
        run = pairs.run_decode(
            folders, tmp_path, SAMPLED, TREE, UNSET, "--config.verifier=traversal"
        )
    assert run.code == 0, run.err
    for name in ("cost_ratio", "verify_ratio", "encode_ratio", "predicted_speedup"):
        assert run.metrics[name] > 0


def test_a_lossy_rule_is_named_so_everywhere(decoded, folders, tmp_path):
    """Its greedy outputs are other ones, which is no error."""
    settings = ("--config.verifier=lenient", "--config.lenient.lenience=0.001")
    run = decode(folders, tmp_path, GREEDY, *settings)
    for place in (run.metrics, run.effective):
        assert place["lossless"] is False and place["verifier"] == "lenient"
        assert place["verifier_settings"] == {"lenience": 0.001}
    assert all(record["lossless"] is False for record in run.decodes)
    assert run.metrics["identical"] is False and run.metrics["formula_speedup"] is None
    count = len(run.metrics["mismatches"])
    assert count == sum(not record["identical"] for record in run.decodes) > 0
    text = " ".join(run.out.split())
    assert "verifier: LOSSY lenient (lenience=0.001)" in text
    assert "what it writes does not follow the target" in text
    assert f"lossy: {count} differ" in text
    assert f"{count} greedy outputs are not the target's own, by design" in text
    # It accepts more than a lossless rule may.
    assert run.metrics["acceptance_rate"] > decoded.metrics["acceptance_rate"]
    assert decoded.metrics["lossless"] is True
    assert "lossless" not in decoded.decodes[0] and "LOSSY" not in decoded.out


def test_settings_reach_their_rule():
    config = build_config(verifier="typical")
    assert build.verifier_settings(config) == {"epsilon": 0.3, "delta": 0.09}
    config.typical.delta = 0.5
    params = build.build_verifier(config).params
    assert (params.epsilon, params.delta) == (pytest.approx(0.3), 0.5)
    assert build.verifier_settings(build_config()) == {}


def build_config(**settings):
    from configs import demo

    config = demo.get_config()
    config.update(settings)
    return config


def test_the_config_names_every_rule():
    text = pairs.DEMO.read_text()
    assert [name for name in build.VERIFIERS if name not in text] == []


@pytest.mark.parametrize(
    ("value", "depth", "gamma"), [(None, None, 7), ("auto", None, None), (5, None, 5)]
)
def test_gamma_of_a_chain(value, depth, gamma):
    assert build.parse_gamma(value, depth) == gamma


@pytest.mark.parametrize("value", [None, 2])
def test_gamma_of_a_tree(value):
    assert build.parse_gamma(value, 2) == 2


@pytest.mark.slow
def test_a_tree_that_is_picked(folders, tmp_path):
    rule = "--config.verifier=recursive_distinct"
    settings = (SAMPLED, "--config.tree=auto", "--config.tree_nodes=3", UNSET, rule)
    run = decode(folders, tmp_path, *settings)
    tree = run.metrics["tree"]
    assert tree["parents"][0] == -1 and 2 <= len(tree["parents"]) <= 4
    own = build_tree.Tree(tuple(tree["parents"]), tree["siblings"])
    assert run.metrics["gamma"] == own.depth
    assert run.metrics["speculative"]["accepted"] > 0
    named = ",".join(map(str, tree["parents"]))
    assert f"picked the tree {named}: predicted" in " ".join(run.out.split())
