"""A block in one pass: trained as it drafts, kept in step, exact, sound in a folder."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import pytest
from flax import struct

from configs import drafting
from experiments import build_drafter
from specjax import (
    ModelDrafter,
    Sampling,
    autoregressive_generate,
    errors,
    speculative_generate,
)
from specjax.drafters import files
from specjax.drafters.parallel import ParallelDrafter
from specjax.models.t5 import T5
from specjax.training import optimizer, slots, step
from specjax.training.draft_init import draft_from_target
from specjax.types import Noise
from tests.drafters.test_conformance import commit_and_draft
from tests.helpers import (
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

GAMMA, PLACES = 4, 11
GREEDY = Sampling(temperature=None)
KINDS = ("plain", "markov", "shared")
SLOW = pytest.mark.slow


@functools.cache
def often_agrees(kind: str) -> T5:
    """A draft of `tiny_t5(0)`."""
    target = tiny_t5(0)
    model = draft_from_target(target, (), (0, 1)) if kind == "shared" else target
    return perturbed(model, 1, 0.1)


def make(kind: str = "plain", **settings) -> ParallelDrafter:
    """A drafter for `tiny_t5(0)`, whose arrays all say something."""
    rank = 3 if kind == "markov" else 0
    settings = {"max_gamma": GAMMA, "markov_rank": rank} | settings
    key, *keys = jax.random.split(jax.random.key(3), 3)
    model = often_agrees(kind)
    # Of the target, its width is all that is read.
    drafter = ParallelDrafter.from_model(model, model, settings, key)
    sentinels = jax.random.normal(keys[0], drafter.sentinels.shape)
    markov = drafter.markov
    if markov is not None:
        after = 2 * jax.random.normal(keys[1], markov.after.shape)
        markov = markov.replace(after=after)
    return drafter.replace(sentinels=sentinels, markov=markov)


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0)


@jax.jit
def _laws(drafter, target, inputs, mask, tokens, length):
    encoded = target.encode(inputs, mask)
    state = drafter.init(target, encoded, inputs, mask, tokens, length, 24)
    noise = Noise(keys=row_keys(1, len(length)), start=length - 1)
    block, _ = drafter.draft(
        target, noise, state, tokens, length, gamma=GAMMA, sampling=Sampling()
    )
    return block


@jax.jit
def _slots(drafter, target, inputs, mask, fed):
    encoded = target.encode(inputs, mask)
    key = jax.random.key(5)
    return drafter.slot_logits(target, encoded, inputs, mask, fed, (), key, gamma=GAMMA)


def worst_difference(drafter, target, trained=None) -> float:
    """Of the laws in training from those in drafting, over all anchors and slots.

    Row t of the batch drafts after ``text[: t + 1]``, and is trained on that text and
    then its own draft.
    """
    trained = drafter if trained is None else trained
    inputs, mask = (jnp.repeat(x, PLACES, axis=0) for x in ragged_sources(0, 1, 9))
    text = jnp.asarray(np.random.default_rng(2).integers(2, 64, PLACES), jnp.int32)
    length = jnp.arange(1, PLACES + 1)
    place = jnp.arange(PLACES + GAMMA)[None]
    tokens = jnp.pad(jnp.broadcast_to(text[None], (PLACES,) * 2), ((0, 0), (0, GAMMA)))
    tokens = jnp.where(place < length[:, None], tokens, 0)
    block = _laws(drafter, target, inputs, mask, tokens, length)
    drafted = jnp.take_along_axis(
        jnp.pad(block.tokens, ((0, 0), (0, PLACES))),
        jnp.maximum(place - length[:, None], 0),
        axis=1,
    )
    fed = jnp.where(place < length[:, None], tokens, drafted)[:, :PLACES]
    slots = _slots(trained, target, inputs, mask, fed)
    found = np.asarray(jax.nn.softmax(slots.logits))
    wanted, differences = np.asarray(block.law.probs), []
    for row in range(PLACES):
        own = np.flatnonzero(np.asarray(slots.anchor[row]) == row)
        kept = np.asarray(slots.slot[row])[own]
        assert kept.tolist() == list(range(len(kept))), "a chain with a gap"
        assert row + len(kept) <= PLACES, "nothing judges the last slots"
        differences.append(np.abs(found[row, own] - wanted[row, kept]).max())
    return max(differences)


@struct.dataclass
class Peeking(ParallelDrafter):
    """A wrong twin: sentinels hang one token too low in training."""

    def _decode(self, fed, cache, encoded, *, parents=None, read=None):
        if parents is not None:
            node = jnp.arange(parents.shape[1])[None]
            below = (node >= PLACES) & (parents < PLACES - 1)
            parents = jnp.where(below, parents + 1, parents)
        return super()._decode(fed, cache, encoded, parents=parents, read=read)


@pytest.mark.parametrize(
    "kind", ["plain", "markov", pytest.param("shared", marks=SLOW)]
)
def test_training_sees_what_drafting_sees(target, kind):
    drafter = make(kind, slots="sampled", keep=0.9)
    assert worst_difference(drafter, target) < 1e-5
    if kind == "plain":
        fields = {f.name: getattr(drafter, f.name) for f in dataclasses.fields(drafter)}
        assert worst_difference(drafter, target, Peeking(**fields)) > 1e-2


def test_places_thin_out_and_ended_texts_have_none(target):
    """PARD's numbers, the text's end, and texts that have ended."""
    drafter = make(keep=0.5, keep_least=0.2)
    inputs, mask = ragged_sources(0, 3, 9)
    fed = jnp.full((3, 20), 7).at[:, 0].set(0).at[:, 12:].set(1)
    slots = _slots(drafter, target, inputs, mask, fed)
    slot, anchor = np.asarray(slots.slot), np.asarray(slots.anchor)
    assert np.bincount(slot[0]).tolist() == [20, 10, 5, 4]
    assert slots.logits.shape == (3, 39, 64)
    np.testing.assert_array_equal(slot, slot[:1].repeat(3, 0))
    deeper = anchor[0, 20:]
    assert set(deeper) <= set(range(12)) and len(set(deeper[:10])) == 10
    # Of a text that goes on to its last place, the last places have no block.
    going = _slots(drafter, target, inputs, mask, jnp.full((3, 20), 7))
    places = np.asarray(going.anchor + going.slot)
    assert places[going.anchor >= 0].max() < 20
    assert (np.asarray(going.anchor)[0, :20] == np.arange(20)).all()


@pytest.mark.slow
def test_every_array_is_trained(target):
    drafter = make("markov")
    inputs, mask = ragged_sources(0, 2, 9)
    fed = jnp.asarray(np.random.default_rng(0).integers(2, 64, (2, 9)), jnp.int32)

    @jax.jit
    @jax.grad
    def gradient(drafter):
        slots = _slots(drafter, target, inputs, mask, fed)
        return jnp.sum(jax.nn.logsumexp(slots.logits, axis=-1))

    for path, leaf in jax.tree.leaves_with_path(gradient(drafter)):
        assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["markov", *(pytest.param(kind, marks=SLOW) for kind in ("plain", "shared"))],
)
def test_commit_keeps_the_memory_in_step(target, kind):
    for sampling in (GREEDY, Sampling()):
        commit_and_draft(make(kind), sampling, target, 64, atol=1e-5)


def options(rows: int) -> dict:
    """Prompts of 1 .. 5 tokens and budgets that end rows at different steps."""
    generator = np.random.default_rng(1)
    prefix = jnp.asarray(generator.integers(2, 64, (rows, 5)), jnp.int32)
    return dict(
        prefix=prefix.at[:, 0].set(0),
        prefix_length=jnp.arange(rows) % 5 + 1,
        budget=jnp.arange(rows) % 4 + 13,
        max_length=24,
        eos_id=-1,
        sampling=GREEDY,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "gamma"),
    [
        ("plain", GAMMA),
        pytest.param("markov", 2, marks=SLOW),
        pytest.param("shared", 3, marks=SLOW),
    ],
)
def test_greedy_text_is_the_targets(target, kind, gamma):
    rows = 7
    drafter, common = make(kind), (*ragged_sources(0, rows, 9), row_keys(0, rows))
    plain = autoregressive_generate(target, *common, **options(rows))
    fast = speculative_generate(target, drafter, *common, gamma=gamma, **options(rows))
    np.testing.assert_array_equal(fast.tokens, plain.tokens)
    np.testing.assert_array_equal(fast.length, plain.length)
    drafted, accepted = fast.stats.drafted.sum(0), fast.stats.accepted.sum(0)
    assert 0.3 < accepted[0] / drafted[0] < 0.98
    assert accepted[1] > 0 and accepted[-1] < drafted[-1]


@pytest.mark.slow
def test_rows_are_independent_and_an_empty_source_is_finite(target):
    drafter = make("markov")
    inputs, mask = ragged_sources(0, 3, 9)
    mask = mask.at[1].set(False)
    tokens = jnp.asarray(np.random.default_rng(4).integers(2, 64, (3, 15)), jnp.int32)
    length = jnp.array([5, 1, 9])
    together = _laws(drafter, target, inputs, mask, tokens, length)
    probs = np.asarray(together.law.probs)
    assert np.isfinite(probs).all()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)
    others = (x.at[0].set(x[2]) for x in (inputs, mask, tokens, length))
    apart = _laws(drafter, target, *others)
    np.testing.assert_array_equal(apart.tokens[1:], together.tokens[1:])
    np.testing.assert_allclose(apart.law.probs[1:], probs[1:], atol=1e-6)
    assert np.abs(np.asarray(apart.law.probs[0]) - probs[0]).max() > 1e-2


@pytest.mark.slow
def test_the_same_weights_draft_token_by_token(target):
    """The first slot is the model's own next token, whatever comes behind it."""
    drafter = make("markov")
    inputs, mask = ragged_sources(0, 4, 9)
    tokens = jnp.asarray(np.random.default_rng(4).integers(2, 64, (4, 15)), jnp.int32)
    arguments = (target, inputs, mask, tokens, jnp.array([1, 4, 7, 2]))
    block = _laws(drafter, *arguments)
    alone = _laws(ModelDrafter(drafter.model), *arguments)
    np.testing.assert_array_equal(block.tokens[:, 0], alone.tokens[:, 0])
    np.testing.assert_allclose(block.law.probs[:, 0], alone.law.probs[:, 0], atol=1e-5)
    later = np.abs(np.asarray(block.law.probs - alone.law.probs))[:, 1:]
    assert later.max() > 1e-2


def test_argmax_is_the_way_without_a_markov_head(target):
    inputs, mask = ragged_sources(0, 4, 9)
    length = jnp.array([1, 4, 7, 2])
    block = jax.eval_shape(_laws, make(), target, inputs, mask, inputs, length)
    assert block.law.ids.shape == block.law.probs.shape == (4, GAMMA, 1)
    assert [make(k).samples for k in KINDS] == [False, True, False]
    assert make(slots="sampled").samples and not make("markov", slots="argmax").samples
    with pytest.raises(errors.InputError, match="draws nothing"):
        common = (inputs, mask, row_keys(0, 4))
        speculative_generate(target, make(), *common, draft_sampling=Sampling())


def test_a_block_longer_than_the_sentinels_is_refused(target):
    common = (*ragged_sources(0, 2, 9), row_keys(0, 2))
    with pytest.raises(
        errors.InputError, match="gamma is 5 .* 3 sentinels.* 4 at most"
    ):
        speculative_generate(target, make(), *common, gamma=GAMMA + 1)
    with pytest.raises(errors.InputError, match="set max_gamma to 4"):
        _slots(make(max_gamma=GAMMA + 1), target, *common[:2], common[0])


def test_a_folder_holds_it_whole(target, tmp_path):
    drafter = make("markov", keep=0.6)
    files.save_drafter(drafter, tmp_path, "a" * 64, dtype=jnp.float32)
    again = files.load_drafter(ParallelDrafter, tmp_path, target, "a" * 64)
    assert jax.tree.structure(again) == jax.tree.structure(drafter)
    assert again.keep == 0.6 and again.slots == "sampled"
    assert again.model.config == drafter.model.config
    jax.tree.map(np.testing.assert_array_equal, again, drafter)
    # Slots may be chosen otherwise than it was trained.
    draft = drafting.get_settings("")
    parts = build_drafter.Parts(
        config=ml_collections.ConfigDict({"draft": draft}),
        target=target,
        fingerprint="a" * 64,
        folder=tmp_path,
        model=None,
        num_tokens=None,
    )
    make_it = build_drafter.DRAFTERS["parallel"].make
    for given, wanted in ((None, "sampled"), ("argmax", "argmax")):
        draft.parallel.slots = given
        assert make_it(parts).slots == wanted
    chain = build_drafter.DRAFTERS["parallel_chain"].make(parts)
    assert isinstance(chain, ModelDrafter)
    jax.tree.map(np.testing.assert_array_equal, chain.model, drafter.model)
    draft.parallel.slots = "best"
    with pytest.raises(errors.InputError, match="slots is 'best'"):
        make_it(parts).nodes(GAMMA)
    # Damage is named, and touches nothing but what reads the folder.
    arrays = tmp_path / files.ARRAYS_FILE
    arrays.write_bytes(arrays.read_bytes()[:-8])
    with pytest.raises(errors.InputError, match="cut short"):
        files.load_drafter(ParallelDrafter, tmp_path, target, "a" * 64)
    header = tmp_path / files.DRAFTER_FILE
    header.write_text(header.read_text().replace('"max_gamma": 4', '"max_gamma": 1'))
    with pytest.raises(errors.InputError, match="max_gamma is 1"):
        files.load_drafter(ParallelDrafter, tmp_path, target, "a" * 64)


@pytest.mark.slow
def test_it_starts_from_a_trained_draft(target):
    draft = tiny_t5(7, num_decoder_layers=1)
    key, settings = jax.random.key(0), {"first_sentinel": 63, "markov_rank": 2}
    drafter = ParallelDrafter.from_model(target, draft, settings, key)
    jax.tree.map(np.testing.assert_array_equal, drafter.model, draft)
    table = draft.embedding[...]
    np.testing.assert_array_equal(drafter.sentinels, table[57:][::-1])
    assert not np.asarray(drafter.markov.after).any()
    drafter = ParallelDrafter.from_model(target, draft, {"markov_rank": 2}, key)
    np.testing.assert_allclose(drafter.sentinels[3], table.mean(0), atol=1e-6)
    random = ParallelDrafter.create(target, drafter.settings(), key)
    assert jax.tree.structure(random) == jax.tree.structure(drafter)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "give one, or its config"),
        ({"gamma": 4}, "no setting 'gamma'"),
        ({"max_gamma": 1}, "max_gamma is 1: a whole number, at least 2"),
        ({"max_gamma": 2.5}, "max_gamma is 2.5"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"slots": "best"}, "slots is 'best': it must be one of argmax, sampled"),
        ({"keep": 1.5}, "keep is 1.5: a share"),
        ({"first_sentinel": 5}, "first_sentinel is 5: .* from 6 to 63"),
        ({"first_sentinel": 64}, "first_sentinel is 64: .* from 6 to 63"),
        ({"width": 24}, "width 16, .*width is 24"),
    ],
)
def test_settings_that_mean_nothing(target, settings, message):
    wide = dataclasses.replace(target.config, d_model=24)
    shared = dataclasses.replace(
        target.config, num_encoder_layers=0, encoder_width=target.config.d_model
    )
    config = (shared if settings.get("width") else target.config).to_json()
    settings = settings and {"config": config} | settings
    if settings.pop("width", None):
        target = jax.eval_shape(lambda: type(target)(wide, jax.random.key(0)))
    with pytest.raises(errors.InputError, match=message):
        jax.eval_shape(
            lambda: ParallelDrafter.create(target, settings, jax.random.key(0))
        )


@pytest.mark.slow
@pytest.mark.usefixtures("standard_promotion")
def test_trained_blocks_stand_longer_and_the_text_stays(target):
    rows, steps = 16, 150
    common = (*ragged_sources(0, rows, 9), row_keys(0, rows))
    settings = dict(max_length=17, eos_id=-1, sampling=GREEDY)
    text = autoregressive_generate(target, *common, **settings).tokens[:, 1:]
    batch = step.Batch(*common[:2], text, jnp.ones(text.shape, bool))
    config = optimizer.OptimizerConfig(
        steps=steps, warmup_steps=10, learning_rate=5e-3, decay_steps=100
    )
    drafter = jax.tree.map(jnp.copy, make("markov"))
    state, seen = step.init_state(drafter, config, jax.random.key(1)), []
    for _ in range(steps):
        state, metrics = slots.slot_step(
            state, target, batch, config=config, how=slots.Objective(), gamma=GAMMA
        )
        seen.append(float(metrics["expected_length"]))
    assert seen[-1] > seen[0] + 0.5, seen[::10]
    depth = []
    for own in (make("markov"), state.model):
        fast = speculative_generate(target, own, *common, gamma=GAMMA, **settings)
        np.testing.assert_array_equal(fast.tokens[:, 1:], text)
        depth.append(float(fast.stats.accepted.sum() / fast.stats.target_calls.sum()))
    assert depth[1] > depth[0] + 0.5, depth
