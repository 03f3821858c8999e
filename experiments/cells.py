"""Results of a long comparison, a line each: one that was stopped goes on with them."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from specjax import errors

Row = dict[str, Any]


class Cells:
    """A file of results by key; each is written as soon as it is known.

    A cell that fails is listed in `failed`, and the others are done all the same.

    Args:
        path: its first line holds `settings`, each other one a cell.
        settings: what every result depends on.

    Raises:
        errors.InputError: the file holds results under other settings.
    """

    def __init__(self, path: pathlib.Path, settings: Mapping[str, Any]):
        self.failed: list[str] = []
        self._path = path
        self._done: dict[str, Row] = {}
        head = json.dumps(settings, sort_keys=True, default=str)
        lines = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        if not lines:
            path.write_text(head + "\n", encoding="utf-8")
            return
        if lines[0] != head:
            raise errors.InputError(
                f"{path} holds results of other settings, weights or lines: take "
                "another --workdir, or remove it"
            )
        whole = []
        for line in lines[1:]:
            try:
                cell = json.loads(line)
            except json.JSONDecodeError:
                continue  # cut short by a kill: it is done again
            self._done[_name(cell["key"])] = cell["result"]
            whole.append(line)
        path.write_text("\n".join([head, *whole, ""]), encoding="utf-8")

    def find(self, key: Mapping[str, str]) -> Row | None:
        """The result of a cell if it is known.

        Args:
            key: of the cell.
        """
        return self._done.get(_name(key))

    def get(self, key: Mapping[str, str], make: Callable[[], Row]) -> Row | None:
        """The result of a cell: as it stands in the file, or made now.

        Args:
            key: of the cell.
            make: computes it.

        Returns:
            None where computing it failed.

        Raises:
            errors.InputError: of `make`; any other exception is listed.
        """
        name = _name(key)
        if name not in self._done:
            try:
                result = make()
            except errors.InputError:
                raise
            except Exception as error:
                self.failed.append(f"{name}: {type(error).__name__}: {error}")
                return None
            line = json.dumps({"key": dict(key), "result": result})
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line + "\n")
            # As it will be read: whole numbers as keys become words, say.
            self._done[name] = json.loads(line)["result"]
        return self._done[name]


def _name(key: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(key.items()))
