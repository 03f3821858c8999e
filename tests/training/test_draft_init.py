"""Drafts made of a target's layers, and drafts of any shape."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from specjax import ModelDrafter, Sampling, autoregressive_generate, errors
from specjax.decoding import speculative_generate
from specjax.models import t5
from specjax.models.shared_encoder import whole
from specjax.training import distill, draft_init, init, losses
from tests.helpers import (
    TINY_T5,
    perturbed,
    ragged_sources,
    row_keys,
    tiny_t5,
)

INPUTS, MASK = ragged_sources(0, 6, 9)


pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture(scope="module")
def target() -> t5.T5:
    return tiny_t5(0, num_encoder_layers=3, num_decoder_layers=4)


def parameters(model) -> dict:
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def assert_equal(one, other) -> None:
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.mark.parametrize("changes", [{}, {"bias_per_layer": True, "tied_head": True}])
def test_every_array_is_where_it_belongs(changes):
    target = tiny_t5(0, num_encoder_layers=3, num_decoder_layers=4, **changes)
    draft = draft_init.draft_from_target(target, (2, 0), (1, 3))
    assert draft.config == dataclasses.replace(
        target.config, num_encoder_layers=2, num_decoder_layers=2
    )
    ours, theirs = parameters(draft), parameters(target)
    for stack, layers in {"encoder": (2, 0), "decoder": (1, 3)}.items():
        for place, layer in enumerate(layers):
            own, from_layer = dict(ours[stack][place]), dict(theirs[stack][layer])
            own["attention"] = dict(own["attention"])
            from_layer["attention"] = dict(from_layer["attention"])
            table = own["attention"].pop("bias", None)
            wanted = from_layer["attention"].pop("bias", None)
            if not changes:  # one table serves all layers
                wanted = theirs[stack][0]["attention"]["bias"] if place == 0 else None
            assert_equal(own, from_layer)
            assert_equal(table, wanted)
    names = ["embedding", "encoder_norm", "decoder_norm"]
    for name in names if changes else [*names, "head"]:
        assert_equal(ours[name], theirs[name])
    # A T5 of this shape, and no array shared with the target: training donates.
    fresh = jax.eval_shape(lambda: t5.T5(draft.config, jax.random.key(0)))
    assert jax.tree.structure(fresh) == jax.tree.structure(draft)
    owned = {id(leaf) for leaf in jax.tree.leaves(target)}
    assert not owned & {id(leaf) for leaf in jax.tree.leaves(draft)}


def logits(model, target=None):
    @jax.jit
    def run(model):
        encoded = model.encode(INPUTS, MASK)
        return model.decode(INPUTS, None, encoded)[0].logits

    return run(model)


def test_all_layers_are_the_target_itself(target):
    wanted = logits(target)
    own = draft_init.draft_from_target(target, (0, 1, 2), (0, 1, 2, 3))
    np.testing.assert_array_equal(logits(own), wanted)
    shared = draft_init.draft_from_target(target, (), (0, 1, 2, 3))
    assert shared.config.encoder_width == 16 and not len(shared.encoder)
    np.testing.assert_allclose(logits(whole(shared, target)), wanted, atol=1e-5)
    # And other layers, or another order, are not.
    for layers in ((0, 1, 3), (0, 2, 1, 3)):
        part = draft_init.draft_from_target(target, (), layers)
        assert np.abs(logits(whole(part, target)) - wanted).max() > 0.1


@pytest.mark.parametrize(
    ("encoder", "decoder", "message"),
    [
        ((0, 3), (0,), "encoder_layers names layer 3: .* layers 0 to 2"),
        ((0,), (4,), "decoder_layers names layer 4: .* layers 0 to 3"),
        ((-1,), (0,), "encoder_layers names layer -1"),
        ((True,), (0,), "encoder_layers holds True"),
        ((0,), (), "decoder_layers is empty"),
    ],
)
def test_layers_that_are_not_there(target, encoder, decoder, message):
    with pytest.raises(errors.InputError, match=message):
        draft_init.draft_from_target(target, encoder, decoder)


def test_no_draft_of_a_draft_without_an_encoder(target):
    shared = draft_init.draft_from_target(target, (), (0,))
    with pytest.raises(errors.InputError, match="target has no encoder"):
        draft_init.draft_from_target(shared, (), (0,))


def divergence(model, target, batch) -> jax.Array:
    """Mean KL from the target's laws on a batch of texts."""
    model = whole(model, target)

    def run(model):
        fed = losses.shift_right(batch, 0)
        encoded = model.encode(batch, jnp.ones(batch.shape, bool))
        return model.decode(fed, None, encoded)[0].logits

    sums = distill.distill_loss(
        run(target),
        run(model),
        batch,
        jnp.ones(batch.shape, bool),
        distill.Divergence(),
    )
    return sums.loss / sums.tokens


# Depth and width apart, then without an encoder: wider than the target and narrower.
SHAPES = {
    "wide, one layer": dict(
        d_model=48, d_kv=12, d_ff=96, num_encoder_layers=1, num_decoder_layers=1
    ),
    "narrow, deep": dict(
        d_model=8, d_kv=2, d_ff=8, num_encoder_layers=1, num_decoder_layers=4
    ),
    "shared, wide": dict(
        d_model=24, d_kv=12, num_encoder_layers=0, num_decoder_layers=1
    )
    | {"encoder_width": 16},
    "shared, narrow": dict(
        d_model=8, d_kv=4, num_encoder_layers=0, num_decoder_layers=2
    )
    | {"encoder_width": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_any_shape_trains_and_drafts(name):
    target = tiny_t5(0)
    config = dataclasses.replace(TINY_T5, dropout_rate=0.0, **SHAPES[name])
    draft = init.mimetic_init(jax.jit(lambda: t5.T5(config, jax.random.key(1)))())
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(draft, state, target, batch):
        loss, grads = jax.value_and_grad(divergence)(draft, target, batch)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(draft, updates), state, loss, grads

    batches = jax.random.randint(jax.random.key(2), (2, 16, 7), 2, 64)
    state, before, first = optimizer.init(draft), draft, None
    for number in range(30):
        draft, state, loss, grads = step(draft, state, target, batches[number % 2])
        first = loss if first is None else first
        if number == 0:
            for leaf in jax.tree.leaves(grads):
                assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0
    assert loss < 0.9 * first
    assert jax.tree.structure(draft) == jax.tree.structure(before)

    options = dict(sampling=Sampling(temperature=None), max_length=10, eos_id=-1)
    common = (INPUTS, MASK, row_keys(0, len(INPUTS)))
    plain = autoregressive_generate(target, *common, **options)
    fast = speculative_generate(
        target, ModelDrafter(draft), *common, gamma=3, **options
    )
    np.testing.assert_array_equal(fast.tokens, plain.tokens)


def test_no_gradient_flows_into_the_target():
    target = tiny_t5(0)
    draft = perturbed(draft_init.draft_from_target(target, (), (0,)), 1, 0.1)

    @jax.jit
    def run(draft, target):
        own = draft.encode_shared(target.encode(INPUTS, MASK))
        return jnp.sum(draft.decode(INPUTS, None, own)[0].logits ** 2)

    of_draft, of_target = jax.grad(run, argnums=(0, 1))(draft, target)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(of_draft))
    assert not any(np.abs(leaf).max() for leaf in jax.tree.leaves(of_target))
