"""What all pictures share."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Told apart by people with any colour vision (Okabe and Ito); pictures add shapes.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def check_plots() -> None:
    """Raises InputError where no picture can be drawn."""
    try:
        import matplotlib  # noqa: F401, ICN001
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed: pip install 'specjax[plots]' brings what "
            "draws the picture"
        ) from error


def empty_figure(
    panels: int = 1, *, width: float = 6.4, height: float = 4.0
) -> tuple[Figure, list[Axes]]:
    """A figure with a faint grid in each of its panels, side by side.

    It belongs to itself and to no window: nothing has to be closed.

    Args:
        panels: how many.
        width: of the whole, in inches.
        height: of it.

    Raises:
        InputError: matplotlib is not installed.
    """
    check_plots()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = np.atleast_1d(figure.subplots(1, panels)).tolist()
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    return figure, axes


def svg(figure: Figure, name: str) -> str:
    """The drawing alone, to stand in a page; the same bytes for the same numbers.

    Args:
        figure: the drawing.
        name: its own among those of the page.
    """
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
