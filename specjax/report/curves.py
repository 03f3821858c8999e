"""The curves of a training run: what was learnt at each step, as a picture."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from specjax.report.plots import COLOURS, check_plots

Line = Mapping[str, int | float]

# What a run logs -> its name in the legend; each list makes one panel.
_LOSSES = {"nll": "training", "validation_nll": "held out"}
_ALPHAS = {
    "alpha": "training texts",
    "alpha_greedy": "held out, greedy",
    "alpha_sampled": "held out, T = 1",
}
_RATES = {"learning_rate": "learning rate"}
# The first of a panel is a point per line of the log: too many to mark.
_SHAPES = ("", "o", "s")


def plot(lines: Sequence[Line], path: pathlib.Path) -> None:
    """Draws loss, alpha where there is a target, and the learning rate over the steps.

    Args:
        lines: of a run's `train.jsonl`.
        path: of the picture; its suffix names the format.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_plots()
    import matplotlib as mpl
    from matplotlib.figure import Figure

    panels = [(_LOSSES, "nats a token"), (_ALPHAS, "alpha"), (_RATES, "")]
    panels = [
        (names, label)
        for names, label in panels
        if any(name in line for name in names for line in lines)
    ]
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (names, label) in zip(axes, panels, strict=True):
        styles = zip(COLOURS, _SHAPES, names.items(), strict=False)
        for colour, shape, (name, title) in styles:
            points = [(own["step"], own[name]) for own in lines if name in own]
            if points:
                marker = shape or ("." if len(points) < 3 else "")
                axis.plot(
                    *zip(*points, strict=True),
                    color=colour,
                    marker=marker,
                    markersize=4,
                    linewidth=1.2,
                    label=title,
                )
        axis.set_xlabel("step")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
        axis.legend()
    # The same run gives the same file: no time of day, no random names.
    with mpl.rc_context({"svg.hashsalt": "specjax", "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
