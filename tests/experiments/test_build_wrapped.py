"""From settings to drafters that are made of a draft model."""

from __future__ import annotations

import numpy as np
import pytest

from configs import demo
from experiments import build
from specjax import InputError, ModelDrafter, NgramDrafter
from specjax.data.tokenizer import load_tokenizer
from specjax.drafters.cascade import CascadeDrafter
from specjax.drafters.quantized import QuantizedT5
from specjax.drafters.suffix import SuffixDrafter
from tests import pairs


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> pairs.Folders:
    return pairs.make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def make(folders, tmp_path):
    """Builds a pair with settings of ``config.draft``."""

    def make(kind: str, **settings):
        config = demo.get_config()
        config.drafter, config.target.checkpoint = kind, str(folders.target)
        config.draft.checkpoint = str(folders.draft)
        for name, value in settings.items():
            config.draft[kind][name] = value
        return build.build_pair(config)

    return make


def test_trimmed_by_counts(make, folders):
    size = 190  # 100 sentinels, digits and punctuation among them
    settings = dict(size=size, texts=str(folders.input))
    model = make("trimmed", **settings).drafter.model
    weight = model.head[...]
    assert weight.rows.shape == (size, pairs.SHAPE.d_model)
    tokenizer = load_tokenizer(folders.draft)
    seen = {i for line in pairs.LINES for i in tokenizer.encode(line)}
    kept = np.flatnonzero(np.asarray(weight.places) < size)
    assert len(kept) == size and seen <= set(kept.tolist())


def test_trimmed_to_a_rank_or_to_ids(make, tmp_path):
    assert make("trimmed", rank=5).drafter.model.head[...].down.shape[0] == 5
    path = tmp_path / "ids.txt"
    path.write_text("1\n7\n9\n")
    head = make("trimmed", tokens=str(path)).drafter.model.head[...]
    assert np.flatnonzero(np.asarray(head.places) < 3).tolist() == [1, 7, 9]


def test_trimmed_in_ways_that_mean_nothing(make, tmp_path, folders):
    path = tmp_path / "ids.txt"
    for text, settings, message in (
        ("", {}, "neither size, rank nor tokens: set one"),
        ("", {"rank": 4, "tokens": str(path)}, "has rank and tokens"),
        ("", {"size": 150}, "trimmed.size and .*texts go together"),
        ("", {"rank": 4, "texts": str(path)}, "go together"),
        ("", {"rank": 400}, "config.draft.trimmed: the head's rank is 400"),
        ("", {"tokens": str(path)}, "which is empty"),
        ("7\n", {"tokens": str(path)}, "lacks id 1, the end of a text"),
        ("1\na\n", {"tokens": str(path)}, "line 2 is 'a': one id a line"),
        ("1\n999\n", {"tokens": str(path)}, "id 999 is kept"),
        ("", {"tokens": str(tmp_path / "none")}, "which is no text"),
        ("x\n", {"size": 3, "texts": str(path)}, "3 ids are to be kept: from 1"),
    ):
        path.write_text(text)
        with pytest.raises(InputError, match=message):
            make("trimmed", **settings)


def test_cascade(make, folders):
    drafter = make("cascade").drafter
    assert isinstance(drafter, CascadeDrafter) and drafter.gamma_inner == 3
    assert isinstance(drafter.inner, NgramDrafter)
    settings = dict(drafter="model", checkpoint=str(folders.target), gamma=2)
    drafter = make("cascade", **settings).drafter
    assert isinstance(drafter.inner, ModelDrafter) and drafter.gamma_inner == 2
    # The inner model is the folder's, and not the cascade's own.
    assert drafter.inner.model.config != drafter.model.config
    drafter = make("cascade", drafter="quantized").drafter
    assert drafter.inner.model.config.vocab_size == drafter.model.config.vocab_size
    inner = make("cascade", drafter="suffix").drafter.inner
    assert isinstance(inner, SuffixDrafter)
    for settings, message in (
        ({"drafter": "cascade"}, "cascade.drafter is 'cascade': it must be one of"),
        ({"drafter": "model"}, "reads a model: name its folder"),
        ({"checkpoint": str(folders.target)}, "reads none: leave out"),
        ({"drafter": "model", "checkpoint": "nowhere"}, "no such folder"),
    ):
        with pytest.raises(InputError, match=message):
            make("cascade", **settings)


def test_quantized_reads_no_folder(make, folders):
    pair = make("quantized", **{})
    assert isinstance(pair.drafter.model, QuantizedT5)
    assert pair.drafting_model.vocab_size == pair.target.vocab_size
