"""A draft that reads its target's encoder: exact, saved whole, nothing run twice."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import ModelDrafter, Sampling, autoregressive_generate, errors
from specjax.decoding import DecodeOutput, speculative_generate
from specjax.metrics import alpha, drafter_alpha, teacher_forced_alpha
from specjax.models import shared_encoder, t5, t5_config, t5_weights
from specjax.models.base import Encoded
from specjax.training.draft_init import draft_from_target
from tests.helpers import (
    TINY_T5,
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

ROWS, LENGTH = 6, 16
INPUTS, MASK = ragged_sources(0, ROWS, 9)
SOURCES = (INPUTS, MASK, row_keys(0, ROWS))
OPTIONS = dict(
    prefix=jnp.concatenate([jnp.zeros((ROWS, 1), jnp.int32), INPUTS[:, :4]], axis=1),
    prefix_length=jnp.arange(ROWS) % 5 + 1,
    sampling=Sampling(temperature=None),
    max_length=LENGTH,
    eos_id=-1,
)
# The draft's widths differ from the target's, so that neither can stand for the other.
NARROW = dict(d_model=8, num_encoder_layers=0, num_decoder_layers=1, encoder_width=16)


@pytest.fixture(scope="module")
def target() -> t5.T5:
    return tiny_t5(0)


@pytest.fixture(scope="module")
def draft(target) -> t5.T5:
    """Agrees with the target often, not always."""
    return perturbed(draft_from_target(target, (), (0, 1)), 1, 0.05)


@pytest.fixture(scope="module")
def plain(target) -> DecodeOutput:
    """The target's own text, after prompts of 1 .. 5 tokens."""
    return autoregressive_generate(target, *SOURCES, **OPTIONS)


def test_greedy_text_is_the_targets(target, draft, plain):
    fast = speculative_generate(
        target, ModelDrafter(draft), *SOURCES, gamma=3, **OPTIONS
    )
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    drafted, accepted = fast.stats.drafted, fast.stats.accepted
    assert 0 < accepted.sum() < drafted.sum()
    assert 0.3 < accepted[:, 0].sum() / drafted[:, 0].sum() < 0.95


@struct.dataclass
class Misread(ModelDrafter):
    """A wrong twin: it reads the encoder output of another row."""

    def init(self, target, encoded, *arguments):
        hidden = jnp.roll(encoded.hidden, 1, axis=0)
        return super().init(target, encoded.replace(hidden=hidden), *arguments)


def test_drafts_are_those_of_draft_and_target_together(target, draft, plain):
    """What it drafts is its own law; a twin that reads another source is found out."""
    arguments = (INPUTS, MASK, plain.tokens, plain.length)
    joined = shared_encoder.whole(draft, target)
    at_once = teacher_forced_alpha(target, joined, *arguments)
    in_steps = drafter_alpha(target, ModelDrafter(draft), *arguments)
    np.testing.assert_allclose(at_once.beta, in_steps.beta, atol=1e-5)
    assert 0.3 < alpha(at_once) < 0.99
    wrong = drafter_alpha(target, Misread(model=draft), *arguments)
    assert np.abs(wrong.beta - in_steps.beta).max() > 1e-2


def test_the_drafter_runs_no_encoder(target, draft):
    """Its set-up multiplies by the projection and cross-attention's weights alone."""

    def init(drafter, target, encoded):
        prefix, length = INPUTS[:, :1], jnp.ones(ROWS, jnp.int32)
        return drafter.init(target, encoded, INPUTS, MASK, prefix, length, LENGTH)

    encoded = jax.eval_shape(target.encode, INPUTS, MASK)

    def products(drafter) -> int:
        lowered = jax.jit(init).trace(drafter, target, encoded).lower()
        return lowered.as_text().count("dot_general")

    per_layer = 2  # keys and values are one product, lowered in two forms at most
    shared = products(ModelDrafter(draft))
    own = products(ModelDrafter(draft_from_target(target, (0, 1), (0, 1))))
    assert 3 <= shared <= per_layer * 3 < own


def abstract(**changes) -> t5.T5:
    """A tiny T5 without weights."""
    config = dataclasses.replace(TINY_T5, **changes)
    return jax.eval_shape(lambda: t5.T5(config, jax.random.key(0)))


def test_a_target_of_another_width_is_refused(target, draft):
    wide = abstract(d_model=24)
    encoded = Encoded(hidden=jnp.zeros((*INPUTS.shape, 24)), mask=MASK)
    one = jnp.ones(ROWS, jnp.int32)
    with pytest.raises(errors.InputError, match="width 16, .*width is 24"):
        ModelDrafter(draft).init(wide, encoded, INPUTS, MASK, INPUTS, one, LENGTH)
    with pytest.raises(errors.InputError, match="width 16, .*width is 24"):
        shared_encoder.whole(draft, wide)
    with pytest.raises(errors.InputError, match="width 16: name the target"):
        shared_encoder.whole(draft, None)
    with pytest.raises(errors.InputError, match="has no encoder of its own"):
        draft.encode(INPUTS, MASK)
    with pytest.raises(errors.InputError, match="has an encoder of its own"):
        target.encode_shared(encoded)
    assert shared_encoder.whole(target, None) is target


def test_a_folder_holds_it_whole(tmp_path):
    draft = tiny_t5(2, **NARROW)
    t5_weights.save_t5(draft, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["model_type"] == "t5_shared_encoder"
    assert (fields["encoder_d_model"], fields["num_layers"]) == (16, 0)
    loaded = t5_weights.load_t5(tmp_path)
    assert loaded.config == draft.config and loaded.shares_encoder
    assert jax.tree.structure(loaded) == jax.tree.structure(draft)
    jax.tree.map(np.testing.assert_array_equal, loaded, draft)
    # The family is kept: in umT5 each layer has a table.
    config = dataclasses.replace(draft.config, bias_per_layer=True)
    assert t5_config.T5Config.from_json(config.to_json()) == config


def test_a_folder_that_contradicts_itself(target, draft, tmp_path):
    t5_weights.save_t5(draft, tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    for change, message in (
        ({"encoder_d_model": None}, "no field 'encoder_d_model'"),
        ({"encoder_d_model": 24}, "encoder.projection.weight .* shape"),
        ({"num_layers": 2}, "num_encoder_layers is 2 and encoder_width 16"),
        ({"model_type": "t5"}, "num_encoder_layers must be .* at least 1"),
        ({"model_type": "t5", "num_layers": 2}, "lacks the tensor"),
    ):
        path.write_text(json.dumps(fields | change))
        with pytest.raises(errors.InputError, match=message):
            t5_weights.load_t5(tmp_path)


@pytest.mark.parametrize("changes", [{}, NARROW, NARROW | {"bias_per_layer": True}])
def test_parameters_are_counted(changes):
    model = abstract(**changes)
    config = model.config
    counts = {
        name: sum(leaf.size for leaf in jax.tree.leaves(getattr(model, name)))
        for name in ("encoder", "encoder_norm", "projection")
    }
    assert t5_config.num_encoder_parameters(config) == sum(counts.values())
    total = sum(leaf.size for leaf in jax.tree.leaves(model))
    assert t5_config.num_parameters(config) == total
    assert bool(counts["projection"]) == bool(changes) != bool(counts["encoder"])
