"""The tables of a reproduction, cell by cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specjax import theory
from specjax.report import leviathan
from specjax.report.pages import Block, Grid, Heading, Prose

Row = Mapping[str, Any]
# Measured and predicted speedups of one run part by no more on a quiet machine.
_NEAR = 0.10
_WANTED = 2.0  # a speedup worth having


def name_of(row: Row) -> str:
    """A row of Table 2 in words."""
    way = "greedy" if row["temperature"] == 0 else f"T = {row['temperature']}"
    return f"{row['task']}, {way}, target at {row['target']} cost, draft {row['draft']}"


def bars(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """What `figures.speedups` draws."""
    return [
        {"name": name_of(row), "speedup": row["speedup"], "predicted": row["counted"]}
        | {"paper": _paper(row).speed}
        for row in rows
    ]


def gaps(rows: Sequence[Row]) -> tuple[float, float]:
    """The least and the greatest of measured over counted speedup, less 1."""
    found = [row["speedup"] / row["counted"] - 1 for row in rows]
    return min(found), max(found)


def _paper(row: Row) -> leviathan.Measured:
    return leviathan.find(row["paper"], row["paper_draft"], row["temperature"])


def analytic(content: Mapping[str, Any]) -> Iterator[Block]:
    """Table 1."""
    yield Grid(
        ["alpha", "gamma", "operations", "printed", "speed", "printed"],
        [
            [
                f"{row['alpha']:g}",
                f"{row['gamma']}",
                f"{row['operations']:.2f}x",
                f"{row['printed_operations']:.2f}x",
                f"{row['speed']:.2f}x",
                f"{row['printed_speed']:.2f}x",
            ]
            for row in content["table1"]
        ],
        words=frozenset(),
        caption="Theorems 3.8 and 3.11 where the draft costs nothing (c = 0); printed: "
        "as in the paper.",
    )


def predictions(row: Row) -> dict[str, float]:
    """What the formulas say of a row: from alpha, and from survival, c and v.

    Args:
        row: of Table 2.

    Returns:
        ``formula``, the paper's; ``survival``; and ``ceiling``, the formula at c = 0.
    """
    gamma, alpha = row["gamma"], row["alpha"]
    stands = row["survival"][:gamma]
    return {
        "formula": float(theory.walltime_factor(alpha, gamma, row["c"])),
        "survival": theory.speedup_from_survival(stands, row["c"], row["v"]),
        "ceiling": float(theory.expected_tokens(alpha, gamma)),
    }


def alpha_for(row: Row, wanted: float) -> float | None:
    """The alpha at which a row's counts and costs would give a speedup.

    Drafts are taken to stand or fall alike and independently, over texts of the row's
    mean length.

    Args:
        row: of Table 2.
        wanted: speedup of whole decodes.

    Returns:
        None: no alpha would do.
    """
    tokens = max(round(row["plain_tokens"] / row["lines"]), 1)

    def speedup(alpha: float) -> float:
        calls = theory.expected_calls(theory.iid_survival(alpha, row["gamma"]), tokens)
        costs = row["gamma"], row["c"], row["v"], row["encode"], row["draft_encode"]
        return theory.speedup_from_counts(tokens, calls, *costs)

    low, high = 0.0, 1.0
    if speedup(high) < wanted:
        return None
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if speedup(middle) < wanted else (low, middle)
    return high


def warnings(row: Row) -> list[str]:
    """What a reader of a row must know."""
    found = []
    if row["c"] >= 1:
        found.append("the draft is slower than its target")
    elif row["alpha"] <= row["c"]:
        found.append("alpha is not above c: no draft length pays")
    gap = row["speedup"] / row["counted"] - 1
    if abs(gap) > _NEAR:
        found.append(f"{gap:+.0%} of its prediction: a busy machine?")
    return found


def speedups(
    content: Mapping[str, Any], settings: Mapping[str, Any]
) -> Iterator[Block]:
    """Tables 2 and 4, what was lost, the baseline's switch, and the paper's own rows.

    Args:
        content: has ``times`` and ``baselines``.
        settings: has ``tie``.
    """
    rows = content["times"]
    where = ["task", "T", "target", "draft"]
    yield Grid(
        [*where, "gamma", "alpha", "c", "v", "measured", "counted", "survival"]
        + ["formula", "paper: draft", "gamma", "alpha", "c", "measured", "formula"],
        [[*_where(row), *_speed(row)] for row in rows],
        words=frozenset({0, 2, 3, 12}),
        marked=_best(rows),
        caption="measured: time per token without the draft over that with it, whole "
        "decodes of one line at a time; counted: (E + N) / (E + e + R (gamma c + v)), "
        "from the N tokens and R target calls of this run and its parts timed apart, "
        "E and e being the encoders; survival: (1 + sum A_i) / (gamma c + v), the loop "
        "alone; formula: the paper's, from alpha and c, with v = 1. Set off: the best "
        "of a task, temperature and target.",
    )
    yield Grid(
        [*where, "tokens", "calls", "per call", "drafts", "stood", "cut", "encoders"]
        + ["E", "e", "text", "to be known"],
        [[*_where(row), *_losses(row, settings["tie"])] for row in rows],
        words=frozenset({0, 2, 3, 13, 14}),
        caption="cut: share of the tokens that whole rounds bring and the end of a "
        "text cuts off; encoders: share of the loop's speedup that they cost; E, e: a "
        "line's encoder of target and draft, in target steps; text: whether greedy "
        "decodes with and without the draft are one.",
    )
    yield from _needed(rows)
    yield from _broken(rows)
    yield from _baselines(rows, content["baselines"])
    yield Heading("The paper's own rows", 3)
    yield Grid(
        ["task", "draft", "T", "gamma", "alpha", "c", "measured", "expected", "formula"]
        + ["ceiling", "best gamma"],
        [
            [
                row.task,
                row.draft + (" *" if row.starred else ""),
                f"{row.temperature}",
                f"{row.gamma}",
                f"{row.alpha:.2f}",
                f"{row.c:.2f}",
                f"{row.speed:.1f}x",
                f"{row.expected:.1f}x",
                f"{row.formula:.2f}x",
                f"{row.ceiling:.2f}x",
                f"{row.best_gamma}",
            ]
            for row in leviathan.TABLE_2
        ],
        words=frozenset({0, 1}),
        marked=frozenset(
            at
            for at, row in enumerate(leviathan.TABLE_2)
            if row in leviathan.above_ceiling()
        ),
        caption="T5-XXL on one TPU v4. formula: computed anew from the printed alpha, "
        "gamma and c; ceiling: the same at c = 0; *: starred in the paper. Set off: "
        "measured above the ceiling.",
    )


def _where(row: Row) -> list[str]:
    return [row["task"], f"{row['temperature']}", row["target"], row["draft"]]


def _speed(row: Row) -> list[str]:
    paper, own = _paper(row), predictions(row)
    return [
        f"{row['gamma']}",
        f"{row['alpha']:.2f}",
        f"{row['c']:.3f}",
        f"{row['v']:.2f}",
        f"{row['speedup']:.2f}x",
        f"{row['counted']:.2f}x",
        f"{own['survival']:.2f}x",
        f"{own['formula']:.2f}x",
        paper.draft,
        f"{paper.gamma}",
        f"{paper.alpha:.2f}",
        f"{paper.c:.2f}",
        f"{paper.speed:.1f}x",
        f"{paper.formula:.2f}x",
    ]


def _losses(row: Row, tie: float) -> list[str]:
    text = "-"
    if row["temperature"] == 0:
        gap = max((own["top2_gap"] for own in row["mismatches"]), default=None)
        text = "one" if gap is None else "one but for ties" if gap <= tie else "DIFFERS"
    return [
        f"{row['tokens']}",
        f"{row['calls']}",
        f"{row['tokens_per_call']:.2f}",
        f"{row['drafted']}",
        f"{row['accepted']}",
        f"{row['lost_to_cut']:.1%}",
        f"{row['lost_to_encoders']:.1%}",
        f"{row['encode']:.2f}",
        f"{row['draft_encode']:.2f}",
        text,
        "; ".join(warnings(row)),
    ]


def _best(rows: Sequence[Row]) -> frozenset[int]:
    best: dict[Any, int] = {}
    for at, row in enumerate(rows):
        group = (row["task"], row["temperature"], row["target"])
        if row["speedup"] > rows[best.setdefault(group, at)]["speedup"]:
            best[group] = at
    return frozenset(best.values())


def _needed(rows: Sequence[Row]) -> Iterator[Block]:
    short = [row for row in rows if row["speedup"] < _WANTED]
    if not short:
        return
    yield Heading(f"What {_WANTED:g}x would take", 3)
    lines = []
    for row in short:
        alpha = alpha_for(row, _WANTED)
        lines.append(
            [
                *_where(row),
                f"{row['speedup']:.2f}x",
                f"{row['alpha']:.2f}",
                "none" if alpha is None else f"{alpha:.2f}",
                f"{row['plain_tokens'] / row['lines']:.1f}",
            ]
        )
    yield Grid(
        ["task", "T", "target", "draft", "measured", "alpha", "alpha for it"]
        + ["tokens per line"],
        lines,
        words=frozenset({0, 2, 3}),
        caption="From the row's gamma, costs and mean length, with drafts that stand "
        "or fall alike and independently; none: encoders, the cut and the verifying "
        "pass leave no room for it even where every draft stands.",
    )


def _broken(rows: Sequence[Row]) -> Iterator[Block]:
    """Rows that beat the formula's own ceiling, and what gave way."""
    found = []
    for row in rows:
        ceiling = predictions(row)["ceiling"]
        if row["speedup"] > ceiling:
            tokens = 1 + sum(row["counted_survival"])
            found.append(
                f"{name_of(row)}: {row['speedup']:.2f}x is above the {ceiling:.2f} "
                "tokens per target call that alpha gives. A whole round brought "
                f"{tokens:.2f}: acceptance is not alike and independent from token to "
                "token (these lines are easier than the mean, or drafts stand in runs)."
            )
    if found:
        yield Heading("Above the formula's ceiling", 3)
        yield Prose(found, points=True)


def _baselines(rows: Sequence[Row], alone: Sequence[Row]) -> Iterator[Block]:
    switched = [own for own in alone if own["slower_if_recomputed"] is not None]
    if not switched:
        return
    lines = []
    for own in switched:
        share = own["slower_if_recomputed"]
        for row in rows:
            if all(row[k] == own[k] for k in ("task", "temperature", "target")):
                lines.append(
                    [
                        *_where(row),
                        f"{own['source_tokens']}",
                        f"{share:.2f}x",
                        f"{row['speedup']:.2f}x",
                        f"{row['speedup'] * share:.2f}x",
                    ]
                )
    yield Heading("A baseline that projects the source at every step", 3)
    yield Grid(
        ["task", "T", "target", "draft", "source tokens", "slower", "speedup"]
        + ["speedup over it"],
        lines,
        words=frozenset({0, 2, 3}),
        caption="slower: whole decodes of the target alone whose cross-attention makes "
        "the keys and values of all source tokens anew at each step, over those of a "
        "target that keeps them. Speculation keeps them in both columns: the last one "
        "is what would be reported against such a baseline, for the same work.",
    )


def acceptance(laws: Sequence[Row]) -> Iterator[Block]:
    """Table 3.

    Args:
        laws: of each task, temperature and draft.
    """
    found: dict[tuple[str, str], dict[int, Row]] = {}
    for row in laws:
        found.setdefault((row["task"], row["draft"]), {})[row["temperature"]] = row
    lines = []
    for (task, draft), own in found.items():
        (some, *_) = own.values()
        cells = [task, some["paper"], draft]
        for temperature in (0, 1):
            known = own.get(temperature)
            cells += [_alpha(known, "1.0"), f"{known['tokens']}" if known else "-"]
            cells.append(_printed(some, temperature))
        lines.append([*cells, some["paper_draft"]])
    yield Grid(
        ["task", "stands for", "draft", "alpha, T = 0", "tokens", "paper"]
        + ["alpha, T = 1", "tokens", "paper", "paper's draft"],
        lines,
        words=frozenset({0, 1, 2, 9}),
        caption="alpha: mean of sum min(p, q) over the prefixes of texts that the "
        "target wrote, with its standard error over lines; at T = 0 the share of "
        "prefixes at which both models' best token is one.",
    )
    yield Heading("The paper's other targets", 3)
    yield Grid(
        ["target", "task", "draft", "alpha, T = 0", "alpha, T = 1"],
        [
            [row.target, row.task, row.draft, f"{row.greedy:.2f}", f"{row.sampled:.2f}"]
            for row in leviathan.TABLE_3
            if row.task not in leviathan.TASKS
        ],
        words=frozenset({0, 1, 2}),
        caption="Decoder-only models, as printed; they are not measured here.",
    )


def _alpha(row: Row | None, lenience: str) -> str:
    if row is None or lenience not in row["alpha"]:
        return "-"
    own = row["alpha"][lenience]
    error = "" if own["error"] is None else f" \N{PLUS-MINUS SIGN} {own['error']:.2f}"
    return f"{own['mean']:.2f}{error}"


def _printed(row: Row, temperature: int) -> str:
    for own in leviathan.TABLE_3:
        if (own.task, own.draft) == (row["paper"], row["paper_draft"]):
            return f"{own.sampled if temperature else own.greedy:.2f}"
    return "-"


def lenience(laws: Sequence[Row]) -> Iterator[Block]:
    """Table 5, and the speeds that the formula gives with its alphas.

    Args:
        laws: of each task, temperature and draft.
    """
    levels = list(dict.fromkeys(level for row in laws for level in row["alpha"]))
    lines, speeds = [], []
    for row in laws:
        way = "sampled" if row["temperature"] else "greedy"
        printed = _printed_lenient(row)
        shown = [
            _alpha(row, level)
            + (f" ({printed[level]:.2f})" if level in printed else "")
            for level in levels
        ]
        lines.append([row["task"], way, row["draft"], *shown])
        if row["model"]:
            gains = [_lenient_speed(row, level) for level in levels]
            claimed = _claimed(row)
            speeds.append(
                [row["task"], way, row["draft"]]
                + [
                    f"{gain:.2f}x" + (f" ({claimed[x]:g}x)" if x in claimed else "")
                    for x, gain in zip(levels, gains, strict=True)
                ]
            )
    titles = ["task", "way", "draft", *(f"l = {float(level):g}" for level in levels)]
    yield Grid(
        titles,
        lines,
        words=frozenset({0, 1, 2}),
        caption="alpha where q counts l times in the test of acceptance: sum "
        "min(p / l, q) at T = 1; greedily the share of drafts with p(x) >= l max p. "
        "In brackets: the paper's, where it prints one.",
    )
    yield Grid(
        titles,
        speeds,
        words=frozenset({0, 1, 2}),
        caption="The formula with these alphas and the paper's c = "
        f"{leviathan.LENIENT_C}: at its best gamma where tokens are sampled, at gamma "
        f"{leviathan.LENIENT_GAMMA} greedily. In brackets: what the paper claims.",
    )
    best = ", ".join(f"{own:.2f}x" for own in leviathan.lenient_best())
    yield Prose([f"With the paper's own alphas of T5-small the formula gives {best}."])


def _lenient_speed(row: Row, level: str) -> float:
    alpha, c = row["alpha"][level]["mean"], leviathan.LENIENT_C
    sampled = row["temperature"] == 1
    gamma = theory.best_gamma(alpha, c) if sampled else leviathan.LENIENT_GAMMA
    return float(theory.walltime_factor(alpha, gamma, c))


def _printed_lenient(row: Row) -> dict[str, float]:
    if row["paper"] != "EnDe":
        return {}
    if row["temperature"] == 1:
        own = leviathan.TABLE_5.get(row["paper_draft"], ())
    else:
        own = leviathan.TABLE_5_GREEDY if row["paper_draft"] == "T5-small" else ()
    return dict(zip(map(str, leviathan.LENIENCES), own, strict=False))


def _claimed(row: Row) -> dict[str, float]:
    if row["paper"] != "EnDe" or row["paper_draft"] != "T5-small":
        return {}
    sampled = row["temperature"] == 1
    own = leviathan.LENIENT_SPEEDS if sampled else leviathan.LENIENT_SPEEDS_GREEDY
    return dict(zip(map(str, leviathan.LENIENCES), own, strict=True))
