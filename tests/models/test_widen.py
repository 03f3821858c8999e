"""A widened T5 computes what the small one does; each wrong way to widen is seen."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax import ModelDrafter, Sampling, errors, zoo
from specjax.decoding import speculative_generate
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config, num_parameters
from specjax.models.widen import widen, widened_config
from tests.helpers import (
    compile_with,
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
)

ROWS, FED = 3, 9
# An eps that is seen at the size of a tiny model's activations.
SMALL = T5Config(
    vocab_size=40,
    d_model=24,
    d_kv=4,
    num_heads=2,
    d_ff=20,
    num_encoder_layers=2,
    num_decoder_layers=2,
    eps=0.05,
)
PRESET = T5Config(
    vocab_size=48,
    d_model=40,
    d_kv=6,
    num_heads=3,
    d_ff=28,
    num_encoder_layers=3,
    num_decoder_layers=3,
)
TIED = dict(tied_head=True, scaled_head=True)
FAMILIES = {
    "1.0": dict(gated=False, activation="relu", **TIED),
    "1.1": {},
    "mT5": dict(num_buckets=16, max_distance=20),
    "umT5": dict(bias_per_layer=True),
    "byT5": dict(num_encoder_layers=3, num_decoder_layers=1),
    "tied, unscaled": dict(tied_head=True),
    "untied, scaled": dict(scaled_head=True),
}
QUICK = ("1.0", "umT5")
KEY = jax.random.key(7)
INPUTS, MASK = ragged_sources(1, ROWS, 7, SMALL.vocab_size)


def each_family(quick=QUICK):
    """All of them, those that are not `quick` among the slow tests."""
    slow = {name: [pytest.mark.slow] for name in FAMILIES if name not in quick}
    return [pytest.param(name, marks=slow.get(name, ())) for name in FAMILIES]


def edited(model, change, config=None):
    """A copy with ``change(names, values)`` of each parameter, maybe of other shape."""
    graph, state = nnx.split(model)
    leaves = jax.tree_util.tree_map_with_path(
        lambda path, leaf: change([step.key for step in path], leaf),
        nnx.to_pure_dict(state),
    )
    if config is not None:
        graph, state = nnx.split(jax.eval_shape(lambda: T5(config, KEY)))
    nnx.replace_by_pure_dict(state, leaves)
    return nnx.merge(graph, state)


def strong_t5(config, seed=0):
    """Random weights, norms and logits that are not flat, and text that varies."""
    generator = np.random.default_rng(seed)
    times = {"head": 3.0, "embedding": 0.3}

    def change(names, leaf):
        if names[-1] != "scale":
            return leaf * times.get(names[-1], 1.0)
        return jnp.asarray(generator.uniform(0.5, 2.0, leaf.shape), leaf.dtype)

    return edited(jax.jit(T5, static_argnums=0)(config, jax.random.key(seed)), change)


@jax.jit
def look(model, tokens):
    """Encoder output, logits, and each layer's features with the final norm's last."""
    encoded = model.encode(INPUTS, MASK)
    taps = (*range(model.config.num_decoder_layers), -1)
    output, _ = model.decode(tokens, None, encoded, taps=taps)
    return encoded.hidden, output.logits, output.features


def fed_tokens():
    tokens = np.random.default_rng(3).integers(0, SMALL.vocab_size, (ROWS, FED))
    return jnp.asarray(tokens, jnp.int32)


def distance(small, wide, tokens=None):
    """Greatest gap of the logits, as part of the greatest logit."""
    tokens = fed_tokens() if tokens is None else tokens
    own, other = (np.asarray(look(model, tokens)[1]) for model in (small, wide))
    return np.abs(own - other[..., : own.shape[-1]]).max() / np.abs(own).max()


def greedy_text(model, vocab_size):
    """What it writes without a cache, rows of the padding ruled out."""
    tokens = jnp.zeros((ROWS, FED), jnp.int32)
    for place in range(FED - 1):
        logits = look(model, tokens)[1][:, place, :vocab_size]
        tokens = tokens.at[:, place + 1].set(jnp.argmax(logits, -1).astype(jnp.int32))
    return np.asarray(tokens)


def pair_of(family, preset=PRESET):
    config = dataclasses.replace(SMALL, **FAMILIES[family])
    small = strong_t5(config)
    return small, widen(small, widened_config(config, preset), KEY)


@pytest.mark.slow
@pytest.mark.parametrize("family", each_family())
def test_it_is_the_same_function(family):
    small, wide = pair_of(family)
    width, layers = small.config.d_model, small.config.num_decoder_layers
    assert num_parameters(wide.config) > 2 * num_parameters(small.config)
    assert distance(small, wide) < 1e-4
    text = greedy_text(small, SMALL.vocab_size)
    assert len(np.unique(text)) > 2
    np.testing.assert_array_equal(greedy_text(wide, SMALL.vocab_size), text)

    hidden, _, features = look(small, fed_tokens())
    wide_hidden, _, wide_features = look(wide, fed_tokens())
    factor = (40 / 24) ** 0.5 if small.config.scaled_head else 1.0
    assert len(wide_features) == PRESET.num_decoder_layers + 1
    pairs = [(hidden, wide_hidden, 1.0), (features[-1], wide_features[-1], factor)]
    pairs += [
        # New layers repeat the last of the old ones.
        (features[min(i, layers - 1)], wide_features[i], 1.0)
        for i in range(PRESET.num_decoder_layers)
    ]
    for own, other, times in pairs:
        limit = 1e-4 * float(jnp.abs(own).max())
        np.testing.assert_allclose(other[..., :width], times * own, atol=limit)
        assert not np.any(other[..., width:])


def new_heads_speak(names, leaf):
    return leaf.at[:24, 12:].set(0.3) if names[-2:] == ["attention", "out"] else leaf


def new_units_speak(names, leaf):
    return leaf.at[:24, 20:].set(0.3) if names[-1] == "wo" else leaf


def new_columns_are_read(names, leaf):
    return leaf.at[:, 24:].set(0.3) if names[-1] == "embedding" else leaf


def new_keys_are_seen(names, leaf):
    # Of the first head, whose width has grown from 4 to 6.
    return leaf.at[1, 4:6].set(0.3) if names[-1] == "qkv" else leaf


def unscaled(*where):
    def change(names, leaf):
        told = names[-1] == "scale" and (not where or names[0] in where)
        return leaf.at[:24].multiply((40 / 24) ** 0.5) if told else leaf

    return change


TWINS = {
    "norms without their factor": unscaled("encoder", "decoder"),
    "the encoder's final norm without it": unscaled("encoder_norm"),
    "a final norm with another one than the scaled head's": unscaled("decoder_norm"),
    "new heads that speak": new_heads_speak,
    "new hidden units that speak": new_units_speak,
    "new columns of the residual stream": new_columns_are_read,
    "new keys of old heads": new_keys_are_seen,
}


@pytest.fixture(scope="module")
def tied():
    return pair_of("1.0")


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_a_wrong_way_to_widen_is_seen(tied, name):
    small, wide = tied
    assert distance(small, edited(wide, TWINS[name])) > 1e-2


@pytest.mark.slow
def test_the_old_eps_is_seen(tied):
    small, wide = tied
    old = dataclasses.replace(wide.config, eps=SMALL.eps)
    twin = edited(wide, lambda names, leaf: leaf, old)
    assert distance(small, twin) > 1e-3
    with pytest.raises(errors.InputError, match="with eps 0.03, not 0.05"):
        widen(small, old, KEY)


def test_what_is_new_is_random_and_has_its_own_memory(tied):
    _, wide = tied
    leaves = jax.tree.leaves(nnx.state(wide))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    new, old = wide.decoder[-1], wide.decoder[0]
    queries = np.asarray(new.attention.qkv[0])
    assert 0.5 < np.std(queries) * (40 * 6) ** 0.5 < 2  # a new T5's scale
    assert not np.any(new.attention.out[...]) and not np.any(new.feed_forward.wo[...])
    assert np.all(old.feed_forward.wi[:, 20:]) and np.all(old.attention.qkv[0, 12:])
    assert np.all(wide.embedding[40:, :24]) and np.all(old.cross.kv[1, :, 24:])


@pytest.mark.slow
def test_it_decodes_to_the_same_tokens_with_the_same_acceptance():
    """Two rows greedy, two sampled; wide ones with rows that mean nothing."""
    rows = 4
    inputs, mask = ragged_sources(2, rows, 7, SMALL.vocab_size)
    shape = dataclasses.replace(SMALL, num_encoder_layers=1, num_decoder_layers=1)
    larger = dataclasses.replace(PRESET, num_encoder_layers=1, num_decoder_layers=2)
    other = dataclasses.replace(larger, d_model=32, d_ff=36, num_decoder_layers=1)
    target = strong_t5(shape)
    draft = perturbed(target, 1, 0.2)

    @jax.jit
    def decode(target, draft):
        return speculative_generate(
            target,
            ModelDrafter(draft),
            inputs,
            mask,
            row_keys(0, rows),
            sampling=Sampling(
                temperature=jnp.array([0.0, 0.0, 1.0, 1.0]),
                num_tokens=SMALL.vocab_size,
            ),
            gamma=3,
            max_length=20,
            eos_id=-1,
        )

    own = decode(target, draft)
    wide = decode(
        widen(target, widened_config(shape, larger), KEY),
        widen(draft, widened_config(shape, other), KEY),
    )
    jax.tree.map(np.testing.assert_array_equal, own, wide)
    accepted, drafted = (int(x.sum()) for x in (own.stats.accepted, own.stats.drafted))
    assert 0 < accepted < drafted


@jax.jit
def look_shared(target, draft, tokens):
    encoded = draft.encode_shared(target.encode(INPUTS, MASK))
    return draft.decode(tokens, None, encoded)[0].logits


@pytest.mark.slow
@pytest.mark.parametrize("grows", [False, True])
def test_a_draft_that_reads_the_targets_encoder(grows):
    """It is widened with its target, or reads the widened target at its own cost."""
    target = strong_t5(SMALL)
    own = dataclasses.replace(
        SMALL,
        d_model=16,
        num_encoder_layers=0,
        num_decoder_layers=1,
        encoder_width=SMALL.d_model,
    )
    draft = strong_t5(own, seed=1)
    shape = widened_config(own, PRESET) if grows else own
    shape = dataclasses.replace(shape, encoder_width=PRESET.d_model)
    wide = widen(draft, shape, KEY)
    assert wide.projection[...].shape == (40 if grows else 16, 40)
    logits = look_shared(target, draft, fed_tokens())
    larger = widen(target, widened_config(SMALL, PRESET), KEY)
    limit = 1e-4 * float(jnp.abs(logits).max())
    got = look_shared(larger, wide, fed_tokens())
    np.testing.assert_allclose(got[..., :40], logits, atol=limit)

    def blind(names, leaf):
        return leaf.at[:16, 0].multiply(0.5) if names[-1] == "projection" else leaf

    twin = look_shared(larger, edited(wide, blind), fed_tokens())
    assert np.abs(twin[..., :40] - logits).max() > 10 * limit


@pytest.mark.slow
def test_a_bfloat16_model_stays_one():
    small = edited(strong_t5(SMALL), lambda names, leaf: leaf.astype(jnp.bfloat16))
    wide = widen(small, widened_config(SMALL, PRESET), KEY)
    for leaf in jax.tree.leaves(nnx.state(wide)):
        assert leaf.dtype == jnp.bfloat16
    assert distance(small, wide) < 0.05


def shapes(tree):
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        ("1.1", "t5-v1_1-xxl"),
        *(
            pytest.param(family, preset, marks=pytest.mark.slow)
            for family, preset in [
                ("1.0", "t5-11b"),
                ("1.1", "t5-v1_1-small"),
                ("1.1", "t5-v1_1-base"),
                ("1.1", "t5-v1_1-large"),
                ("mT5", "mt5-xl"),
                ("umT5", "umt5-xxl"),
                ("byT5", "byt5-xxl"),
            ]
        ),
    ],
)
def test_it_has_the_published_shape(family, preset):
    published = T5Config.preset(preset)
    config = dataclasses.replace(SMALL, **FAMILIES[family])
    shape = widened_config(config, published)
    assert num_parameters(shape) == num_parameters(
        dataclasses.replace(
            published,
            tied_head=shape.tied_head,
            num_buckets=shape.num_buckets,
        )
    )
    small = jax.eval_shape(lambda: T5(config, KEY))
    wide = jax.eval_shape(lambda model: widen(model, shape, KEY), small)
    assert wide.config == shape
    assert shapes(wide) == shapes(jax.eval_shape(lambda: T5(shape, KEY)))


@pytest.fixture
def all_optimizations():
    """Half a billion weights take longer than to compile what makes them."""
    yield from compile_with(False)


@pytest.mark.slow
def test_layers_of_the_largest_shape(all_optimizations):
    published = T5Config.preset("t5-v1_1-xxl")
    preset = dataclasses.replace(
        published, vocab_size=48, num_encoder_layers=1, num_decoder_layers=1
    )
    config = dataclasses.replace(SMALL, num_encoder_layers=1, num_decoder_layers=1)
    small = strong_t5(config)
    wide = widen(small, widened_config(config, preset), KEY)
    assert wide.decoder[0].feed_forward.wi[...].shape == (2, 10240, 4096)
    assert distance(small, wide) < 1e-4


@pytest.mark.parametrize("model", ["ende/target", "ende/draft", "repair/target"])
@pytest.mark.parametrize("size", ["small", "base", "large"])
def test_shipped_models_reach_published_costs(model, size):
    config = T5Config.from_json(zoo.folder(model))
    preset = T5Config.preset(f"t5-v1_1-{size}")
    shape = widened_config(config, preset)
    assert shape.num_heads >= config.num_heads and shape.d_kv >= config.d_kv
    assert num_parameters(shape) == pytest.approx(
        num_parameters(dataclasses.replace(preset, tied_head=config.tied_head)), 1e-4
    )
    # `eps` is kept by the file too.
    assert T5Config.from_json(shape.to_json()) == shape


def test_heads_keep_their_number_and_their_width():
    def heads(num_heads, d_kv):
        own = dataclasses.replace(SMALL, num_heads=num_heads, d_kv=d_kv)
        shape = widened_config(own, dataclasses.replace(PRESET, num_heads=6, d_kv=64))
        return shape.num_heads, shape.d_kv

    assert heads(4, 32) == (6, 64)
    assert heads(8, 32) == (8, 48)
    assert heads(7, 32) == (7, 55)
    assert heads(2, 128) == (3, 128)
    assert heads(8, 128) == (8, 128)


CHANGES = {
    "gated": False,
    "activation": "relu",
    "tied_head": True,
    "scaled_head": True,
    "bias_per_layer": True,
    "num_buckets": 16,
    "max_distance": 64,
    "pad_id": 2,
    "eos_id": 2,
    "vocab_size": 39,
    "d_kv": 3,
    "num_heads": 1,
    "d_ff": 19,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
}


@pytest.mark.parametrize("name", [*CHANGES, "d_model", "encoder_width"])
def test_what_cannot_be_widened_is_named(name):
    model = jax.eval_shape(lambda: T5(SMALL, KEY))
    shape = widened_config(SMALL, PRESET)
    if name == "d_model":
        shape = widened_config(SMALL, dataclasses.replace(PRESET, d_model=23))
    elif name == "encoder_width":
        shape = dataclasses.replace(shape, encoder_width=40, num_encoder_layers=0)
        model = jax.eval_shape(
            lambda: T5(
                dataclasses.replace(SMALL, encoder_width=48, num_encoder_layers=0), KEY
            )
        )
    else:
        shape = dataclasses.replace(shape, **{name: CHANGES[name]})
    with pytest.raises(errors.InputError, match=f"^a model with {name} "):
        widen(model, shape, KEY)


def test_a_draft_cannot_gain_or_lose_an_encoder():
    shares = dataclasses.replace(SMALL, encoder_width=24, num_encoder_layers=0)
    for own, other in ((SMALL, shares), (shares, SMALL)):
        model = jax.eval_shape(lambda own=own: T5(own, KEY))
        with pytest.raises(errors.InputError, match="a model with "):
            widen(model, widened_config(other, PRESET), KEY)
