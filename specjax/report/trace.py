"""One decode as text: which tokens were drafted and stood, corrected, or came free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from specjax.decode_state import Trace
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
class Drafted:
    """A drafted token, and what both models said of it.

    Attributes:
        token: its id.
        p: its probability under the target's law.
        q: under the law that it was drawn from; None: the drafter gave none.
    """

    token: int
    p: float
    q: float | None

    @property
    def chance(self) -> float | None:
        """min(1, p / q), with which token verification keeps it; None: q is unknown.

        >>> Drafted(token=7, p=0.2, q=0.8).chance
        0.25
        """
        return None if self.q is None else min(1.0, self.p / self.q)


class Origin(Protocol):
    """What colouring asks of a token: its kind, and its target call."""

    @property
    def kind(self) -> str: ...

    @property
    def call(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class TracedToken:
    """An emitted token and how it came about.

    Attributes:
        token: its id.
        kind: accepted (drafted, and it stood), corrected (the target's word after a
            rejection or where nothing was drafted), or bonus (after a block that stood
            as a whole).
        call: the target call that emitted it, from 0.
        drafts: what was drafted for its place: itself where it stood, and what was
            rejected where it is corrected (of a tree, each child that was).
    """

    token: int
    kind: str
    call: int
    drafts: tuple[Drafted, ...] = ()


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
        drafts = _drafts(trace, row, call)
        accepted = int(trace.num_accepted[row, call])
        if trace.path is None or trace.parents is None:
            stood, rejected = drafts[:accepted], drafts[accepted : accepted + 1]
        else:  # of a tree: down a path, and the children of its last node
            path = np.asarray(trace.path[row, call])[:accepted]
            parents = np.asarray(trace.parents[row, call])[1 : len(drafts) + 1]
            last = path[-1] if accepted else 0
            stood = [drafts[node - 1] for node in path]
            rejected = [drafts[at] for at in np.flatnonzero(parents == last)]
        tokens += [TracedToken(own.token, ACCEPTED, call, (own,)) for own in stood]
        kind = BONUS if stood and not rejected else CORRECTED
        token = int(trace.next_token[row, call])
        tokens.append(TracedToken(token, kind, call, tuple(rejected)))
    # The last call's block is cut at EOS, a stop sequence or the budget.
    return tokens[: int(output.stats.emitted[row])]


def _drafts(trace: Trace, row: int, call: int) -> list[Drafted]:
    """What one call had drafted, in the order of the block."""
    length = int(trace.length[row, call])
    columns = (
        np.asarray(own)[row, call, :length] for own in (trace.tokens, trace.p, trace.q)
    )
    # What was drawn has a probability: 0 stands for an unknown one.
    return [
        Drafted(int(token), float(p), float(q) or None)
        for token, p, q in zip(*columns, strict=True)
    ]


def coloured(
    tokens: Sequence[Origin], texts: Sequence[str], *, marks: bool = False
) -> Text:
    """The decode for a terminal; a thin bar marks where a target call ended.

    Args:
        tokens: from `traced_tokens`, or their like.
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
        line.append(marked(text, token.kind, marks), style=STYLES[token.kind])
        if i + 1 < len(tokens) and tokens[i + 1].call != token.call:
            line.append("\N{BOX DRAWINGS LIGHT VERTICAL}", style="dim")
    return line


def marked(text: str, kind: str, marks: bool = True) -> str:
    """A token's text, in the brackets of its kind where `marks` says so."""
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
        line.append(marked(meaning, kind, marks), style=STYLES[kind]).append("   ")
    return line.append("\N{BOX DRAWINGS LIGHT VERTICAL} end of a target call", "dim")
