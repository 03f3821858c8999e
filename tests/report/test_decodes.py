"""Decodes as HTML: every token once, by kind, with what was said of its draft."""

import dataclasses
import doctest
import html.parser
import re

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from specjax.errors import InputError
from specjax.metrics import Agreement
from specjax.report import decodes, pages, trace
from tests.report.test_trace import BAR, CALL, CALLS, KINDS, WRITTEN, output

WORDS = {5: "<b>", 6: " cat", 7: "", 8: " & x", 9: "ä", 4: " y", 3: "z"}


def pieces(ids):
    """A tokenizer's, whose first piece opens no word."""
    texts = [WORDS[index] for index in ids]
    return [texts[0].removeprefix(" "), *texts[1:]] if texts else []


def traced(p=0.25, q=0.5):
    """The decode of `test_trace`, with one p and q for all that is drafted."""
    made = output(CALLS, len(WRITTEN))
    own = made.trace.replace(p=made.trace.p + p, q=made.trace.q + q)
    return made.replace(trace=own, length=jnp.full(2, len(WRITTEN) + 1, jnp.int32))


class Spans(html.parser.HTMLParser):
    """Text, class and tooltip of each token, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tokens, self.text, self.tags = [], "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "b":
            own = dict(attributes)
            self.tokens.append([own["class"], own.get("data-sj"), ""])

    def handle_data(self, data):
        self.text += data
        if self.tags[-1:] == ["b"]:
            self.tokens[-1][2] += data

    def handle_endtag(self, tag):
        self.tags.append("")


def row_of(text):
    """The spans of the rows alone, without style and legend."""
    return Spans(re.search(r'<div class="text">(.*?)</div>', text, re.DOTALL)[1])


def test_examples():
    assert doctest.testmod(trace).attempted > 0
    assert doctest.testmod(trace).failed == 0


def test_every_token_is_there_once_by_kind():
    made = decodes.Decoded((decodes.shown(traced(), 0, pieces),), ("a <source>",))
    text = made._repr_html_()
    seen = row_of(text)
    assert [kind for kind, _, _ in seen.tokens] == [f"sj-{kind}" for kind in KINDS]
    texts = pieces(WRITTEN)
    assert [own for _, _, own in seen.tokens] == [own.lstrip(" ") for own in texts]
    assert seen.text.replace(BAR, "") == "".join(texts)
    # A bar after each call but the last, where the next token is another call's.
    assert seen.text.count(BAR) == len(set(CALL)) - 1
    assert "a &lt;source&gt;" in text and "<source>" not in text


def test_the_tooltip_tells_how_the_draft_was_judged():
    first, *_, bonus, corrected, _, _, _, alone = row_of(
        decodes.Decoded((decodes.shown(traced(), 0, pieces),)).html()
    ).tokens
    judged = "p 0.25, q 0.5, min(1, p/q) 0.5"
    assert first[1] == f"target call 1: accepted\ndraft '<b>' stood: {judged}"
    assert bonus[1].endswith("nothing was drafted here: the whole block stood")
    # What was rejected is not the token that stands there.
    assert corrected[1] == (
        f"target call 2: corrected\ndraft '<b>' was rejected: {judged}"
    )
    assert alone[1] == (
        "target call 4: corrected, adds no text (id 7)\nnothing was drafted here"
    )


def test_a_likelier_draft_always_stands_and_an_unknown_law_is_said():
    def first(**laws):
        return decodes.shown(traced(**laws), 0, pieces)[0].hover

    assert first(p=0.9, q=0.3).endswith("p 0.9, q 0.3, min(1, p/q) 1")
    assert first(q=0.0).endswith("stood: p 0.25, q unknown")
    # A token without text has a number.
    assert (
        decodes.shown(traced(), 0, pieces)[2]
        .hover.splitlines()[1]
        .startswith("draft id 7 stood")
    )


def test_what_was_computed_afterwards_stands_at_its_token():
    made = traced()
    place = jnp.arange(made.tokens.shape[1], dtype=jnp.float32)
    columns = jnp.broadcast_to(place, made.tokens.shape)
    agreement = Agreement(
        beta=columns[:, 1:] / 100,
        kept=columns[:, 1:],
        entropy=columns[:, 1:] / 10,
        valid=columns[:, 1:] > 0,
    )
    made = made.replace(log_probs=jnp.log(columns / 50))
    shown = decodes.shown(made, 0, pieces, agreement=agreement)
    # The prefix is the start token: the first token written is buffer place 1.
    for place, own in enumerate(shown, start=1):
        *_, probability, beta, entropy = own.hover.splitlines()
        assert probability == f"the target's probability at T = 1: {place / 50:.3g}"
        assert beta == f"a draft drawn here stands with chance {place / 100:.3g}"
        assert entropy == f"entropy of the target's law: {place / 10:.2g} nats"


def test_a_tree_s_rejected_children_are_all_told():
    made = traced()
    paths = jnp.zeros((2, 6, 3), jnp.int32).at[0, 0, 0].set(1)
    parents = jnp.zeros((2, 6, 4), jnp.int32).at[0, 0].set(jnp.array([-1, 0, 1, 1]))
    own = made.trace.replace(
        parents=parents,
        path=paths,
        num_accepted=made.trace.num_accepted.at[0, 0].set(1),
    )
    tokens = trace.traced_tokens(made.replace(trace=own), 0)
    assert [draft.token for draft in tokens[0].drafts] == [5]
    assert tokens[1].kind == trace.CORRECTED
    assert [draft.token for draft in tokens[1].drafts] == [6, 7]


def test_a_terminal_and_a_plain_text_show_the_same():
    made = decodes.Decoded((decodes.shown(traced(), 0, pieces),), ("source",))
    console = Console(width=200, color_system="truecolor", force_terminal=True)
    with console.capture() as capture:
        console.print(made)
    plain = re.sub(r"\x1b\[[\d;]*m", "", capture.get())
    assert "".join(pieces(WRITTEN)) in plain.replace(BAR, "")
    assert repr(made) == f"source\n<b> cat {{& x}}{BAR}[ä]{BAR} yz {{cat}}{BAR}"


def test_titles_are_one_each():
    made = decodes.decoded(traced(), pieces, ["one", "two"])
    assert len(made.rows) == 2 and made.rows[1] == ()
    with pytest.raises(InputError, match="1 titles for 2 decodes"):
        decodes.decoded(traced(), pieces, ["one"])
    with pytest.raises(InputError, match="trace=True"):
        decodes.decoded(traced().replace(trace=None), pieces)


def test_the_page_needs_no_other_file(tmp_path):
    made = decodes.decoded(traced(), pieces)
    path = tmp_path / "decode.html"
    pages.write_decodes(made, path, "A & B", ["gamma 3"])
    text = path.read_text(encoding="utf-8")
    seen = Spans(text)
    assert not {"script", "img", "link", "iframe"} & set(seen.tags)
    assert not re.search(r"url\(|@import|https?:", text)
    assert "A &amp; B" in text and "gamma 3" in text and made.html() in text
    # Both a light and a dark ground, and a cue besides colour for two of three kinds.
    assert "prefers-color-scheme: dark" in text
    for kind, cue in (("corrected", "inset 0 -2px"), ("bonus", "inset 0 0 0")):
        assert re.search(rf"\.sj-{kind} {{[^}}]*{cue}", decodes.STYLE)
    assert not re.search(r"\.sj-accepted {[^}]*inset", decodes.STYLE)


def simulated(colour, kind):
    """A colour as people without one kind of cone see it (Viénot et al. 1999)."""
    to_lms = np.array(
        [
            [17.8824, 43.5161, 4.11935],
            [3.45565, 27.1554, 3.86714],
            [0.0299566, 0.184309, 1.46709],
        ]
    )
    seen = np.eye(3)
    if kind == "protan":
        seen[0] = [0, 2.02344, -2.52581]
    else:
        seen[1] = [0.494207, 0, 1.24827]
    linear = (np.array(colour) / 255) ** 2.2
    rgb = np.linalg.inv(to_lms) @ seen @ to_lms @ linear
    return 255 * np.clip(rgb, 0, 1) ** (1 / 2.2)


@pytest.mark.parametrize("kind", ["protan", "deutan"])
@pytest.mark.parametrize("ground", [255, 20])
def test_tints_differ_for_the_colour_blind(kind, ground):
    found = re.findall(
        r"\.sj-\w+ { background: rgba\((\d+), (\d+), (\d+), (\.\d+)\)", decodes.STYLE
    )
    tints = []
    for *colour, alpha in found:
        mixed = [float(alpha) * int(x) + (1 - float(alpha)) * ground for x in colour]
        tints.append(simulated(mixed, kind))
    assert len(tints) == 3
    for at, one in enumerate(tints):
        for other in tints[at + 1 :]:
            assert np.abs(one - other).max() > 12


def test_a_shown_token_survives_json():
    (first, *_) = decodes.shown(traced(), 0, pieces)
    assert decodes.Shown(*dataclasses.astuple(first)) == first
