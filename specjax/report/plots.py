"""What all pictures share."""

from __future__ import annotations

from specjax.errors import InputError

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


def check_plots() -> None:
    """Raises InputError where no picture can be drawn."""
    try:
        import matplotlib  # noqa: F401, ICN001
    except ImportError as error:
        raise InputError(
            f"{error.name} is not installed: pip install 'specjax[plots]' brings what "
            "draws the picture"
        ) from error
