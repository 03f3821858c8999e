"""Decodes that show themselves: coloured text, in a notebook and as HTML of a page."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from specjax.decoding import DecodeOutput
from specjax.errors import InputError
from specjax.metrics.agreement import Agreement
from specjax.report import trace
from specjax.report.trace import ACCEPTED, BONUS, CORRECTED, TracedToken

if TYPE_CHECKING:
    from rich.console import Group

# The text that each id adds, as a tokenizer's `decode_pieces`.
Pieces = Callable[[Sequence[int]], Sequence[str]]

# Ink and ground are the surroundings' own, light or dark, and only tinted. A line, a
# box, and neither of both, tell the kinds apart where colours do not. What is said of a
# token stands below its row, where no edge of a notebook's output cuts it off.
STYLE = """
.sj-decode { line-height: 1.5; overflow-wrap: anywhere; }
.sj-decode p { margin: .7rem 0 .1rem; font-size: .86em; opacity: .75; }
.sj-decode .text { position: relative; white-space: pre-wrap; line-height: 2;
  padding: .1rem .7rem; border-left: 3px solid rgba(128, 128, 128, .4); }
.sj-decode b, .sj-legend b { font-weight: inherit; padding: .1em .06em; margin: 0 1px;
  border-radius: 3px; }
.sj-decode b[data-sj] { cursor: help; }
.sj-decode b[data-sj]:hover, .sj-decode b[data-sj]:focus { outline: 2px solid #7c8794; }
b.sj-accepted { background: rgba(0, 158, 115, .24); }
b.sj-corrected { background: rgba(230, 159, 0, .32);
  box-shadow: inset 0 -2px #d55e00; }
b.sj-bonus { background: rgba(0, 114, 178, .14);
  box-shadow: inset 0 0 0 1.5px #2f86c5; }
.sj-decode b:empty::before { content: "\\25E6"; opacity: .6; }
.sj-decode i, .sj-legend i { font-style: normal; opacity: .55; padding: 0 2px; }
.sj-legend { font-size: .86em; margin: .8rem 0 3.5rem; line-height: 1.9; }
.sj-legend > span { white-space: nowrap; margin-right: 1.1em; }
.sj-decode b[data-sj]:hover::after, .sj-decode b[data-sj]:focus::after {
  content: attr(data-sj); position: absolute; left: 0; top: 100%; z-index: 9;
  max-width: 100%; box-sizing: border-box; white-space: pre-wrap;
  font: 12px/1.5 ui-monospace, Menlo, Consolas, monospace; color: #f4f6f8;
  background: #20262e; border: 1px solid #7c8794; border-radius: 5px;
  padding: 6px 9px; }
"""
_MEANINGS = {
    ACCEPTED: "drafted and accepted",
    CORRECTED: "the target's own, after a rejection",
    BONUS: "the target's own, after a block that stood as a whole",
}
BAR = "\N{BOX DRAWINGS LIGHT VERTICAL}"


@dataclasses.dataclass(frozen=True)
class Shown:
    """An emitted token as it is shown.

    Attributes:
        text: what it adds to the text.
        kind: accepted, corrected or bonus, as in `trace`.
        call: the target call that emitted it.
        hover: what is said of it under the pointer, line by line.
    """

    text: str
    kind: str
    call: int
    hover: str = ""


@dataclasses.dataclass(frozen=True, repr=False)
class Decoded:
    """Some decodes: a notebook shows them as HTML, `rich` prints them in colour.

    Attributes:
        rows: the tokens of each.
        titles: what each was made of, such as its source; none: no titles.
    """

    rows: Sequence[Sequence[Shown]]
    titles: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.titles and len(self.titles) != len(self.rows):
            raise InputError(
                f"{len(self.titles)} titles for {len(self.rows)} decodes: one each, or "
                "none"
            )

    def __repr__(self) -> str:
        parts = []
        for at, row in enumerate(self.rows):
            parts += [*self.titles[at : at + 1], plain(row)]
        return "\n".join(parts)

    def __rich__(self) -> Group:
        from rich.console import Group
        from rich.text import Text

        lines = [trace.legend()]
        for at, row in enumerate(self.rows):
            lines += [Text(title, "dim") for title in self.titles[at : at + 1]]
            lines.append(trace.coloured(row, [own.text for own in row]))
        return Group(*lines)

    def _repr_html_(self) -> str:
        return f"<style>{STYLE}</style>{self.html()}"

    def html(self) -> str:
        """The element, for a page that has `STYLE`."""
        parts = []
        for at, row in enumerate(self.rows):
            parts += [f"<p>{html.escape(own)}</p>" for own in self.titles[at : at + 1]]
            parts.append(f'<div class="text">{_spans(row)}</div>')
        return f'<div class="sj-decode">{"".join(parts)}</div>{_legend()}'


def decoded(
    output: DecodeOutput,
    pieces: Pieces,
    titles: Sequence[str] = (),
    *,
    agreement: Agreement | None = None,
) -> Decoded:
    """All rows of a traced decode.

    Args:
        output: of `speculative_generate` with ``trace=True``.
        pieces: a tokenizer's `decode_pieces`.
        titles: such as the sources.
        agreement: of the same rows; see `shown`.

    Raises:
        InputError: the output holds no trace, or not one title per row.
    """
    rows = range(output.tokens.shape[0])
    made = [shown(output, row, pieces, agreement=agreement) for row in rows]
    return Decoded(tuple(made), tuple(titles))


def shown(
    output: DecodeOutput,
    row: int,
    pieces: Pieces,
    *,
    agreement: Agreement | None = None,
) -> tuple[Shown, ...]:
    """One row of a traced decode, with what is to be said of each token.

    Args:
        output: of `speculative_generate` with ``trace=True``; its log-probabilities are
            told too, where it has them.
        row: which row of the batch.
        pieces: a tokenizer's `decode_pieces`.
        agreement: of the output's own tokens (`metrics.teacher_forced_alpha`,
            `metrics.drafter_alpha`): entropy and acceptance at each place. Where a
            decode is greedy, p and q are 0 or 1, and this tells more.

    Raises:
        InputError: the output holds no trace.
    """
    tokens = trace.traced_tokens(output, row)
    texts = pieces([own.token for own in tokens])
    start = int(output.length[row]) - len(tokens)
    made = []
    for at, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        lines = _lines(token, pieces)
        if not text:
            lines[0] += f", adds no text (id {token.token})"
        if output.log_probs is not None:
            own = math.exp(float(np.asarray(output.log_probs)[row, start + at]))
            lines.append(f"the target's probability at T = 1: {own:.3g}")
        if agreement is not None:
            beta, entropy = (
                float(np.asarray(own)[row, start + at - 1])
                for own in (agreement.beta, agreement.entropy)
            )
            lines.append(f"a draft drawn here stands with chance {beta:.3g}")
            lines.append(f"entropy of the target's law: {entropy:.2g} nats")
        made.append(Shown(text, token.kind, token.call, "\n".join(lines)))
    return tuple(made)


def _lines(token: TracedToken, pieces: Pieces) -> list[str]:
    """What is said of a token: who wrote it, and how its drafts were judged."""
    lines = [f"target call {token.call + 1}: {token.kind}"]
    for draft in token.drafts:
        (text,) = pieces([draft.token])
        name = repr(text) if text else f"id {draft.token}"
        known = f"p {draft.p:.3g}, q unknown"
        if draft.q is not None:
            known = f"p {draft.p:.3g}, q {draft.q:.3g}, min(1, p/q) {draft.chance:.3g}"
        verdict = "stood" if token.kind == ACCEPTED else "was rejected"
        lines.append(f"draft {name} {verdict}: {known}")
    if token.kind == BONUS:
        lines.append("nothing was drafted here: the whole block stood")
    elif not token.drafts:
        lines.append("nothing was drafted here")
    return lines


def plain(row: Sequence[Shown]) -> str:
    """A decode without colours: marks around tokens, bars where target calls end."""
    return "".join(
        trace.marked(own.text, own.kind) + (BAR if ends else "")
        for own, ends in zip(row, _ends(row), strict=True)
    )


def plain_legend() -> str:
    """What the marks of `plain` mean."""
    meanings = (trace.marked("token", k) + f" {m}" for k, m in _MEANINGS.items())
    return f"{'; '.join(meanings)}; {BAR} ends a target call"


def _ends(row: Sequence[Shown]) -> list[bool]:
    following = [own.call for own in row[1:]]
    return [one.call != call for one, call in zip(row, following, strict=False)] + (
        [False] if row else []
    )


def _spans(row: Sequence[Shown]) -> str:
    parts = []
    for own, ends in zip(row, _ends(row), strict=True):
        # The space before a word belongs to no token's meaning.
        word = own.text.lstrip(" ")
        hover = f' data-sj="{html.escape(own.hover)}" tabindex="0"' if own.hover else ""
        parts.append(
            f"{own.text[: len(own.text) - len(word)]}"
            f'<b class="sj-{own.kind}"{hover}>{html.escape(word)}</b>'
            + (f"<i>{BAR}</i>" if ends else "")
        )
    return "".join(parts)


def _legend() -> str:
    parts = [
        f'<b class="sj-{kind}">{html.escape(meaning)}</b>'
        for kind, meaning in _MEANINGS.items()
    ]
    parts.append(f"<i>{BAR}</i> ends a target call")
    return (
        f'<div class="sj-legend">{"".join(f"<span>{x}</span> " for x in parts)}</div>'
    )
