"""Counting a file of pairs into a drafter's folder, and building the drafter of it."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from configs import demo
from experiments import build, count
from specjax.data import tokenizer as tokenizers
from specjax.drafters import files
from specjax.drafters.suffix import SuffixDrafter
from specjax.drafters.tables import count_tables
from specjax.errors import InputError
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "count.py"
LINES = [
    {"source": "a", "target": "the disk is full"},
    {"source": "b", "target": "the disk", "finished": False},
    {"source": "c", "target": ""},
]


def run(folders, tmp_path, kind: str, *settings: str) -> pairs.Run:
    given = tmp_path / "train.jsonl"
    given.write_text("\n".join(map(json.dumps, LINES)) + "\n", encoding="utf-8")
    return pairs.run(
        count.main,
        tmp_path / kind,
        f"--config={CONFIG}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.drafter={kind}",
        f"--input={given}",
        f"--workdir={tmp_path / kind}",
        *settings,
        define=count._define,
    )


def build_pair(folders, kind: str, checkpoint: pathlib.Path | str, **settings):
    config = demo.get_config()
    config.drafter, config.target.checkpoint = kind, str(folders.target)
    config.draft.checkpoint = str(checkpoint)
    for name, value in settings.items():
        config.draft[kind][name] = value
    assert ("draft" in build.fingerprints(config)) == bool(checkpoint)
    return build.build_pair(config)


def test_tables(folders, tmp_path):
    encode = tokenizers.load_tokenizer(folders.target).encode
    rows = [encode("the disk is full"), encode("the disk")[:-1], encode("")]
    expected = count_tables(rows, pairs.SHAPE.vocab_size, successors=3)
    done = run(folders, tmp_path, "bigram", "--config.bigram.successors=3")
    assert done.code == 0 and f"{sum(map(len, rows))} tokens in 3 texts" in done.out
    made = build_pair(folders, "bigram", tmp_path / "bigram" / "export").drafter
    np.testing.assert_array_equal(made.counts, expected.counts)
    np.testing.assert_array_equal(made.total, expected.total)
    assert run(folders, tmp_path, "unigram").code == 0
    made = build_pair(folders, "unigram", tmp_path / "unigram" / "export").drafter
    np.testing.assert_array_equal(made.counts, expected.unigram.counts)
    # Of another kind, or none.
    with pytest.raises(InputError, match="kind 'unigram', not 'bigram'"):
        build_pair(folders, "bigram", tmp_path / "unigram" / "export")
    with pytest.raises(InputError, match="draft.checkpoint is empty"):
        build.build_pair(_config(folders, "bigram"))


def _config(folders, kind: str):
    config = demo.get_config()
    config.drafter, config.target.checkpoint = kind, str(folders.target)
    config.draft.checkpoint = ""
    return config


def test_suffix(folders, tmp_path):
    encode = tokenizers.load_tokenizer(folders.target).encode
    texts = [encode("the disk is full"), encode("the disk")[:-1], encode("")]
    whole = [token for text in texts for token in [0, *text]]
    for capacity in (6, len(whole) + 2):
        settings = (f"--config.suffix.capacity={capacity}", "--config.suffix.factor=2")
        done = run(folders, tmp_path, "suffix", *settings)
        assert done.code == 0, done.err
        folder = tmp_path / "suffix" / "export"
        made = build_pair(folders, "suffix", folder).drafter
        assert made.finished.tokens.tolist()[-len(whole) :] == whole[-capacity:]
        assert (made.factor, made.max_match) == (2.0, 8)
    other = build_pair(folders, "suffix", folder, max_match=3).drafter
    assert (other.factor, other.max_match) == (2.0, 3)
    # It needs no folder, and takes none that holds something else.
    assert build_pair(folders, "suffix", "", offset=1.0).drafter == SuffixDrafter(
        offset=1.0
    )
    with pytest.raises(InputError, match="holds no drafter.*leave it empty"):
        build_pair(folders, "suffix", folders.draft)
    with pytest.raises(InputError, match="config.draft.suffix: threshold is 2.0"):
        build_pair(folders, "suffix", "", threshold=2.0)


def test_another_target_is_refused(folders, tmp_path):
    assert run(folders, tmp_path, "unigram").code == 0
    config = _config(folders, "unigram")
    config.target.checkpoint = str(folders.draft)
    config.draft.checkpoint = str(tmp_path / "unigram" / "export")
    with pytest.raises(InputError, match="made for another target"):
        build.build_pair(config)


@pytest.mark.parametrize(
    ("kind", "setting", "message"),
    [
        ("ngram", "--config.limit=0", "config.drafter is 'ngram'"),
        ("bigram", "--config.bigram.successors=0", "config.bigram: successors is 0"),
        ("suffix", "--config.suffix.capacity=0", "config.suffix: capacity is 0"),
        ("bigram", "--config.suffix.places=3", "config.suffix is set"),
        ("bigram", "--input=nowhere.jsonl", "no such file"),
    ],
)
def test_bad_settings(folders, tmp_path, kind, setting, message):
    done = run(folders, tmp_path, kind, setting)
    assert done.code == 2 and message in done.err
    assert not (tmp_path / kind / "export" / files.DRAFTER_FILE).exists()


@pytest.mark.slow
def test_decoding_with_what_was_counted(folders, tmp_path):
    for kind in ("bigram", "suffix"):
        assert run(folders, tmp_path, kind).code == 0
        with pairs.costs_are():
            done = pairs.run_decode(
                folders,
                tmp_path / f"decoded_{kind}",
                f"--config.drafter={kind}",
                f"--config.draft.checkpoint={tmp_path / kind / 'export'}",
            )
        assert done.code == 0, done.err
        assert done.metrics["identical"]
