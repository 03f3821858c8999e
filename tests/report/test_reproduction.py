"""The paper's numbers, and a report that needs no other file."""

from __future__ import annotations

import csv
import doctest
import html.parser
import re

import pytest

from specjax import theory
from specjax.report import (
    figures,
    leviathan,
    pages,
    reproduction,
    reproduction_tables,
)

COST = {"c": 0.05, "v": 1.3, "encode": 3.0, "draft_encode": 0.2}
ROW = {
    "task": "ende",
    "paper": "EnDe",
    "temperature": 0,
    "target": "base",
    "draft": "shipped",
    "paper_draft": "T5-small",
    "alpha": 0.7,
    "survival": [0.7, 0.5, 0.35, 0.2],
    "gamma": 3,
    "lines": 2,
    "plain_tokens": 40,
    "tokens": 40,
    "calls": 17,
    "drafted": 51,
    "accepted": 25,
    "speedup": 1.6,
    "counted": 1.55,
    "counted_survival": [0.7, 0.5, 0.3],
    "tokens_per_call": 2.35,
    "lost_to_cut": 0.05,
    "lost_to_encoders": 0.1,
    "mismatches": [],
    **COST,
}
LAWS = {
    "task": "ende",
    "paper": "EnDe",
    "temperature": 1,
    "draft": "shipped",
    "paper_draft": "T5-small",
    "model": True,
    "own_counts": True,
    "tokens": 100,
    "alpha": {
        "1.0": {"mean": 0.5, "error": 0.02},
        "0.1": {"mean": 0.8, "error": None},
    },
}
CONTENT = {
    "laws": [
        LAWS,
        LAWS | {"draft": "unigram", "paper_draft": "unigram", "model": False},
    ],
    "times": [ROW],
    "baselines": [
        {"task": "ende", "temperature": 0, "target": "base", "source_tokens": 32}
        | {"slower_if_recomputed": 1.5}
    ],
    "decodes": [
        {"task": "ende", "gamma": 3, "calls": 2}
        | {
            "tokens": [
                ["<b>", "accepted", 0],
                [" two", "corrected", 0],
                ["x", "bonus", 1],
            ]
        }
    ],
    "timeline": {"target": "base", "draft": "small"}
    | {"lanes": [{"name": "gamma 3", "parts": [["encode", 0.0, 0.1]]}]},
    "entropy": [{"task": "ende", "entropy": 1.0, "log_moment": 2.0}],
    "table1": reproduction.analytic(),
    "failed": ["a cell: RuntimeError: <no>"],
}
MANIFEST = {
    "time": "now",
    "device": {"kind": "cpu", "platform": "cpu", "cpu_count": 2},
    "config": {"target_cost": {"base": {"widen": "t5-v1_1-base"}}, "gammas": (3, 7)},
}
PARTS = ("table1", "figure2", "figure3", "figure4")


def made(**changes):
    settings = {"dtype": "float32", "tie": 1e-4}
    return reproduction.blocks(CONTENT | changes, PARTS, MANIFEST, settings)


@pytest.mark.parametrize(
    "module", [leviathan, reproduction, reproduction_tables], ids=lambda m: m.__name__
)
def test_examples(module):
    assert doctest.testmod(module).failed == 0


def test_the_paper_s_rows_fit_its_formula():
    assert len(leviathan.TABLE_2) == 12
    for row in leviathan.TABLE_2:
        # Table 4 is rounded to a tenth, and its alphas to a hundredth.
        assert row.expected == pytest.approx(row.formula, abs=0.1)
        by_task = [
            (own.greedy, own.sampled)[row.temperature]
            for own in leviathan.TABLE_3
            if (own.task, own.draft) == (row.task, row.draft)
        ]
        assert by_task == [row.alpha]
    assert (
        leviathan.TABLE_5["T5-small"][0] == leviathan.find("EnDe", "T5-small", 1).alpha
    )
    above = zip(leviathan.LENIENT_SPEEDS, leviathan.lenient_best(), strict=True)
    assert all(claimed > best for claimed, best in above)
    for row in reproduction.analytic():
        assert round(row["operations"], 2) == row["printed_operations"]


class Links(html.parser.HTMLParser):
    """Every tag, and every attribute that could fetch something."""

    def __init__(self):
        super().__init__()
        self.tags, self.links, self.ids = [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        own = dict(attributes)
        self.ids += [own["id"]] if "id" in own else []
        for name in ("src", "href", "xlink:href", "data", "srcset"):
            self.links += [own[name]] if name in own else []


def test_the_page_needs_no_other_file(tmp_path):
    files = pages.write(made(), tmp_path, "report", "A & B")
    text = (tmp_path / "report.html").read_text()
    seen = Links()
    seen.feed(text)
    assert all(link.startswith("#") for link in seen.links) and seen.links
    assert not {"script", "img", "link", "iframe", "object"} & set(seen.tags)
    assert not re.search(r"url\((?!#)|@import", text)
    assert {link[1:] for link in seen.links} <= set(seen.ids)
    assert len(set(seen.ids)) == len(seen.ids)
    assert seen.tags.count("svg") == 6 and text.count("<figure") == 6
    assert "A &amp; B" in text and "<b>" not in text and "&lt;b&gt;" in text
    assert files == ["report.md", "report.html"]
    # What is drawn in the page lies beside the Markdown.
    pictures = re.findall(
        r"\]\((figures/\w+\.svg)\)", (tmp_path / files[0]).read_text()
    )
    assert len(pictures) == 6
    assert all((tmp_path / name).stat().st_size > 2000 for name in pictures)


def test_the_same_numbers_make_the_same_page():
    one, other = (pages.page(made(), "t") for _ in range(2))
    assert one == other


def test_what_is_wrong_is_seen_at_once():
    text = pages.markdown(made(), "figures")
    assert "**failed: a cell: RuntimeError: <no>**" in text
    slow = ROW | {"c": 1.2, "counted": 1.3}
    slow |= {"mismatches": [{"row": 0, "position": 3, "top2_gap": 0.3}]}
    text = pages.markdown(made(times=[slow]), "figures")
    assert "1 of 2 texts are not what the target writes alone" in text
    assert "the draft is slower than its target; +23% of its prediction" in text
    assert "| DIFFERS |" in text
    tie = [{"row": 0, "position": 3, "top2_gap": 1e-6}]
    assert reproduction.differing([ROW | {"mismatches": tie}], 1e-4) == []
    assert "| one but for ties |" in pages.markdown(
        made(times=[ROW | {"mismatches": tie}]), "figures"
    )


def test_the_baseline_s_switch_has_its_row():
    text = pages.markdown(made(), "figures")
    assert "| ende | 0 | base | shipped | 32 | 1.50x | 1.60x | 2.40x |" in text


def test_rows_above_the_ceiling_are_explained():
    assert "Above the formula's ceiling" not in pages.markdown(made(), "figures")
    fast = ROW | {"speedup": 2.6}
    text = pages.markdown(made(times=[fast]), "figures")
    assert "2.60x is above the 2.53 tokens per target call" in text
    assert "What 2x would take" not in text  # it is there already


def test_the_alpha_that_a_speedup_takes():
    alpha = reproduction_tables.alpha_for(ROW, 2.0)
    calls = theory.expected_calls(theory.iid_survival(alpha, 3), 20)
    costs = (3, *COST.values())
    assert theory.speedup_from_counts(20, calls, *costs) == pytest.approx(2.0, abs=1e-3)
    assert alpha > ROW["alpha"]
    assert reproduction_tables.alpha_for(ROW | {"encode": 30.0}, 2.0) is None


def test_predictions_by_hand():
    found = reproduction_tables.predictions(ROW)
    assert found["survival"] == pytest.approx((1 + 0.7 + 0.5 + 0.35) / (0.15 + 1.3))
    assert found["ceiling"] == pytest.approx(1 + 0.7 + 0.49 + 0.343)
    assert found["formula"] == pytest.approx(found["ceiling"] / 1.15)


def test_every_number_is_written(tmp_path):
    path = tmp_path / "numbers.csv"
    reproduction.write_csv(CONTENT, path)
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    by_name = {(row["part"], row["name"]): row for row in rows}
    assert by_name["times", "speedup"]["value"] == "1.6"
    assert by_name["times", "speedup"]["draft"] == "shipped"
    assert by_name["times", "survival[3]"]["value"] == "0.2"
    assert by_name["laws", "alpha.0.1.mean"]["value"] == "0.8"
    assert by_name["timeline", "lanes[0].parts[0][2]"]["value"] == "0.1"


def test_lanes_are_to_scale():
    lanes = [{"name": "a", "parts": [["encode", 0.0, 0.1], ["step", 0.1, 0.2]]}]
    svg = figures.timeline(lanes)
    assert svg.startswith("<svg") and "metadata" not in svg and "milliseconds" in svg
    widths = []
    for path in re.findall(r'd="(M [^"]+)"', svg):
        across = [float(own) for own in re.findall(r"-?[\d.]+", path)][::2]
        widths.append(max(across) - min(across))
    wide = [own for own in widths if own > 50]  # no letters, ticks or legends
    assert any(b == pytest.approx(2 * a, rel=1e-3) for a in wide for b in wide)


def test_lenience_stands_beside_the_paper_s():
    text = pages.markdown(made(), "figures")
    assert "| ende | sampled | unigram | 0.50 ± 0.02 (0.07) | 0.80 (0.16) |" in text
    best = theory.best_gamma(0.8, leviathan.LENIENT_C)
    gain = theory.walltime_factor(0.8, best, leviathan.LENIENT_C)
    assert f"{gain:.2f}x (5x) |" in text
    assert "counted on the target's own texts" in text
