"""A pair's rows in batches, with texts to begin with and to stop at, and interrupted.

The models are tables over bytes: they compile in no time, and write any byte.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import InputError, ModelDrafter, Pair, Sampling, pair, zoo
from specjax.controls import BannedTokens, MinLength
from specjax.data.tokenizer import ByteTokenizer
from tests.helpers import hash_pair, quick_compile  # noqa: F401

TOKENIZER = ByteTokenizer()
LINES = ["one", "two", "and a third", "four of five", "the last"]
# Lowercase letters and spaces, no end of sequence: every text is whole characters.
LETTERS = [3 + byte for byte in b" abcdefghijklmnopqrstuvwxyz"]


def lettered(model):
    others = np.setdiff1d(np.arange(model.vocab_size), LETTERS)
    return model.replace(table=model.table.at[:, others].set(-40.0))


TARGET, DRAFT = map(lettered, hash_pair(vocab_size=TOKENIZER.vocab_size))
PAIR = Pair(TARGET, ModelDrafter(DRAFT), TOKENIZER, None)
ALONE = dataclasses.replace(PAIR, drafter=None)
# Few programs: all that may be set by row is, in every call.
OPTIONS = dict(
    max_length=14,
    sampling=Sampling(
        temperature=jnp.array([0.0, 0.5, 1.0, 1.5, 0.0]),
        controls=(MinLength(jnp.array([3, 4, 5, 6, 7])),),
    ),
    seed=[3, 1, 4, 1, 5],
    budget=jnp.array([9, 0, 4, 7, 8]),
    prefix=["", "ab", "c", "", "abc"],
    stop=["zz", "q"],
)


def same(one, other):
    """Two generations, or the parts of one and the other."""
    assert one.texts == other.texts and one.tokens == other.tokens
    leaves = zip(*map(jax.tree.leaves, (one.output, other.output)), strict=True)
    for x, y in leaves:
        np.testing.assert_array_equal(x, y)
    for x, y in zip(one.log_probs or [], other.log_probs or [], strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


@pytest.mark.parametrize("own", [PAIR, ALONE], ids=["drafted", "alone"])
def test_batches_hold_the_rows_of_one_call(own):
    whole = own.generate(LINES, log_probs=True, **OPTIONS)
    assert whole.complete and len(set(whole.texts)) > 3 and whole.texts[1] == ""
    assert [len(x) for x in whole.log_probs] == [len(x) for x in whole.tokens]
    batches = own.generate_batches(LINES, batch_size=2, log_probs=True, **OPTIONS)
    parts = list(batches)
    assert [len(part.texts) for part in parts] == [2, 2, 1]
    assert parts[1].texts == whole.texts[2:4]
    # What fills the last batch is nowhere to be seen.
    assert len(parts[2].output.tokens) == len(parts[2].output.stats.emitted) == 1
    same(specjax.generation.joined(parts), whole)
    same(own.generate(LINES, batch_size=2, log_probs=True, **OPTIONS), whole)
    # One seed for all is split for all, and samples are rows.
    free = dict(sampling=Sampling(temperature=1.0), max_length=14)
    three = own.generate(LINES[:2], samples=2, seed=7, **free)
    assert len(set(three.texts)) == 4
    same(own.generate(LINES[:2], samples=2, seed=7, batch_size=3, **free), three)


def test_settings_of_later_rows_are_checked_before_the_first_batch(monkeypatch):
    monkeypatch.setattr(pair, "autoregressive_generate", None)

    def refused(words, **settings):
        with pytest.raises(InputError, match=words):
            ALONE.generate_batches(LINES, batch_size=1, **settings)

    refused("budget is", budget=jnp.array([1, 2, 3, 4, -5]))
    refused("temperature", sampling=Sampling(temperature=jnp.array([1.0] * 4 + [-1.0])))
    refused("temperature has shape", sampling=Sampling(temperature=jnp.ones(4)))
    refused(
        "controls", sampling=Sampling(None, controls=(MinLength(jnp.ones(4, int)),))
    )
    refused("draft_sampling.top_p", draft_sampling=Sampling(top_p=2.0))
    refused(r"prefix has 2 texts: one, or one per row \(5\)", prefix=["a", "b"])
    refused(
        "prefix_length is of tokens", prefix="a", prefix_length=jnp.ones(5, jnp.int32)
    )
    refused("must leave room", prefix="abc", max_length=4)
    refused("no text to stop at", stop=[])
    refused("'' cannot be spelled", stop=["a", ""])
    refused("stop is set and so is beams", stop="a", beams=2)
    with pytest.raises(InputError, match="batch_size is 0: rows, a whole number"):
        ALONE.generate(LINES, batch_size=0)


class Interrupted:
    """Ctrl-C arrives while some batch is decoded."""

    def __init__(self, at):
        self.calls, self.at, self.generate = 0, at, pair.autoregressive_generate

    def __call__(self, *arguments, **settings):
        self.calls += 1
        if self.calls == self.at:
            raise KeyboardInterrupt
        return self.generate(*arguments, **settings)


def test_ctrl_c_keeps_what_is_done(monkeypatch):
    whole = ALONE.generate(LINES, batch_size=2, max_length=14)
    monkeypatch.setattr(pair, "autoregressive_generate", Interrupted(3))
    with pytest.warns(UserWarning, match="Ctrl-C: the first 4 of 5 texts are kept"):
        made = ALONE.generate(LINES, batch_size=2, progress=True, max_length=14)
    assert not made.complete and made.texts == whole.texts[:4]
    assert len(made.output.tokens) == len(made.output.stats.emitted) == 4
    # Nothing is done in the first: the interrupt is the caller's.
    monkeypatch.setattr(pair, "autoregressive_generate", Interrupted(1))
    with pytest.raises(KeyboardInterrupt):
        ALONE.generate(LINES, batch_size=2, max_length=14)
    # Who takes batches has those that were handed over.
    monkeypatch.setattr(pair, "autoregressive_generate", Interrupted(2))
    taken = []
    with pytest.raises(KeyboardInterrupt):
        taken.extend(ALONE.generate_batches(LINES, batch_size=2, max_length=14))
    assert [part.texts for part in taken] == [whole.texts[:2]]


def test_a_bar_is_shown_where_asked_for(capsys):
    ALONE.generate(LINES, batch_size=2, max_length=14)
    assert capsys.readouterr().out == ""
    ALONE.generate(LINES, batch_size=2, progress=True, max_length=14)
    shown = capsys.readouterr().out
    assert "decoding" in shown and "5/5" in shown


GREEDY = dict(gamma=3, max_length=40)


def test_a_stop_that_straddles_blocks_ends_the_text_where_it_is_whole():
    """With a draft and without; what follows it in its block is not written."""
    free = PAIR.generate(LINES, trace=True, **GREEDY)
    cut = 0
    for line, text, row in zip(LINES, free.texts, range(5), strict=True):
        kept = np.asarray(free.output.trace.num_accepted)[row] + 1
        ends = np.cumsum(kept)[: int(free.stats.target_calls[row]) - 1]
        for end in ends.tolist():
            stop = text[end - 1 : end + 1]  # last of a block, first of the next
            if len(stop) < 2 or text.index(stop) != end - 1:
                continue
            found = [
                own.generate([line], stop=stop, **settings)
                for own, settings in (
                    (PAIR, GREEDY),
                    (ALONE, dict(max_length=GREEDY["max_length"])),
                )
            ]
            assert [made.text for made in found] == [text[: end + 1]] * 2
            cut += 1
    assert cut >= 5
    assert PAIR.generate(LINES, stop="0", **GREEDY).texts == free.texts


def test_what_an_output_begins_with():
    """Forced first tokens are not drawn; the text is what follows, both ways."""
    free = PAIR.generate(LINES, **GREEDY)
    starts = [text[:6] for text in free.texts]
    for own, settings in ((PAIR, GREEDY), (ALONE, dict(max_length=40))):
        made = own.generate(LINES, prefix=starts, **settings)
        assert made.texts == [text[6:] for text in free.texts]
        np.testing.assert_array_equal(made.output.tokens, free.output.tokens)
        assert all(len(own) == 33 for own in made.tokens)
        forced = own.generate(LINES[:1], prefix="xyz", **settings)
        assert TOKENIZER.decode(forced.output.tokens[0, 1:4].tolist()) == "xyz"
        assert forced.text != free.texts[0][3:]
    # A stop that the prefix completes in part counts from its own first token alone.
    text = free.texts[0]
    stopped = PAIR.generate(LINES[:1], prefix=text[:4], stop=text[3:5], **GREEDY)
    assert stopped.text != text[4:5]


def test_log_probs_are_of_the_tokens_that_were_written():
    """Beside those that the loop counts: after each prefix, up to each end."""
    settings = dict(prefix=["", "ab", "c", "", "abc"], max_length=14)
    made = PAIR.generate(LINES, log_probs=True, gamma=3, stop="q", **settings)
    (part,) = ALONE.generate_batches(LINES, batch_size=None, stop="q", **settings)
    assert part.tokens == made.tokens
    prefix, given = pair.pair_rows.spellings.decoder_prefixes(
        TOKENIZER, settings["prefix"]
    )
    ids = pair.pair_rows.encoded(TOKENIZER, LINES, "", None)
    inputs, mask = map(jnp.asarray, pair.pair_rows.batches.pad_to_bucket(ids, 32))
    counted = specjax.autoregressive_generate(
        TARGET,
        inputs,
        mask,
        jax.random.split(jax.random.key(0), 5),
        sampling=Sampling(temperature=None),
        max_length=14,
        prefix=jnp.asarray(prefix),
        prefix_length=jnp.asarray(given),
        stop=jnp.array([[3 + ord("q")]]),
        log_probs=True,
    )
    for row, own in enumerate(made.log_probs):
        wanted = counted.log_probs[row, given[row] : counted.length[row]]
        np.testing.assert_allclose(own, wanted, atol=1e-5)
    assert len({len(own) for own in made.log_probs}) > 2


def test_the_record():
    made = PAIR.generate(LINES[:1], **GREEDY)
    assert made.text == made.texts[0] and made.log_probs is None and made.complete
    assert int(made.stats.emitted[0]) == len(made.tokens[0])
    assert made.text in repr(made) and len(repr(made)) < 100
    made = PAIR.generate(LINES, **GREEDY)
    with pytest.raises(InputError, match="there are 5 texts"):
        _ = made.text
    beams = ALONE.generate(LINES[:2], beams=2, max_length=14, batch_size=1)
    assert beams.stats is None and beams.output.tokens.shape == (2, 2, 14)


def test_banned_tokens_need_no_more_than_their_record():
    free = PAIR.generate(LINES, **GREEDY)
    ids = [token for row in free.tokens for token in row]
    common = max(set(ids), key=ids.count)
    sampling = Sampling(temperature=None, controls=(BannedTokens(jnp.array([common])),))
    made = PAIR.generate(LINES, sampling=sampling, **GREEDY)
    assert not any(common in row for row in made.tokens)
    alone = ALONE.generate(LINES, sampling=sampling, max_length=40)
    assert made.texts == alone.texts


@pytest.mark.parametrize("name", zoo.TASKS)
def test_a_task_that_ships_has_all_that_it_needs(name):
    own = specjax.load(name)
    assert own.task_prefix == zoo.TASKS[name].prefix
    assert isinstance(own.drafter, ModelDrafter)
    folders = specjax.load(f"zoo/{name}/target", f"zoo/{name}/draft")
    assert folders.task_prefix == "" and folders.max_source is None
    assert jax.tree.structure(own.target) == jax.tree.structure(folders.target)
    long = "word " * own.max_source
    with pytest.raises(InputError, match=r"sources\[1\] has .* tokens, .* split it"):
        own.generate(["short", long])
    source = pair.pair_rows.encoded(own.tokenizer, ["a"], own.task_prefix, None)[0]
    assert own.tokenizer.decode(source) == f"{own.task_prefix}a"


def test_what_is_neither_a_task_nor_a_folder():
    with pytest.raises(InputError, match="no folder german, .* repair, synopsis, ende"):
        specjax.load("german")


def test_a_source_has_its_task_before_it():
    told = dataclasses.replace(PAIR, task_prefix="do: ", max_source=20)
    assert (
        told.generate(LINES[:1], **GREEDY).texts
        == PAIR.generate(["do: one"], **GREEDY).texts
    )
