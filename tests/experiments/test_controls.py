"""Controls, samples and ends of `experiments.decode`, from flags to files."""

import ml_collections
import numpy as np
import pytest

from configs import demo
from experiments import build_controls
from specjax import InputError, controls
from specjax.data import tokenizer as tokenizers
from tests import pairs

GREEDY, SAMPLED = "--config.runs=greedy", "--config.runs=sampled"


@pytest.fixture(scope="module")
def tokenizer(folders):
    return tokenizers.load_tokenizer(folders.target)


def config(**settings) -> ml_collections.ConfigDict:
    made = demo.get_config()
    made.max_length = pairs.MAX_LENGTH
    made.controls.update(settings)
    return made


def build(tokenizer, **settings):
    return build_controls.build_controls(config(**settings), tokenizer)


def test_settings_become_controls(tokenizer):
    assert build(tokenizer) == ()
    made = build(
        tokenizer,
        min_length=9,
        banned_ids=(7, 11),
        banned_words=("mail,disk", "page"),
        repetition_penalty=1.2,
        presence_penalty=0.5,
        no_repeat_ngram=3,
    )
    penalty, counts, ngram, banned, least = made
    assert penalty == controls.RepetitionPenalty(1.2)
    assert counts == controls.CountPenalty(presence=0.5)
    assert ngram == controls.NoRepeatNgram(3)
    assert least == controls.MinLength(9, tokenizer.eos_id)
    rows = [[i for i in row if i >= 0] for row in banned.sequences.tolist()]
    assert rows[:2] == [[7], [11]]
    assert [tokenizer.decode(row) for row in rows[2:]] == ["mail", "disk", "page"]
    # A word may be several: a sequence of them.
    (several,) = build(tokenizer, banned_words=("mail server, the disk",))
    rows = [[i for i in row if i >= 0] for row in several.sequences.tolist()]
    assert [tokenizer.decode(row) for row in rows] == ["mail server", "the disk"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"min_length": 2}, "min_length is 2: .* from 3"),
        ({"min_length": 25}, r"min_length is 25: .*config.max_length \(24\)"),
        ({"banned_ids": (230,)}, "banned_ids has 230: ids of the tokenizer, 0 to 229"),
        ({"banned_ids": ("mail",)}, "banned_ids has 'mail'"),
        ({"banned_words": ("mail,,disk",)}, "banned_words has '', which .* spell"),
        ({"banned_words": ("\u6f22",)}, "banned_words has .* cannot spell"),
        ({"repetition_penalty": 1.0}, "repetition_penalty is 1, which changes nothing"),
        ({"repetition_penalty": -1.0}, "repetition_penalty is -1.0: above 0"),
        ({"frequency_penalty": 0.0}, "frequency_penalty is 0, which changes nothing"),
        ({"presence_penalty": float("nan")}, "presence_penalty is nan: a finite"),
        ({"no_repeat_ngram": 0}, "no_repeat_ngram is 0: .* from 1 to below"),
        ({"no_repeat_ngram": 24}, "no_repeat_ngram is 24"),
    ],
)
def test_refusals(tokenizer, settings, words):
    with pytest.raises(InputError, match=rf"config\.controls\.{words}"):
        build(tokenizer, **settings)


def build_ends(tokenizer, **settings):
    made = config()
    made.update(settings)
    return build_controls.build_ends(made, tokenizer)


def test_settings_become_ends(tokenizer):
    assert build_ends(tokenizer).settings(3) == {}
    ends = build_ends(tokenizer, decoder_prefix="the disk", stop=("mail, .", 7))
    assert ends.prefix == (0, *tokenizer.encode("the disk")[:-1])
    assert {tokenizer.decode(own) for own in ends.stop} == {"mail", ".", "7"}
    made = ends.settings(3)
    assert made["prefix"].tolist() == [list(ends.prefix)] * 3
    rows = np.asarray(made["stop"])
    assert [tuple(row[row >= 0].tolist()) for row in rows] == list(ends.stop)
    assert ends.stops([9, *ends.stop[0]]) and not ends.stops([*ends.stop[0], 9])
    assert not ends.stops([])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stop": ("mail,",)}, "stop: '' cannot be spelled"),
        ({"stop": ("\u6f22",)}, "stop: .* the models never write it"),
        ({"decoder_prefix": "\u6f22"}, "decoder_prefix: .* cannot be spelled"),
        ({"decoder_prefix": "mail " * 24}, "decoder_prefix has .* is 24, which counts"),
    ],
)
def test_refusals_of_ends(tokenizer, settings, words):
    with pytest.raises(InputError, match=rf"config\.{words}"):
        build_ends(tokenizer, **settings)


@pytest.mark.slow
def test_outputs_begin_and_end_where_they_should(decoded, folders, tokenizer, tmp_path):
    """The same both ways, and the text of the run without them, cut on both sides."""
    free = [record["tokens"] for record in decoded.decodes]
    # A word in the middle of some text, written by two calls or by one.
    words = [text.split() for text in map(tokenizer.decode, free)]
    stop = next(own[len(own) // 2] for own in words if len(own) > 3)
    with pairs.costs_are():
        run = pairs.run_decode(
            folders, tmp_path / "stop", GREEDY, f"--config.stop={stop}"
        )
    assert run.code == 0, run.err
    assert run.metrics["identical"] is True
    ends = build_ends(tokenizer, stop=(stop,))
    cut = 0
    for record, tokens in zip(run.decodes, free, strict=True):
        own = record["tokens"]
        assert own == tokens[: len(own)]
        if len(own) < len(tokens):
            assert ends.stops(own) and record["finished"] is True
            assert record["text"].endswith(stop)
            cut += 1
        assert not any(ends.stops(own[:size]) for size in range(len(own)))
    assert cut
    assert run.metrics["speculative"]["cut"] <= decoded.metrics["speculative"]["cut"]

    prefix = "the mail"
    size = len(tokenizer.encode(prefix)) - 1
    with pairs.costs_are():
        run = pairs.run_decode(
            folders, tmp_path / "prefix", GREEDY, f"--config.decoder_prefix={prefix}"
        )
    assert run.code == 0, run.err
    assert run.metrics["identical"] is True
    for record in run.decodes:
        # The start token and the prefix count in max_length, and are not written.
        assert len(record["tokens"]) <= pairs.MAX_LENGTH - 1 - size
    assert [record["tokens"] for record in run.decodes] != free


@pytest.mark.slow
def test_controls_reach_both_models(decoded, folders, tokenizer, tmp_path):
    common = [t for r in decoded.decodes for t in r["tokens"][:-1]]
    banned = max(set(common), key=common.count)
    settings = (
        "--config.controls.min_length=12",
        f"--config.controls.banned_ids={banned},",
        "--config.controls.no_repeat_ngram=1",
    )
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, GREEDY, *settings)
    assert run.code == 0, run.err
    assert run.metrics["identical"] is True
    fast = run.metrics["speculative"]
    assert 0 < fast["accepted"] < fast["drafted"]
    for record in run.decodes:
        tokens = record["tokens"]
        assert len(tokens) >= 11 and banned not in tokens
        assert len(set(tokens)) == len(tokens)
    # Both models were held to them: their laws agree about as often as without.
    assert run.metrics["alpha"] > decoded.metrics["alpha"] / 2


@pytest.mark.slow
def test_samples_of_each_line_stand_side_by_side(folders, tmp_path):
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, SAMPLED, "--config.samples=2")
    assert run.code == 0, run.err
    lines = [record["input"] for record in run.decodes]
    assert lines == [line for line in pairs.LINES for _ in range(2)]
    texts = [record["text"] for record in run.decodes]
    assert texts[::2] != texts[1::2]


def test_samples_of_a_greedy_run_are_refused(folders, tmp_path):
    run = pairs.run_decode(folders, tmp_path, "--config.samples=2")
    assert run.code == 2
    assert "config.samples is 2 and config.runs has the greedy run" in run.err
