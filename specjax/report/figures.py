"""Drawings of Leviathan et al. 2023 (arXiv:2211.17192), made anew, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import theory, theory_laws
from specjax.report import decode_plots
from specjax.report.plots import COLOURS, MARKERS, empty_figure, svg

_ALPHAS = np.linspace(0.0, 0.99, 200)


def tokens_by_alpha(points: Sequence[Mapping[str, Any]]) -> str:
    """Figure 2: expected tokens per target call by alpha, and what was counted.

    Args:
        points: ``alpha``, ``tokens_per_call`` and ``gamma`` of decodes.
    """
    figure, (axis,) = empty_figure()
    gammas = (1, 3, 5, 7, 10)
    for colour, gamma in zip(COLOURS, gammas, strict=False):
        tokens = theory.expected_tokens(_ALPHAS, gamma)
        axis.plot(_ALPHAS, tokens, color=colour, label=f"gamma {gamma}")
    endless = theory.expected_tokens(_ALPHAS, np.inf)
    axis.plot(_ALPHAS, endless, color="grey", linestyle="--", label="endless drafts")
    for at, gamma in enumerate(sorted({int(point["gamma"]) for point in points})):
        own = [point for point in points if point["gamma"] == gamma]
        axis.plot(
            [point["alpha"] for point in own],
            [point["tokens_per_call"] for point in own],
            MARKERS[at % len(MARKERS)],
            color=COLOURS[gammas.index(gamma)] if gamma in gammas else "black",
            markeredgecolor="black",
            label=f"counted here, gamma {gamma}",
        )
    axis.set(xlabel="alpha", ylabel="tokens per target call", ylim=(0.8, 11))
    axis.legend(fontsize=8)
    return svg(figure, "figure2")


def best_gammas(points: Sequence[Mapping[str, Any]]) -> str:
    """Figure 3: the best draft length by alpha, for several c.

    Args:
        points: ``alpha`` and ``c`` of pairs; marked at the formula's best gamma.
    """
    figure, (axis,) = empty_figure()
    for colour, c in zip(COLOURS, (0.01, 0.02, 0.05, 0.1, 0.2), strict=False):
        best = theory.best_gamma(_ALPHAS[:-1], c, 40)
        line: Any = dict(color=colour, drawstyle="steps-mid", label=f"c {c}")
        axis.plot(_ALPHAS[:-1], best, **line)
    if points:
        alphas = [float(point["alpha"]) for point in points]
        places = [int(theory.best_gamma(p["alpha"], p["c"], 40)) for p in points]
        axis.plot(alphas, places, "ko", markersize=4, label="pairs measured here")
    axis.set(xlabel="alpha", ylabel="best gamma", ylim=(0, 30))
    axis.legend(fontsize=8)
    return svg(figure, "figure3")


def speed_and_operations() -> str:
    """Figure 4: factors of speed (solid) and of arithmetic (dashed), c = 0."""
    figure, (axis,) = empty_figure()
    for colour, gamma in zip(COLOURS, (1, 3, 5, 7, 10), strict=False):
        speed = theory.walltime_factor(_ALPHAS, gamma, 0.0)
        work = theory.operation_factor(_ALPHAS, gamma, 0.0)
        axis.plot(_ALPHAS, speed, color=colour, label=f"gamma {gamma}")
        axis.plot(_ALPHAS, work, color=colour, linestyle="--")
    axis.set(xlabel="alpha", ylabel="factor", ylim=(0, 8))
    axis.legend(fontsize=8, title="solid: speed, dashed: arithmetic")
    return svg(figure, "figure4")


def timeline(lanes: Sequence[Mapping[str, Any]]) -> str:
    """Figure 5: what runs when, one decode per lane, to scale.

    Args:
        lanes: each with a ``name`` and ``parts``: kind ("encode", "draft encode",
            "step", "draft", "verify"), start and length in seconds.
    """
    return svg(decode_plots.timeline(lanes), "figure5")


def speedups(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table 2 as bars: measured, predicted from the counts, and the paper's.

    Args:
        rows: ``name``, ``speedup``, ``predicted`` and ``paper`` (None: no such row).
    """
    figure, (axis,) = empty_figure(width=9.0, height=1.2 + 0.36 * len(rows))
    axis.grid(visible=False)
    places = np.arange(len(rows))
    axis.barh(
        places,
        [row["speedup"] for row in rows],
        height=0.62,
        color=COLOURS[0],
        label="measured here",
    )
    axis.plot(
        [row["predicted"] for row in rows],
        places,
        "|",
        color="black",
        markersize=15,
        markeredgewidth=2,
        label="from this run's counts and costs",
    )
    known = [(row["paper"], at) for at, row in enumerate(rows) if row["paper"]]
    if known:
        axis.plot(
            *zip(*known, strict=True),
            "D",
            color=COLOURS[1],
            markersize=5,
            label="the paper, T5-XXL on a TPU v4",
        )
    axis.axvline(1, color="grey", linewidth=0.8)
    axis.set_yticks(places, [row["name"] for row in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("speedup")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    return svg(figure, "table2")


def entropy_curve(
    curves: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> str:
    """The leading term of the entropy bound, by tokens verified per target call.

    Args:
        curves: ``name``, ``entropy`` and ``log_moment`` of the target's laws.
        points: ``name`` of a curve, ``budget`` and ``tokens_per_call`` of decodes.
    """
    figure, (axis,) = empty_figure()
    budgets = np.geomspace(1, 64, 100)
    for at, curve in enumerate(curves):
        colour = COLOURS[at % len(COLOURS)]
        own = theory_laws.entropy_leading_term(
            curve["entropy"], curve["log_moment"], budgets
        )
        axis.plot(budgets, own, color=colour, label=f"leading term, {curve['name']}")
        mine = [point for point in points if point["name"] == curve["name"]]
        axis.plot(
            [point["budget"] for point in mine],
            [point["tokens_per_call"] for point in mine],
            MARKERS[at % len(MARKERS)],
            color=colour,
            label=f"counted, {curve['name']}" if mine else None,
        )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="tokens verified per target call", ylabel="tokens per target call")
    axis.legend(fontsize=8)
    return svg(figure, "entropy")
