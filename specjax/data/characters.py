"""Characters: which are none, which do not show, and which bytes make one."""

import codecs
import unicodedata
from collections.abc import Iterable

from specjax import errors


def is_blank(text: str) -> bool:
    """Whether a text holds nothing that shows: spaces, controls, zero-width signs."""
    kinds = map(unicodedata.category, text)
    return all(kind[0] == "Z" or kind in ("Cc", "Cf") for kind in kinds)


def check_text(text: str) -> None:
    """Refuses what no UTF-8 holds, at which SentencePiece fails without a word.

    Raises:
        InputError: there is half of a surrogate pair.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.InputError(
            f"character {error.start} of a text of {len(text)} is "
            f"U+{ord(text[error.start]):04X}, half of a surrogate pair, which alone is "
            "no character: leave it out, or read the text with its own encoding"
        ) from error


def whole_characters(parts: Iterable[str | int], length: int) -> list[str]:
    """One text a part: bytes wait for the one that completes their character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts: list[str] = []
    for part in parts:
        if isinstance(part, int):
            texts.append(decoder.decode(bytes([part])))
            continue
        # Bytes that nothing completed belong to the last of them.
        broken = decoder.decode(b"", True)
        if broken:
            texts[-1] += broken
        texts.append(part)
    broken = decoder.decode(b"", True)
    if broken:
        texts[-1] += broken
    return texts + [""] * (length - len(texts))
