"""The paper's tables beside what was measured here: numbers, and a report of them."""

from __future__ import annotations

import csv
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax import theory
from specjax.report import figures, leviathan, reproduction_tables
from specjax.report.decodes import Decoded, Shown
from specjax.report.pages import Block, Coloured, Fold, Heading, Picture, Prose

Content = Mapping[str, Any]
Row = Mapping[str, Any]


def analytic() -> list[dict[str, float]]:
    """Table 1: the formulas, and as the paper prints them.

    >>> rows = analytic()
    >>> all(round(row["speed"], 2) == row["printed_speed"] for row in rows)
    True
    """
    return [
        {
            "alpha": row.alpha,
            "gamma": row.gamma,
            "operations": float(theory.operation_factor(row.alpha, row.gamma, 0.0)),
            "printed_operations": row.operations,
            "speed": float(theory.walltime_factor(row.alpha, row.gamma, 0.0)),
            "printed_speed": row.speed,
        }
        for row in leviathan.TABLE_1
    ]


def differing(rows: Sequence[Row], tie: float) -> list[str]:
    """A sentence for each row whose greedy text is not its target's own.

    Args:
        rows: of Table 2.
        tie: gap of the two best scores up to which tokens may part by rounding.
    """
    found = []
    for row in rows:
        wrong = [own for own in row["mismatches"] if own["top2_gap"] > tie]
        if wrong:
            found.append(
                f"{reproduction_tables.name_of(row)}: {len(wrong)} of {row['lines']} "
                "texts are not what the target writes alone"
            )
    return found


def blocks(
    content: Content,
    parts: Sequence[str],
    manifest: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> list[Block]:
    """The report.

    Args:
        content: what is known: ``laws``, ``times``, ``baselines``, ``decodes``,
            ``timeline``, ``entropy``, ``table1`` and ``failed``.
        parts: that were asked for; what is known of others is shown as well.
        manifest: of the run.
        settings: ``dtype`` and ``tie``.
    """
    made: list[Block] = [
        Heading("Fast inference by speculative decoding, reproduced", 1),
        *_opening(content, manifest, settings),
    ]
    if "table1" in parts:
        made += [
            Heading("Table 1: the formulas"),
            *reproduction_tables.analytic(content),
        ]
    if content["times"]:
        made += [
            Heading("Tables 2 and 4: speedup"),
            *reproduction_tables.speedups(content, settings),
            Picture(
                "table2",
                figures.speedups(reproduction_tables.bars(content["times"])),
                "Measured speedups, what the run's own counts and costs predict (bar), "
                "and the paper's row.",
            ),
            *_notes("table2"),
        ]
    if content["laws"]:
        made += [
            Heading("Table 3: how often a draft stands"),
            *reproduction_tables.acceptance(content["laws"]),
            *_notes("table3"),
            Heading("Table 5: lenience"),
            *reproduction_tables.lenience(content["laws"]),
            *_notes("table5"),
        ]
    made += _figures(content, parts)
    made += [
        Heading("What differs from the paper, and why"),
        Prose(_differences(content, manifest), points=True),
        Prose(leviathan.NOTES["text"]),
    ]
    words = json.dumps(manifest, indent=2, ensure_ascii=False, default=str)
    return [*made, Fold("Manifest", words)]


def _opening(
    content: Content, manifest: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[Block]:
    device = manifest["device"]
    yield Prose(
        [
            "Every table and figure of Leviathan, Kalman, Matias 2023 (Fast Inference "
            "from Transformers via Speculative Decoding, arXiv:2211.17192), computed "
            "or measured here, with the paper's own values beside.",
            f"Run on {device['kind']} ({device['platform']}, {device['cpu_count']} "
            f"processors) in {settings['dtype']}, {manifest['time']}.",
        ]
    )
    rows = content["times"]
    if rows:
        best = max(rows, key=lambda row: row["speedup"])
        lowest, highest = reproduction_tables.gaps(rows)
        yield Prose(
            [
                f"The greatest speedup: {best['speedup']:.2f}x, "
                f"{reproduction_tables.name_of(best)}, with gamma {best['gamma']}. "
                f"Measured speedups lie between {lowest:+.1%} and {highest:+.1%} of "
                "what the counts and costs of the same run predict."
            ]
        )
    wrong = differing(rows, settings["tie"])
    if wrong:
        yield Prose(wrong, alarm=True)
    if content["failed"]:
        failed = [f"failed: {line}" for line in content["failed"]]
        yield Prose(failed, points=True, alarm=True)


def _notes(name: str) -> list[Block]:
    return [
        Heading("Where the paper does not agree with itself", 3),
        Prose(leviathan.NOTES[name], points=True),
    ]


def _figures(content: Content, parts: Sequence[str]) -> Iterator[Block]:
    rows = content["times"]
    drawn = [
        {"alpha": row["alpha"], "c": row["c"], "gamma": row["gamma"]}
        | {"tokens_per_call": row["tokens_per_call"]}
        for row in rows
    ]
    if content["decodes"]:
        yield Heading("Figure 1: a decode")
        for own in content["decodes"]:
            count = len(own["tokens"])
            yield Coloured(
                Decoded((tuple(Shown(*token) for token in own["tokens"]),)),
                f"{own['task']}, greedy, gamma {own['gamma']}: {count} tokens in "
                f"{own['calls']} target calls.",
            )
    if "figure2" in parts:
        yield Heading("Figure 2: tokens per target call")
        yield Picture(
            "figure2",
            figures.tokens_by_alpha(drawn),
            "Curves: expected tokens where drafts stand or fall alike and "
            "independently (Eq. 1). Points: counted here, with the cut at the "
            "text's end.",
        )
    if "figure3" in parts:
        yield Heading("Figure 3: the best draft length")
        yield Picture(
            "figure3",
            figures.best_gammas(drawn),
            "By the paper's formula, for a draft step of c target steps.",
        )
    if "figure4" in parts:
        yield Heading("Figure 4: speed against arithmetic")
        yield Picture(
            "figure4",
            figures.speed_and_operations(),
            "Factors where drafting costs nothing: the more is drafted, the more "
            "arithmetic is thrown away.",
        )
    if content["timeline"]:
        own = content["timeline"]
        yield Heading("Figure 5: what runs when")
        yield Picture(
            "figure5",
            figures.timeline(own["lanes"]),
            f"One greedy decode, drawn from measured times of its parts: target at "
            f"{own['target']} cost, draft {own['draft']}.",
        )
    if content["entropy"]:
        yield Heading("Beyond the paper: how far any speculation can go")
        points = [
            {"name": row["task"], "budget": row["gamma"] + 1}
            | {"tokens_per_call": row["tokens_per_call"]}
            for row in rows
            if row["temperature"] == 1
        ]
        curves = [own | {"name": own["task"]} for own in content["entropy"]]
        yield Picture(
            "entropy",
            figures.entropy_curve(curves, points),
            "The leading term (mu + mu2) log P / mu^2 of a bound on tokens per target "
            "call of any deterministic speculation that verifies P tokens (arXiv:"
            "2512.11718), at T = 1. The bound has a constant besides that is not "
            "known: points may lie above a curve.",
        )


def _differences(content: Content, manifest: Mapping[str, Any]) -> list[str]:
    config = manifest["config"]
    widened = [
        f"{name} ({cost['widen']})"
        for name, cost in config["target_cost"].items()
        if cost["widen"]
    ]
    found = []
    if widened:
        found.append(
            "The paper's fine-tuned T5-XXL is not public. Here a small trained pair is "
            f"widened to the cost of {', '.join(widened)}: the same text, laws and "
            "acceptance as the small one, at the time and memory traffic of the "
            "larger. So alpha is the small pair's, and only times are the large "
            "shapes'. Real weights take their place by --config.target.checkpoint and "
            "--config.draft.checkpoint."
        )
    found += [
        "A measured speedup here is of whole decodes: the encoders of target and draft "
        "and the cut of the last round are in it. The paper's formula has neither, and "
        "takes the verifying pass to cost one step (v = 1).",
        "Keys and values of cross-attention are kept in our baseline. What a baseline "
        "that projects them anew would do to the ratio has a table of its own.",
        "Inputs, text lengths, precision and repeats of the paper are not given; it "
        "takes alpha from 10,000 tokens. The number behind each alpha stands in Table "
        "3, with a standard error over lines.",
    ]
    if any(row["own_counts"] for row in content["laws"] if not row["model"]):
        found.append(
            "Unigrams and bigrams are counted on the target's own texts of other "
            "lines, where no file of texts is given: so few tokens make them worse "
            "than counts of a training set, as the paper's are."
        )
    rows = content["times"]
    if rows and max(row["v"] for row in rows) > 1.1:
        worst = max(rows, key=lambda row: row["v"])
        found.append(
            "On this device a pass that verifies is dearer than a step (up to "
            f"{worst['v']:.2f} steps for {worst['gamma'] + 1} tokens): the draft "
            f"length that pays is shorter than the paper's, and was chosen among "
            f"{', '.join(map(str, config['gammas']))}."
        )
    return found


def write_csv(content: Content, path: pathlib.Path) -> None:
    """Every number, one a line: where it belongs, its name, and its value.

    Args:
        content: see `blocks`.
        path: of the file.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        out = csv.writer(file)
        out.writerow(
            ["part", "task", "temperature", "target", "draft", "name", "value"]
        )
        where = ("task", "temperature", "target", "draft")
        for part, own in content.items():
            for row in own if isinstance(own, list) else [own or {}]:
                if not isinstance(row, Mapping):
                    continue  # what failed
                place = [row.get(name, "") for name in where]
                rest = {name: x for name, x in row.items() if name not in where}
                for name, value in _numbers(rest, ""):
                    out.writerow([part, *place, name, value])


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for name, own in value.items():
            yield from _numbers(own, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for at, own in enumerate(value):
            yield from _numbers(own, f"{path}[{at}]")
    elif isinstance(value, bool) or value is None or isinstance(value, str):
        return
    else:
        yield path, value
