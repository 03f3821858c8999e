"""Texts that a decode begins with, or ends at, as arrays of ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from specjax import errors
from specjax.data.tokenizer import Tokenizer

# What follows a sentinel is spelled as within a word.
_SENTINEL = "<extra_id_0>"
_START_ID = 0  # of the decoder, which stands before all


def stop_sequences(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> Int32[np.ndarray, "K M"]:
    """The ids of texts that end a row once they are written.

    A text has one spelling at a word's start and one within a word; both count. Text
    that yet other ids spell does not end a row.

    Args:
        tokenizer: of the models.
        texts: such as ``["."]``.

    Returns:
        sequences, padded with -1.

    Raises:
        InputError: there is no text, or one that the tokenizer cannot spell.
    """
    if not texts:
        raise errors.InputError("there is no text to stop at: name one, or leave out")
    found: list[list[int]] = []
    for text in texts:
        _check_text(tokenizer, text)
        spellings = [tokenizer.encode(text)[:-1]]
        sentinel, *within = tokenizer.encode(_SENTINEL + text)[:-1]
        if tokenizer.piece(sentinel).endswith(_SENTINEL):  # else there are none
            spellings.append(within)
        for ids in spellings:
            if ids and ids not in found:
                found.append(ids)
    width = max(map(len, found))
    padded = [ids + [-1] * (width - len(ids)) for ids in found]
    return np.array(padded, np.int32)


def decoder_prefixes(
    tokenizer: Tokenizer, texts: Sequence[str]
) -> tuple[Int32[np.ndarray, "B P"], Int32[np.ndarray, " B"]]:
    """What rows begin with, so that their first tokens are forced.

    Args:
        tokenizer: of the models.
        texts: of each row; an empty one forces nothing.

    Returns:
        ids, the start token first, padded on the right, and how many of each row are
        real.

    Raises:
        InputError: a text that the tokenizer cannot spell.
    """
    rows = []
    for text in texts:
        if text:
            _check_text(tokenizer, text)
        rows.append([_START_ID, *tokenizer.encode(text)[:-1]])
    length = np.array([len(row) for row in rows], np.int32)
    ids = np.full((len(rows), int(length.max())), tokenizer.pad_id, np.int32)
    for row, own in zip(ids, rows, strict=True):
        row[: len(own)] = own
    return ids, length


def _check_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)[:-1]
    if not ids or tokenizer.unk_id in ids:
        raise errors.InputError(
            f"{text!r} cannot be spelled by the tokenizer: the models never write it"
        )
