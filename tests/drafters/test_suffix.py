"""The suffix drafter on hand-made texts, and against a reading of them by loops."""

from __future__ import annotations

import collections
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    InputError,
    Sampling,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters import files
from specjax.drafters.suffix import Finished, SuffixDrafter
from specjax.models.base import Encoded
from specjax.types import Noise
from tests.drafters import laws
from tests.helpers import (
    hash_pair,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
)

GAMMA, SOURCE, SIZE, CAPACITY = 4, 12, 16, 40
LOCAL = SuffixDrafter(max_match=4)
TABLE = SuffixDrafter(finished=Finished.empty(CAPACITY), max_match=4)


@jax.jit
def _draft(drafter, inputs, mask, tokens, length):
    encoded = Encoded(hidden=jnp.zeros((*inputs.shape, 1)), mask=mask)
    state = drafter.init(None, encoded, inputs, mask, tokens[:, :1], length, SIZE)
    noise = Noise(keys=row_keys(0, len(tokens)), start=length - 1)
    block, _ = drafter.draft(
        None, noise, state, tokens, length, gamma=GAMMA, sampling=Sampling()
    )
    return block


def padded(rows, width):
    whole = np.full((len(rows), width), 99)  # what is past an end must not be read
    for own, row in zip(whole, rows, strict=True):
        own[: len(row)] = row
    return jnp.asarray(whole, jnp.int32), jnp.array([len(row) for row in rows])


def drafts(drafter, cases) -> list[list[int]]:
    """What is drafted for each pair of a source and an output so far."""
    inputs, lengths = padded([source for source, _ in cases], SOURCE)
    mask = jnp.arange(SOURCE)[None] < lengths[:, None]
    tokens, length = padded([[0, *output] for _, output in cases], SIZE)
    block = _draft(drafter, inputs, mask, tokens, length)
    np.testing.assert_array_equal(block.law.ids[..., 0], block.tokens)
    assert (block.law.probs == 1).all()
    return [
        row[:end].tolist() for row, end in zip(block.tokens, block.length, strict=True)
    ]


def learned(drafter, *texts):
    tokens, length = padded([[0, *text] for text in texts], SIZE)
    return drafter.learn(tokens, length)


def by_loops(drafter, source, output, finished) -> list[int]:
    """The draft as the docstring tells it, with every match counted."""
    recent = [0, *output]
    stores = [[[0, *source], recent], finished]
    best, best_score = [], 0.0
    for texts in stores:
        for m in range(drafter.max_match, 0, -1):
            if m > len(recent):
                continue
            # (how much of the recent text stands there, what follows), latest first
            found = []
            for text in texts:
                for end in range(1, len(text)):
                    longest = 0
                    while (
                        longest < min(end, len(recent), drafter.max_match)
                        and text[end - 1 - longest] == recent[-1 - longest]
                    ):
                        longest += 1
                    if longest >= m:
                        found.append((longest, text[end:]))
            found = found[::-1]
            found.sort(key=lambda own: -own[0])
            draft, estimate, score = [], 1.0, 0.0
            while len(draft) < min(
                GAMMA, math.floor(drafter.factor * m + drafter.offset)
            ):
                after = [
                    rest[len(draft)] for _, rest in found if len(rest) > len(draft)
                ]
                if not after:
                    break
                token, count = collections.Counter(after).most_common(1)[0]
                estimate *= count / len(after)
                if estimate < drafter.threshold:
                    break
                score += estimate
                draft.append(token)
                found = [own for own in found if own[1][: len(draft)] == draft]
            if score > best_score + 1e-6:
                best, best_score = draft, score
    return best


@pytest.mark.parametrize(
    ("source", "output", "expected"),
    [
        # Nothing written yet: one token of the source's own beginning.
        ([5, 6, 7], [], [5]),
        # A match of two (with the start token): two tokens.
        ([5, 6, 7, 8], [5], [6, 7]),
        ([5, 6, 7, 8], [5, 6], [7, 8]),
        # No match, and a match at the very end.
        ([5, 6, 7], [4], []),
        ([5, 6, 7], [7], []),
        # The longest match wins where it is as sure: after 2 3, not after 4 3.
        ([2, 3, 5, 4, 3, 9, 4, 3, 9], [7, 2, 3], [5, 4]),
        # What came most often: 9 after 3, twice of three times.
        ([3, 9, 3, 5, 3, 9], [8, 3], [9]),
        # Among equals the latest.
        ([3, 9, 3, 5], [8, 3], [5]),
        # The output so far counts as the source does, and is later.
        ([3, 9], [3, 5, 3], [5]),
        ([3, 9, 3, 9], [8, 3, 5, 3], [9]),
        # No match runs across the border between source and output.
        ([4, 5], [6, 5, 7, 6], [5]),
    ],
)
def test_the_own_text(source, output, expected):
    assert drafts(LOCAL, [(source, output)]) == [expected]
    # An empty table changes nothing.
    assert drafts(TABLE, [(source, output)]) == [expected]
    assert by_loops(LOCAL, source, output, []) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # After 2 3 always 4, then 7 twice of four times, then once 8 9.
        ({"factor": 2.0}, [4, 7, 8, 9]),
        ({"factor": 2.0, "threshold": 0.5}, [4, 7, 8, 9]),
        ({"factor": 2.0, "threshold": 0.6}, [4]),
        ({"factor": 1.0}, [4, 7]),
        ({"factor": 0.5}, [4]),
        ({"factor": 0.0, "offset": 3.0}, [4, 7, 8]),
        ({"factor": 0.1, "offset": 0.8}, [4]),  # 0.1 * 2 + 0.8 is one
    ],
)
def test_how_long_a_draft_is(settings, expected):
    source = [2, 3, 4, 5, 2, 3, 4, 6, 2, 3, 4, 7]
    output = [2, 3, 4, 7, 8, 9, 2, 3]
    assert drafts(LOCAL.replace(**settings), [(source, output)]) == [expected]


def test_the_better_store_wins():
    source, output = [3, 5, 3, 6, 3, 7], [8, 3]
    own = drafts(TABLE, [(source, output)])
    assert own == [[7]]  # one of three: an estimate of 1/3
    # Elsewhere 3 is always followed by 4, and 8 3 by 4 9.
    assert drafts(learned(TABLE, [2, 3, 4], [3, 4]), [(source, output)]) == [[4]]
    assert drafts(learned(TABLE, [8, 3, 4, 9]), [(source, output)]) == [[4, 9]]
    # Two of three there, all of one here: the own text's.
    better = learned(TABLE, [2, 3, 4], [3, 4], [3, 2])
    assert drafts(better, [([3, 5], output)]) == [[5]]
    # As sure here as there: the own text's.
    assert drafts(learned(TABLE, [2, 3, 4]), [([3, 5], output)]) == [[5]]


def test_first_tokens_are_learned_too():
    assert drafts(learned(TABLE, [7, 8], [7, 9], [6]), [([99], [])]) == [[99]]
    # Without a source there is only what began the earlier outputs.
    assert drafts(learned(TABLE, [7, 8], [7, 9], [6]), [([], [])]) == [[7]]
    assert drafts(TABLE, [([], [])]) == [[]]


def test_no_match_across_outputs():
    two = learned(TABLE, [5, 6], [7, 8])
    assert drafts(two, [([], [4, 6])]) == [[]]
    # What stands before a text is no part of it, or 7 8 would follow 0 6 0.
    assert drafts(two, [([], [6, 0])]) == [[6]]
    assert drafts(two.replace(offset=3.0), [([], [4, 5])]) == [[6]]


def test_nothing_is_learned_unasked():
    before = [np.array(leaf) for leaf in jax.tree.leaves(TABLE)]
    other = learned(TABLE, [3, 4, 5])
    first = drafts(other, [([], [3, 4])])
    for _ in range(2):
        drafts(other, [([3, 9, 9], [3, 4, 6])])
        drafts(TABLE, [([3, 9, 9], [3, 4, 6])])
    assert drafts(other, [([], [3, 4])]) == first == [[5]]
    for leaf, old in zip(jax.tree.leaves(TABLE), before, strict=True):
        np.testing.assert_array_equal(leaf, old)
    assert drafts(TABLE, [([], [3, 4])]) == [[]]


def test_the_oldest_leave_first():
    small = SuffixDrafter(finished=Finished.empty(10), max_match=4)
    texts = [[3, 4, 5], [6, 7, 8], [9, 10, 11]]  # four tokens each, with the start
    made = learned(learned(small, *texts[:2]), texts[2])
    finished = made.finished
    assert finished.tokens.tolist() == [4, 5, 0, 6, 7, 8, 0, 9, 10, 11]
    assert finished.position.tolist() == [2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    # At once or one by one, and with rows of no token between.
    assert learned(small, *texts).finished.tokens.tolist() == finished.tokens.tolist()
    tokens, _ = padded([[0, *text] for text in (texts[0], [88], *texts[1:])], SIZE)
    at_once = small.learn(tokens, jnp.array([4, 0, 4, 4]))
    jax.tree.map(np.testing.assert_array_equal, at_once.finished, finished)
    # What is left of the oldest still serves; what has left does not.
    assert drafts(made, [([], [2, 4])]) == [[5]]
    assert drafts(made, [([], [2, 3])]) == [[]]
    # Of the cut text no more stands than is there: `3 4` is a match of one.
    assert drafts(made.replace(factor=0.5), [([], [3, 4])]) == [[]]
    assert drafts(learned(small, texts[0]).replace(factor=0.5), [([], [3, 4])]) == [[5]]
    # An output longer than the table leaves its end.
    assert learned(small, list(range(2, 16))).finished.tokens.tolist() == list(
        range(6, 16)
    )


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(own, marks=pytest.mark.slow) for own in (1, 2))]
)
def test_against_loops(seed):
    generator = np.random.default_rng(seed)
    rows = 60

    def text(longest):
        return generator.integers(2, 5, generator.integers(0, longest + 1)).tolist()

    finished = [text(9) for _ in range(4)]
    cases = [(text(SOURCE), text(10)) for _ in range(rows)]
    settings = [(1.0, 0.0, 0.1), (2.0, 0.5, 0.3), (0.5, 1.0, 0.0)][seed]
    names = ("factor", "offset", "threshold")
    drafter = learned(TABLE, *finished).replace(
        places=64, **dict(zip(names, settings, strict=True))
    )
    stored = [[0, *own] for own in finished]
    found = drafts(drafter, cases)
    expected = [by_loops(drafter, *case, stored) for case in cases]
    assert found == expected
    assert len({len(own) for own in found}) >= 2
    # The same drafts do not come without the table, nor with fewer places.
    assert found != drafts(TABLE, cases)
    assert found != drafts(drafter.replace(places=1), cases)


def test_a_file_holds_it(tmp_path):
    made = learned(TABLE, [3, 4, 5]).replace(threshold=0.3)
    files.save_drafter(made, tmp_path, "f" * 64)
    target = hash_pair()[0]
    read = files.load_drafter(SuffixDrafter, tmp_path, target, "f" * 64, jnp.float32)
    assert read.settings() == made.settings()
    jax.tree.map(np.testing.assert_array_equal, read, made)
    files.save_drafter(LOCAL, tmp_path, "f" * 64)
    read = files.load_drafter(SuffixDrafter, tmp_path, target, "f" * 64, jnp.float32)
    assert read == LOCAL


def create(**settings):
    return SuffixDrafter.create(None, settings, jax.random.key(0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: create(capacity=0), "capacity is 0"),
        (lambda: create(depth=3), "no setting 'depth': it has capacity, max_match"),
        (lambda: create(max_match=0), "max_match is 0"),
        (lambda: create(places=0), "places is 0"),
        (lambda: create(threshold=1.5), "threshold is 1.5"),
        (lambda: create(threshold=float("nan")), "threshold is nan"),
        (lambda: create(factor=-1.0), "factor is -1.0"),
        (lambda: create(offset=float("inf")), "offset is inf"),
        (lambda: create(factor=0.1), "no match of up to 8 tokens would draft one"),
        (lambda: create(capacity=2**21), "at most 1864135 tokens"),
        (
            lambda: drafts(SuffixDrafter(max_match=17), [([], [])]),
            "max_match is 17.*16",
        ),
        (lambda: drafts(SuffixDrafter(places=0), [([], [])]), "places is 0"),
        (lambda: learned(LOCAL, [3]), "no global table"),
        (
            lambda: TABLE.learn(jnp.zeros((2, 3), jnp.int32), jnp.array([3, 4])),
            r"length\[1\] is 4: a row has 0 to 3 tokens",
        ),
    ],
)
def test_what_means_nothing_is_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.slow
def test_rows_are_independent():
    texts = np.random.default_rng(2).integers(0, 64, (9, 8))
    drafter = SuffixDrafter(finished=Finished.empty(80), offset=2.0)
    drafter = drafter.learn(jnp.asarray(texts, jnp.int32), jnp.full(9, 8))
    laws.check_rows(hash_pair()[0], drafter)


@pytest.mark.slow
def test_greedy_text_is_the_targets():
    """Half of the rows were learned: their drafts stand, most others fall."""
    target, rows = hash_pair(vocab_size=8)[0], 6
    inputs, mask = ragged_sources(0, rows, 5, 8)
    arguments = (inputs, mask, row_keys(0, rows))
    options: dict[str, Any] = dict(
        sampling=Sampling(temperature=None), max_length=20, eos_id=-1
    )
    plain = autoregressive_generate(target, *arguments, **options)
    drafter = SuffixDrafter(finished=Finished.empty(60), max_match=4)
    stats = {}
    for name, own in (
        ("empty", drafter),
        ("learned", drafter.learn(plain.tokens[:3], plain.length[:3])),
    ):
        fast = speculative_generate(target, own, *arguments, gamma=3, **options)
        np.testing.assert_array_equal(plain.tokens, fast.tokens)
        stats[name] = fast.stats
        assert 0 < fast.stats.accepted.sum() < fast.stats.drafted.sum()
    empty, told = (stats[name].accepted[:3].sum() for name in stats)
    assert told > 2 * empty
