"""The one error that means "what you gave me cannot be used", as against a bug."""

from __future__ import annotations

from typing import Any


class InputError(ValueError):
    """A flag, file, row or token that the caller must change.

    The message is one sentence for a person: it names what is wrong and what would be
    right. Commands print it and exit with code 2; any other exception is a bug of ours.
    """


def is_whole(value: Any) -> bool:
    """Whether a setting is a whole number; True, 2.0 and numpy's are none."""
    return isinstance(value, int) and not isinstance(value, bool)
