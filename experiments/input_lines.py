"""The lines of text that commands read: where they are, and what is wrong with them."""

from __future__ import annotations

import pathlib

from specjax import errors
from specjax.data import characters


def input_file(name: str) -> pathlib.Path:
    """The file that ``--input`` or ``config.input`` names.

    Raises:
        InputError: none is named, or no such file.
    """
    if not name:
        raise errors.InputError("--input is missing: name the file to read")
    path = pathlib.Path(name).expanduser()
    if not path.is_file():
        raise errors.InputError(f"--input={path}: no such file")
    return path


def read_lines(path: pathlib.Path) -> list[str]:
    """The lines of a text file.

    Raises:
        InputError: not UTF-8, no line, or a line on which nothing shows.
    """
    try:
        # Decoded by hand: reading as text would also end a line at a lone "\r".
        lines = path.read_bytes().decode("utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise errors.InputError(f"--input={path} is not UTF-8 text") from error
    if lines[-1] == "":
        lines.pop()  # the last line's end
    lines = [line.removesuffix("\r") for line in lines]
    if not lines:
        raise errors.InputError(f"--input={path} is empty: it needs a line to decode")
    for number, line in enumerate(lines, start=1):
        if characters.is_blank(line):
            raise errors.InputError(
                f"--input={path}, line {number} is empty: nothing on it shows"
            )
    return lines


def check_lengths(
    rows: list[list[int]], buckets: tuple[int, ...], path: pathlib.Path
) -> None:
    """Names the first line that no bucket holds.

    Raises:
        InputError: there is one.
    """
    longest = max(buckets)
    for number, row in enumerate(rows, start=1):
        if len(row) > longest:
            raise errors.InputError(
                f"--input={path}, line {number} has {len(row)} tokens; the longest of "
                f"config.buckets is {longest}: shorten the line or add a bucket"
            )
