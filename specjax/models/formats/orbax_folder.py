"""Models in Orbax's format: a checkpoint of the parameters, and `config.json`."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from specjax.errors import InputError
from specjax.models.formats.base import CONFIG_FILE

STEP = 0  # the number of the one checkpoint


def is_one(directory: pathlib.Path) -> bool:
    """Whether a directory holds what `save` writes."""
    return (directory / str(STEP) / "state").is_dir()


def save(
    parameters: dict[Any, Any], fields: dict[str, Any], directory: pathlib.Path
) -> None:
    """Writes a model; ``config.json`` comes last, so that one that has it is whole.

    Args:
        parameters: nested dict of arrays, `nnx.to_pure_dict` of the model's state.
        fields: of ``config.json``.
        directory: of the model; a checkpoint that is there already stays.

    Raises:
        OSError: the disk is full, or the like. A full disk may show otherwise too.
    """
    # Imported late: it loads orbax.
    from specjax import checkpoints

    if not is_one(directory):
        checkpoints.save(directory, STEP, parameters, fields)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")


def load(directory: pathlib.Path, like: dict[Any, Any]) -> dict[Any, Any]:
    """Reads the parameters, whose files are compared with their hashes first.

    Args:
        directory: see `save`.
        like: their shapes and types, a nested dict; each is cast to its type.

    Raises:
        InputError: a file is absent, changed or cut short, or the shapes differ.
    """
    from specjax import checkpoints

    try:
        restored = checkpoints.restore(directory, like, step=STEP)
    except InputError as error:
        raise InputError(f"{directory} cannot be loaded: {error}") from error
    assert restored is not None  # it was asked for by its number
    return restored.state
