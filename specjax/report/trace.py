"""One decode as text: which tokens were drafted and stood, corrected, or came free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from specjax.decoding import DecodeOutput
from specjax.errors import InputError

if TYPE_CHECKING:
    from rich.text import Text

ACCEPTED, CORRECTED, BONUS = "accepted", "corrected", "bonus"

# Told apart by people with any colour vision.
STYLES = {
    ACCEPTED: "green",
    CORRECTED: "bold yellow underline",
    BONUS: "bold bright_blue",
}
# Around a token, where there are no colours.
MARKS = {ACCEPTED: ("", ""), CORRECTED: ("[", "]"), BONUS: ("{", "}")}


@dataclasses.dataclass(frozen=True)
class TracedToken:
    """An emitted token and how it came about.

    Attributes:
        token: its id.
        kind: accepted (drafted, and it stood), corrected (the target's word after a
            rejection or where nothing was drafted), or bonus (after a block that stood
            as a whole).
        call: the target call that emitted it, from 0.
    """

    token: int
    kind: str
    call: int


def traced_tokens(output: DecodeOutput, row: int) -> list[TracedToken]:
    """The emitted tokens of one row, in order, with their origin.

    Args:
        output: of `speculative_generate` with ``trace=True``.
        row: which row of the batch.

    Raises:
        InputError: the output holds no trace.
    """
    if output.trace is None:
        raise InputError("the decode holds no trace: generate with trace=True")
    trace = output.trace
    tokens = []
    for call in range(int(output.stats.target_calls[row])):
        accepted = int(trace.num_accepted[row, call])
        drafted = np.asarray(trace.tokens[row, call])
        length = int(trace.length[row, call])
        if trace.path is None or trace.parents is None:
            whole = 0 < accepted == length
        else:  # of a tree: down to a node that has no child
            path = np.asarray(trace.path[row, call])[:accepted]
            drafted = drafted[path - 1]
            parents = np.asarray(trace.parents[row, call])[: length + 1]
            whole = accepted > 0 and path[-1] not in parents
        tokens += [TracedToken(int(t), ACCEPTED, call) for t in drafted[:accepted]]
        kind = BONUS if whole else CORRECTED
        tokens.append(TracedToken(int(trace.next_token[row, call]), kind, call))
    # The last call's block is cut at EOS, a stop sequence or the budget.
    return tokens[: int(output.stats.emitted[row])]


def coloured(
    tokens: Sequence[TracedToken], texts: Sequence[str], *, marks: bool = False
) -> Text:
    """The decode for a terminal; a thin bar marks where a target call ended.

    Args:
        tokens: from `traced_tokens`.
        texts: what each token adds to the text.
        marks: brackets around corrected and bonus tokens, for a place without colours.

    Raises:
        InputError: not one text per token.
    """
    from rich.text import Text

    if len(tokens) != len(texts):
        raise InputError(f"{len(texts)} texts for {len(tokens)} tokens: one each")
    line = Text()
    for i, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        line.append(_marked(text, token.kind, marks), style=STYLES[token.kind])
        if i + 1 < len(tokens) and tokens[i + 1].call != token.call:
            line.append("\N{BOX DRAWINGS LIGHT VERTICAL}", style="dim")
    return line


def _marked(text: str, kind: str, marks: bool) -> str:
    first, last = MARKS[kind] if marks else ("", "")
    # The space before a word belongs to no token's meaning.
    word = text.lstrip(" ")
    if not word:
        return text
    return text[: len(text) - len(word)] + first + word + last


def legend(*, marks: bool = False) -> Text:
    """What the colours, or the marks in their place, mean."""
    from rich.text import Text

    line = Text()
    for kind, meaning in (
        (ACCEPTED, "drafted, accepted"),
        (CORRECTED, "corrected"),
        (BONUS, "bonus of a whole block"),
    ):
        line.append(_marked(meaning, kind, marks), style=STYLES[kind]).append("   ")
    return line.append("\N{BOX DRAWINGS LIGHT VERTICAL} end of a target call", "dim")
