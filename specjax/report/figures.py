"""Drawings of Leviathan et al. 2023 (arXiv:2211.17192), made anew, as SVG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specjax import theory, theory_laws
from specjax.report.plots import COLOURS, check_plots

_ALPHAS = np.linspace(0.0, 0.99, 200)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def tokens_by_alpha(points: Sequence[Mapping[str, Any]]) -> str:
    """Figure 2: expected tokens per target call by alpha, and what was counted.

    Args:
        points: ``alpha``, ``tokens_per_call`` and ``gamma`` of decodes.
    """
    figure, (axis,) = _figure(1)
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
            _MARKERS[at % len(_MARKERS)],
            color=COLOURS[gammas.index(gamma)] if gamma in gammas else "black",
            markeredgecolor="black",
            label=f"counted here, gamma {gamma}",
        )
    axis.set(xlabel="alpha", ylabel="tokens per target call", ylim=(0.8, 11))
    axis.legend(fontsize=8)
    return _svg(figure, "figure2")


def best_gammas(points: Sequence[Mapping[str, Any]]) -> str:
    """Figure 3: the best draft length by alpha, for several c.

    Args:
        points: ``alpha`` and ``c`` of pairs; marked at the formula's best gamma.
    """
    figure, (axis,) = _figure(1)
    for colour, c in zip(COLOURS, (0.01, 0.02, 0.05, 0.1, 0.2), strict=False):
        best = theory.best_gamma(_ALPHAS[:-1], c, 40)
        line = dict(color=colour, drawstyle="steps-mid", label=f"c {c}")
        axis.plot(_ALPHAS[:-1], best, **line)
    if points:
        alphas = [float(point["alpha"]) for point in points]
        places = [theory.best_gamma(p["alpha"], p["c"], 40) for p in points]
        axis.plot(alphas, places, "ko", markersize=4, label="pairs measured here")
    axis.set(xlabel="alpha", ylabel="best gamma", ylim=(0, 30))
    axis.legend(fontsize=8)
    return _svg(figure, "figure3")


def speed_and_operations() -> str:
    """Figure 4: factors of speed (solid) and of arithmetic (dashed), c = 0."""
    figure, (axis,) = _figure(1)
    for colour, gamma in zip(COLOURS, (1, 3, 5, 7, 10), strict=False):
        speed = theory.walltime_factor(_ALPHAS, gamma, 0.0)
        work = theory.operation_factor(_ALPHAS, gamma, 0.0)
        axis.plot(_ALPHAS, speed, color=colour, label=f"gamma {gamma}")
        axis.plot(_ALPHAS, work, color=colour, linestyle="--")
    axis.set(xlabel="alpha", ylabel="factor", ylim=(0, 8))
    axis.legend(fontsize=8, title="solid: speed, dashed: arithmetic")
    return _svg(figure, "figure4")


def timeline(lanes: Sequence[Mapping[str, Any]]) -> str:
    """Figure 5: what runs when, one decode per lane, to scale.

    Args:
        lanes: each with a ``name`` and ``parts``: kind ("encode", "draft encode",
            "step", "draft", "verify"), start and length in seconds.
    """
    check_plots()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    kinds = ("encode", "draft encode", "step", "draft", "verify")
    colours = (COLOURS[4], COLOURS[3], "#9aa7b5", COLOURS[2], COLOURS[0])
    tints = dict(zip(kinds, colours, strict=True))
    figure = Figure(figsize=(9, 0.9 + 0.75 * len(lanes)), layout="constrained")
    axis = figure.subplots()
    for at, lane in enumerate(lanes):
        for kind, start, length in lane["parts"]:
            axis.broken_barh(
                [(1e3 * start, 1e3 * length)],
                (at - 0.35, 0.7),
                facecolor=tints[kind],
                edgecolor="white",
                linewidth=0.4,
            )
    axis.set_yticks(range(len(lanes)), [lane["name"] for lane in lanes])
    axis.invert_yaxis()
    axis.set_xlabel("milliseconds")
    figure.legend(
        handles=[Patch(color=tints[kind], label=kind) for kind in kinds],
        loc="outside upper center",
        ncols=len(kinds),
        fontsize=8,
    )
    return _svg(figure, "figure5")


def speedups(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table 2 as bars: measured, predicted from the counts, and the paper's.

    Args:
        rows: ``name``, ``speedup``, ``predicted`` and ``paper`` (None: no such row).
    """
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
    axis = figure.subplots()
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
    return _svg(figure, "table2")


def entropy_curve(
    curves: Sequence[Mapping[str, Any]], points: Sequence[Mapping[str, Any]]
) -> str:
    """The leading term of the entropy bound, by tokens verified per target call.

    Args:
        curves: ``name``, ``entropy`` and ``log_moment`` of the target's laws.
        points: ``name`` of a curve, ``budget`` and ``tokens_per_call`` of decodes.
    """
    figure, (axis,) = _figure(1)
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
            _MARKERS[at % len(_MARKERS)],
            color=colour,
            label=f"counted, {curve['name']}" if mine else None,
        )
    axis.set_xscale("log", base=2)
    axis.set(xlabel="tokens verified per target call", ylabel="tokens per target call")
    axis.legend(fontsize=8)
    return _svg(figure, "entropy")


def _figure(count: int) -> tuple[Any, Any]:
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, count))
    for axis in axes:
        axis.grid(alpha=0.25)
    return figure, axes


def _svg(figure: Any, name: str) -> str:
    """The drawing alone, to stand in a page; the same bytes for the same numbers."""
    import matplotlib

    out = io.StringIO()
    # Names within the drawing hang on its own name: several share a page.
    own: Any = {"svg.hashsalt": name, "svg.fonttype": "none"}
    with matplotlib.rc_context(own):
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    # Groups are named alike in every drawing, and nothing refers to them.
    text = text[text.index("<svg") :]
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    return re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
