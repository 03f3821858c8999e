"""What ships with specjax: pairs, as Hugging Face T5 folders, and other drafters."""

from __future__ import annotations

import dataclasses
import pathlib

from specjax.errors import InputError

_FOLDER = pathlib.Path(__file__).parent
_PREFIX = "zoo/"
# One pair serves both tasks, told apart by the prefix of the source.
_ALSO = {"synopsis": "repair"}


@dataclasses.dataclass(frozen=True)
class Task:
    """What a shipped pair was trained to do.

    Attributes:
        name: "NAME/target" and "NAME/draft" are its models.
        prefix: stands before every source.
        max_source: most tokens of a source that it was trained on, prefix and end of
            sequence included.
    """

    name: str
    prefix: str
    max_source: int

    @property
    def target(self) -> str:
        """The target, as `locate` takes it."""
        return f"{_PREFIX}{self.name}/target"

    @property
    def draft(self) -> str:
        """The draft model, as `locate` takes it."""
        return f"{_PREFIX}{self.name}/draft"


# By name; the configs of their training have the numbers.
TASKS = {
    task.name: task
    for task in (
        Task("repair", "repair: ", 96),
        Task("synopsis", "summarize: ", 384),
        Task("ende", "", 96),
    )
}


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
