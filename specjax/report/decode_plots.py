"""Drawings of what a decode did and of what it costs: numbers in, a figure out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax import theory
from specjax.metrics.timing import Costs
from specjax.report.plots import COLOURS, MARKERS, empty_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = Mapping[str, Any]
Numbers = Sequence[float] | np.ndarray

_PARTS = {
    "encode": COLOURS[4],
    "draft encode": COLOURS[3],
    "step": "#9aa7b5",
    "draft": COLOURS[2],
    "verify": COLOURS[0],
}
_PALE = "#6b7785"  # theory, and what is there to compare with


def speedup_by_gamma(rows: Sequence[Row], *, alpha: float, c: float) -> Figure:
    """How much faster each draft length is: measured, predicted, and by the formula.

    Args:
        rows: each with ``gamma`` and ``speedup``; ``low`` and ``high``, quartiles of
            the speedup, and ``predicted``, from the counts and costs of this draft
            length (`theory.speedup_from_counts`), where they are known.
        alpha: of the pair, for the formula of Leviathan et al. 2023
            (arXiv:2211.17192), Theorem 3.8.
        c: cost of drafting one token, in target steps.
    """
    figure, (axis,) = empty_figure(height=4.4)
    rows = sorted(rows, key=lambda row: row["gamma"])
    gammas = np.arange(1, max(row["gamma"] for row in rows) + 2)
    axis.plot(
        gammas,
        theory.walltime_factor(alpha, gammas, c),
        linestyle="--",
        color=_PALE,
        label=f"the paper's formula: alpha {alpha:.2f}, c {c:.2f}, v 1",
    )
    known = [row for row in rows if row.get("predicted") is not None]
    if known:
        axis.plot(
            [row["gamma"] for row in known],
            [row["predicted"] for row in known],
            marker=MARKERS[1],
            color=COLOURS[1],
            label="from the counts and costs of these decodes",
        )
    speedups = np.array([row["speedup"] for row in rows], float)
    beyond = [
        [max(row["speedup"] - row.get("low", row["speedup"]), 0.0) for row in rows],
        [max(row.get("high", row["speedup"]) - row["speedup"], 0.0) for row in rows],
    ]
    axis.errorbar(
        [row["gamma"] for row in rows],
        speedups,
        yerr=beyond,
        marker=MARKERS[0],
        markersize=7,
        capsize=3,
        color=COLOURS[0],
        label="measured, with quartiles" if np.any(beyond) else "measured",
    )
    axis.axhline(1, color="black", linewidth=0.8)
    axis.annotate(
        "target alone",
        (1, 1),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axis.set(
        xlabel="gamma: tokens drafted per target call",
        ylabel="speedup over the target alone",
        xticks=gammas[:: math.ceil(len(gammas) / 16)],
    )
    axis.set_ylim(bottom=0)
    _legend(figure, axis)
    return figure


def acceptance_by_position(
    survivals: Mapping[str, Numbers],
    alphas: Mapping[str, float | None] | None = None,
) -> Figure:
    """How far into a block drafts stand: from its start, and one after the other.

    Args:
        survivals: of each decode, A_i for i = 1 .. gamma (`metrics.survival`).
        alphas: of the same names, where known: what drafts that stand or fall alike and
            independently would give (dashed).
    """
    figure, (whole, next_) = empty_figure(2, width=9.2)
    longest = 1
    for at, (name, survival) in enumerate(survivals.items()):
        depths = np.arange(1, len(survival) + 1)
        longest = max(longest, len(survival))
        before = np.concatenate(([1.0], np.asarray(survival, float)[:-1]))
        # Nothing is known of a depth that no block has reached.
        then = np.divide(
            survival, before, out=np.full(len(depths), np.nan), where=before > 0
        )
        style: dict[str, Any] = dict(
            color=COLOURS[at % len(COLOURS)], marker=MARKERS[at % len(MARKERS)]
        )
        whole.plot(depths, survival, label=name, **style)
        next_.plot(depths, then, label=name, **style)
        alpha = (alphas or {}).get(name)
        if alpha is not None:
            dashed = dict(color=style["color"], linestyle="--", linewidth=1)
            label = f"alpha {alpha:.2f}, {name}"
            whole.plot(depths, theory.iid_survival(alpha, len(depths)), **dashed)
            next_.plot(depths, np.full(len(depths), alpha), label=label, **dashed)
    whole.set(title="all drafts up to it stand", ylabel="share of target calls")
    next_.set(title="it stands, where all before it do", ylabel="share of those calls")
    for axis in (whole, next_):
        axis.set_xlabel("position in the block")
        axis.set_ylim(0, 1.03)
        axis.set_xticks(range(1, longest + 1, math.ceil(longest / 16)))
    _legend(figure, next_, columns=4)
    return figure


def block_lengths(
    counts: Sequence[int] | np.ndarray, alpha: float | None = None
) -> Figure:
    """How many tokens target calls gave, before the cut at a text's end.

    Args:
        counts: calls that accepted 0, 1, .. gamma drafts (`metrics.accepted_counts`).
        alpha: of the pair, where known: marks what drafts that stand or fall alike and
            independently would give.
    """
    figure, (axis,) = empty_figure(height=4.4)
    calls = int(np.sum(counts))
    shares = np.asarray(counts, float) / max(calls, 1)
    tokens = np.arange(1, len(shares) + 1)
    axis.bar(tokens, shares, width=0.72, color=COLOURS[0], label=f"{calls} calls")
    if alpha is not None:
        stands = theory.iid_survival(alpha, len(shares) - 1)
        stands = np.concatenate(([1.0], stands, [0.0]))
        axis.plot(
            tokens,
            stands[:-1] - stands[1:],
            MARKERS[3],
            color=COLOURS[1],
            markeredgecolor="black",
            label=f"alike and independent, alpha {alpha:.2f}",
        )
    mean = float(shares @ tokens)
    axis.axvline(
        mean, color="black", linestyle=":", label=f"mean {mean:.2f} tokens per call"
    )
    axis.set(
        xlabel="tokens of a target call: accepted drafts, and the target's own",
        ylabel="share of target calls",
        xticks=tokens,
        xticklabels=[
            f"{own}\n{share:.0%}" for own, share in zip(tokens, shares, strict=True)
        ],
    )
    _legend(figure, axis)
    return figure


def alpha_by_entropy(entropy: Numbers, beta: Numbers, *, bins: int = 8) -> Figure:
    """Where the target hesitates, drafts fall: a point per prefix, and means.

    Args:
        entropy: of the target's law at each prefix, in nats (`metrics.Agreement`).
        beta: the probability that a token drafted there is accepted.
        bins: of as many prefixes each, whose means are drawn with standard errors.
    """
    figure, (axis,) = empty_figure(height=4.4)
    order = np.argsort(np.asarray(entropy), kind="stable")
    across, up = np.asarray(entropy, float)[order], np.asarray(beta, float)[order]
    axis.plot(
        across,
        up,
        ".",
        color=COLOURS[5],
        alpha=min(1.0, 0.2 + 40 / max(len(up), 1)),
        markersize=5,
        label=f"{len(up)} prefixes",
    )
    parts = [own for own in np.array_split(np.arange(len(up)), bins) if len(own) > 1]
    if parts:
        axis.errorbar(
            [across[own].mean() for own in parts],
            [up[own].mean() for own in parts],
            yerr=[up[own].std(ddof=1) / math.sqrt(len(own)) for own in parts],
            marker=MARKERS[0],
            capsize=3,
            color=COLOURS[1],
            label="means of as many prefixes each, with standard errors",
        )
    if len(up):
        axis.axhline(
            up.mean(),
            color="black",
            linestyle=":",
            label=f"alpha, the mean of all: {up.mean():.2f}",
        )
    axis.set(
        xlabel="entropy of the target's law, in nats",
        ylabel="probability that a draft stands",
        ylim=(0, 1.03),
    )
    _legend(figure, axis)
    return figure


def _legend(figure: Figure, axis: Axes, columns: int = 1) -> None:
    """Below the panels, where it hides nothing."""
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(columns, len(labels)),
        fontsize=8,
    )


def plain_lane(name: str, costs: Costs, tokens: int) -> dict[str, Any]:
    """A lane of `timeline`: a decode by the target alone.

    Args:
        name: of the lane.
        costs: measured of its parts.
        tokens: that it wrote.
    """
    parts = [("encode", costs.encode.median)]
    return _lane(name, parts + [("step", costs.step.median)] * tokens)


def speculative_lane(name: str, costs: Costs, calls: int) -> dict[str, Any]:
    """A lane of `timeline`: a decode with drafts.

    Args:
        name: of the lane.
        costs: measured of its parts, at its draft length.
        calls: target calls that it made.
    """
    step = costs.step.median
    parts = [("encode", costs.encode.median)]
    parts.append(("draft encode", costs.draft_encode.median))
    for _ in range(calls):
        parts += [("draft", costs.cost_ratio * step)] * costs.gamma
        parts.append(("verify", costs.verify_ratio * step))
    return _lane(name, parts)


def _lane(name: str, parts: Sequence[tuple[str, float]]) -> dict[str, Any]:
    ends = np.cumsum([0.0, *(length for _, length in parts)]).tolist()
    placed = [
        [kind, at, length] for (kind, length), at in zip(parts, ends, strict=False)
    ]
    return {"name": name, "parts": placed}


def timeline(lanes: Sequence[Row]) -> Figure:
    """What runs when, one decode per lane, to scale.

    Args:
        lanes: each with a ``name`` and ``parts``: kind ("encode", "draft encode",
            "step", "draft", "verify"), start and length in seconds.
    """
    figure, (axis,) = empty_figure(width=9.0, height=0.9 + 0.75 * len(lanes))
    from matplotlib.patches import Patch

    axis.grid(visible=False)
    longest = max(
        start + length for lane in lanes for _, start, length in lane["parts"]
    )
    for at, lane in enumerate(lanes):
        _draw_lane(axis, at, lane["parts"], longest)
    axis.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    figure.legend(
        handles=[Patch(color=colour, label=kind) for kind, colour in _PARTS.items()],
        loc="outside upper center",
        ncols=len(_PARTS),
        fontsize=8,
    )
    return figure


def _draw_lane(
    axis: Axes, at: int, parts: Sequence[Sequence[Any]], longest: float
) -> None:
    for kind, start, length in parts:
        axis.broken_barh(
            [(1e3 * start, 1e3 * length)],
            (at - 0.35, 0.7),
            facecolor=_PARTS[kind],
            edgecolor="white",
            # A border would hide what is hardly wider.
            linewidth=0.4 if length > longest / 200 else 0.0,
        )
