"""The table shows every figure, known or not, and the verdict says what lost."""

import io

import pytest
from rich.console import Console

from specjax.report import table

METRICS = {
    "verifier": "token",
    "verifier_settings": {},
    "lossless": True,
    "tree": None,
    "gamma": 7,
    "autoregressive": {"tokens": 90, "seconds": 2.0, "tokens_per_second": 45.0},
    "speculative": {
        "tokens": 90,
        "seconds": 1.0,
        "tokens_per_second": 90.0,
        "target_calls": 40,
        "drafted": 260,
        "accepted": 52,
        "cut": 3,
    },
    "speedup": 2.0,
    "predicted_speedup": 2.125,
    "formula_speedup": 1.75,
    "alpha": 0.8125,
    "acceptance_rate": 0.2,
    "survival": [0.5, 0.25],
    "block_efficiency": 2.25,
    "cost_ratio": 0.0625,
    "verify_ratio": 1.3125,
    "encode_ratio": 4.5,
    "compile_seconds": 12.25,
    "identical": True,
    "mismatches": [],
}
EVERY = (
    ("identical", "yes"),
    ("plain, tokens/s", "45"),
    ("speculative, tokens/s", "90"),
    ("measured", "2.00x"),
    ("from the counts", "2.12x"),
    ("from alpha", "1.75x"),
    ("gamma, deepest", "7"),
    ("drafted per target call", "6.50"),
    ("alpha, mean", "0.812"),
    ("accepted / drafted", "0.200"),
    ("block efficiency", "2.25"),
    ("draft step", "0.062"),
    ("verifying pass", "1.31"),
    ("encoder", "4.50"),
    ("cut at", "3"),
    ("compile", "12.2"),
)


def lines(**runs):
    console = Console(file=io.StringIO(), width=100)
    console.print(table.summary_table(runs))
    return console.file.getvalue().splitlines()


def line_with(shown, label):
    (found,) = (line for line in shown if label in line and line[0] == "│")
    return [cell.strip() for cell in found.strip("│").split("│")]


@pytest.mark.parametrize(("label", "value"), EVERY)
def test_every_figure_has_its_line(label, value):
    other = METRICS | {"speedup": 3.0, "gamma": 3}
    cells = line_with(lines(greedy=METRICS, sampled=other), label)
    assert cells[1] == value
    changed = {"measured": "3.00x", "gamma, deepest": "3"}
    assert cells[2] == changed.get(label, value)


def test_the_list_of_figures_is_whole():
    shown = lines(greedy=METRICS)
    assert sum(line.startswith("│") for line in shown) == len(EVERY)


def test_what_is_not_known_is_a_dash():
    unknown = dict.fromkeys(("alpha", "acceptance_rate", "formula_speedup"))
    shown = lines(greedy=METRICS | unknown | {"identical": None})
    for label in ("alpha, mean", "accepted / drafted", "from alpha"):
        assert line_with(shown, label)[1] == "-"
    assert line_with(shown, "identical")[1] == "- (random)"


def test_plain_decoding_in_both_columns():
    fast = METRICS["speculative"] | {"drafted": 0, "accepted": 0}
    plain = {"gamma": 0, "speculative": fast, "acceptance_rate": None}
    shown = lines(greedy=METRICS | plain)
    assert line_with(shown, "drafted per target call")[1] == "0.00"
    assert line_with(shown, "gamma, deepest")[1] == "0"


def test_a_difference_is_loud():
    mismatches = [{"row": 0, "position": 2, "top2_gap": 0.1}] * 2
    shown = lines(greedy=METRICS | {"identical": False, "mismatches": mismatches})
    assert line_with(shown, "identical")[1] == "NO: 2 differ"
    different = {"identical": False, "mismatches": mismatches, "lossless": False}
    cells = line_with(lines(greedy=METRICS | different), "identical")
    assert cells[1] == "lossy: 2 differ"


def test_the_title_names_the_rule_and_the_tree():
    title = " ".join(" ".join(lines(greedy=METRICS)).split())
    assert "verifier: token" in title and "LOSSY" not in title and "tree" not in title
    tree = {"parents": [-1, 0, 0, 1], "siblings": "distinct"}
    settings = {"epsilon": 0.3, "delta": 0.09}
    lossy = METRICS | {"verifier": "typical", "verifier_settings": settings}
    lossy |= {"lossless": False, "tree": tree, "gamma": 2}
    title = " ".join(" ".join(lines(greedy=lossy)).split())
    assert "verifier: LOSSY typical (epsilon=0.3, delta=0.09)" in title
    assert "a tree of 3 nodes, 2 deep, siblings distinct" in title


def test_verdict():
    assert table.verdict("greedy", METRICS, 7) is None
    # So near to 1, a run of seconds tells nothing.
    assert table.verdict("greedy", METRICS | {"speedup": 0.99}, 7) is None
    slow = METRICS | {"speedup": 0.755}
    loss = table.verdict("greedy", slow | {"predicted_speedup": 0.8}, 7)
    assert loss is not None and "\n" not in loss
    assert loss.startswith("greedy: speculation LOSES here: 0.76x at gamma=7")
    assert (
        "predict 0.80x; --config.gamma=auto looks for a draft length that pays" in loss
    )
    tree = slow | {"predicted_speedup": 0.8, "tree": {"parents": [-1, 0, 0]}}
    assert "a smaller tree may pay" in table.verdict("greedy", tree, 1)
    busy = table.verdict("greedy", slow, 7)
    assert busy.endswith("predict 2.12x: a busy machine?")


def test_verdict_of_auto():
    text = table.verdict("sampled", METRICS | {"gamma": 0}, 0)
    assert text is not None
    assert text.startswith("sampled: gamma=auto chose plain decoding")
