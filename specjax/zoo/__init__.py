"""What ships with specjax: pairs, as Hugging Face T5 folders, and other drafters."""

from __future__ import annotations

import pathlib

from specjax.errors import InputError

_FOLDER = pathlib.Path(__file__).parent
_PREFIX = "zoo/"
# One pair serves both tasks, told apart by the prefix of the source.
_ALSO = {"synopsis": "repair"}


def names() -> list[str]:
    """The models and drafters that are here, such as "repair/target"."""
    return sorted(
        str(path.parent.relative_to(_FOLDER))
        for file in ("config.json", "drafter.json")
        for path in _FOLDER.rglob(file)
    )


def folder(name: str) -> pathlib.Path:
    """Where a shipped model or drafter lies.

    Args:
        name: one of `names`; "synopsis/..." is the pair that repairs, too.

    Raises:
        InputError: no such model.
    """
    known = names()
    pair, slash, role = name.partition("/")
    own = _ALSO.get(pair, pair) + slash + role
    if own not in known:
        raise InputError(f"no model {name!r} ships here: there are {', '.join(known)}")
    return _FOLDER / own


def locate(name: str | pathlib.Path) -> pathlib.Path:
    """The folder of "zoo/NAME", or else the path that `name` is.

    Raises:
        InputError: "zoo/NAME" without such a model.
    """
    text = str(name)
    if text.startswith(_PREFIX):
        return folder(text.removeprefix(_PREFIX))
    return pathlib.Path(name)
