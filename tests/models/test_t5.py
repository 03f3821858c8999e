"""Laws of the T5 model: offsets, rollback, masks, ownership; no reference needed."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from specjax.models import t5
from specjax.models.t5_config import T5Config

GAMMA = 4
LENGTH = 66
TOLERANCE = 2e-5

TIED = T5Config(
    vocab_size=48,
    d_model=32,
    d_kv=8,
    num_heads=3,
    d_ff=40,
    num_encoder_layers=2,
    num_decoder_layers=2,
    gated=False,
    activation="relu",
    tied_head=True,
    scaled_head=True,
)
PER_LAYER = dataclasses.replace(
    TIED,
    gated=True,
    activation="gelu_new",
    tied_head=False,
    scaled_head=False,
    bias_per_layer=True,
    num_encoder_layers=1,
    num_decoder_layers=2,
)
SHALLOW = dataclasses.replace(TIED, num_encoder_layers=1, num_decoder_layers=1)


def strong_t5(config, seed=0):
    """Random weights under which norms, position and the activation matter."""
    rng = np.random.default_rng(seed)

    def weight(path, shape):
        noise = rng.normal(size=shape)
        if path[-1].key == "scale":
            noise = 1 + 0.3 * noise
        elif path[-1].key not in ("embedding", "bias"):
            noise = noise * shape[-1] ** -0.5
        return jnp.asarray(noise, jnp.float32)

    graph, state = nnx.split(jax.eval_shape(lambda: t5.T5(config, jax.random.key(0))))
    shapes = nnx.to_pure_dict(state)
    pure = jax.tree_util.tree_map_with_path(lambda p, x: weight(p, x.shape), shapes)
    nnx.replace_by_pure_dict(state, pure)
    return nnx.merge(graph, state)


@jax.jit
def encode(model, inputs, mask):
    return model.encode(inputs, mask)


@jax.jit
def decode(model, tokens, cache, encoded):
    output, cache = model.decode(tokens, cache, encoded)
    return output.logits, cache


@jax.jit
def teacher_force(model, tokens, encoded):
    return model.decode(tokens, None, encoded)[0].logits


@dataclasses.dataclass
class Case:
    """A model, two encoded sources, tokens, and the logits of one pass over them."""

    model: t5.T5
    inputs: jax.Array
    mask: jax.Array
    encoded: object
    tokens: jax.Array
    full: np.ndarray
    limit: float

    def block(self, offsets, width):
        """Tokens and expected logits at each row's own offset."""
        columns = np.asarray(offsets)[:, None] + np.arange(width)
        rows = np.arange(len(columns))[:, None]
        return self.tokens[rows, columns], self.full[rows, columns]

    def distance(self, logits, expected):
        return float(np.abs(np.asarray(logits) - expected).max()) / self.limit


@pytest.fixture(scope="module", params=[TIED, PER_LAYER], ids=["tied", "per_layer"])
def case(request):
    model = strong_t5(request.param)
    rng = np.random.default_rng(1)
    inputs = jnp.asarray(rng.integers(0, 48, (2, 8)), jnp.int32)
    mask = jnp.arange(8)[None] < jnp.array([8, 5])[:, None]
    tokens = jnp.asarray(rng.integers(0, 48, (2, LENGTH)), jnp.int32)
    encoded = encode(model, inputs, mask)
    full = np.asarray(teacher_force(model, tokens, encoded))
    limit = TOLERANCE * np.abs(full).max()
    return Case(model, inputs, mask, encoded, tokens, full, limit)


@pytest.fixture(scope="module")
def filled(case):
    """A cache that has been fed all tokens, in blocks."""
    cache = case.model.init_cache(2, LENGTH)
    for start in range(0, LENGTH, GAMMA + 1):
        width = GAMMA + 1 if start + GAMMA < LENGTH else 1
        tokens, expected = case.block([start, start], width)
        logits, cache = decode(case.model, tokens, cache, case.encoded)
        assert case.distance(logits, expected) <= 1
    np.testing.assert_array_equal(cache.length, [LENGTH, LENGTH])
    return cache


def reference_bucket(offset, bidirectional, num_buckets, max_distance):
    """One offset at a time, by comparing integer powers: no logarithm to round.

    Bucket `exact + i` starts where distance / exact reaches (max / exact)**(i / rest).
    """
    first = 0
    if bidirectional:
        num_buckets //= 2
        first = num_buckets if offset > 0 else 0
        distance = abs(offset)
    else:
        distance = max(-offset, 0)
    exact = num_buckets // 2
    if distance < exact:
        return first + distance
    rest = num_buckets - exact
    i = 0
    while i + 1 < rest and distance**rest * exact ** (i + 1) >= (
        exact**rest * max_distance ** (i + 1)
    ):
        i += 1
    return first + exact + i


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20)])
def test_buckets(bidirectional, num_buckets, max_distance):
    settings = {"num_buckets": num_buckets, "max_distance": max_distance}
    offsets = np.arange(-600, 601)
    buckets = t5.relative_position_bucket(
        offsets, bidirectional=bidirectional, **settings
    )
    assert buckets.dtype == np.int32
    expected = [reference_bucket(int(o), bidirectional, **settings) for o in offsets]
    np.testing.assert_array_equal(buckets, expected)
    assert set(expected) == set(buckets) and max(expected) == num_buckets - 1


def test_bucket_vectors():
    decoder = {15: 15, 16: 16, 18: 16, 19: 17, 22: 18, 26: 19, 27: 20, 32: 21}
    decoder |= {46: 24, 64: 26, 91: 29, 113: 31, 128: 31, 0: 0, 600: 31}
    before = {11: 8, 12: 9, 15: 9, 16: 10, 22: 10, 23: 11, 32: 12, 64: 14, 90: 14}
    before |= {91: 15, 0: 0, 7: 7, 600: 15}

    def bucket(offset, bidirectional):
        offsets = np.array([offset])
        return t5.relative_position_bucket(offsets, bidirectional=bidirectional)[0]

    assert {n: bucket(-n, False) for n in decoder} == decoder
    assert {n: bucket(-n, True) for n in before} == before
    after = {n: b + 16 for n, b in before.items() if n}
    assert {n: bucket(n, True) for n in after} == after
    assert bucket(5, False) == 0


@pytest.mark.parametrize("width", [1, GAMMA + 1])
def test_blocks_at_every_offset_agree_with_one_pass(case, filled, width):
    """Row 0 walks forward and row 1 backward, so offsets differ within a batch."""
    worst, shifted = 0.0, math.inf
    for offset in range(61):
        offsets = jnp.array([offset, 60 - offset], jnp.int32)
        tokens, expected = case.block(offsets, width)
        cache = filled.replace(length=offsets)
        logits, cache = decode(case.model, tokens, cache, case.encoded)
        worst = max(worst, case.distance(logits, expected))
        np.testing.assert_array_equal(cache.length, offsets + width)
        if offset:
            late = filled.replace(length=offsets - 1)
            wrong, _ = decode(case.model, tokens, late, case.encoded)
            shifted = min(shifted, case.distance(wrong[0], expected[0]))
    assert worst <= 1
    assert shifted > 100  # A cache that is one slot off fails by far.


def test_single_steps_from_an_empty_cache_agree_with_one_pass(case):
    cache = case.model.init_cache(2, LENGTH)
    for start in range(LENGTH):
        tokens, expected = case.block([start, start], 1)
        logits, cache = decode(case.model, tokens, cache, case.encoded)
        assert case.distance(logits, expected) <= 1


def test_rows_roll_back_by_length_alone(case):
    """Feeds a wrong block, sets `length` back by another amount per row, goes on."""
    cache = case.model.init_cache(2, LENGTH)
    for start in range(0, 20, GAMMA + 1):
        tokens, _ = case.block([start, start], GAMMA + 1)
        _, cache = decode(case.model, tokens, cache, case.encoded)
    wrong = (case.block([20, 20], GAMMA + 1)[0] + 7) % 48
    _, cache = decode(case.model, wrong, cache, case.encoded)
    lengths = jnp.array([20, 11], jnp.int32)
    cache = cache.replace(length=lengths)
    tokens, expected = case.block(lengths, GAMMA + 1)
    logits, _ = decode(case.model, tokens, cache, case.encoded)
    assert case.distance(logits, expected) <= 1
    logits, _ = decode(case.model, wrong, cache, case.encoded)
    assert case.distance(logits, expected) > 100


def test_stale_slots_change_nothing(case, filled):
    lengths = jnp.array([30, 3], jnp.int32)
    stale = jnp.arange(LENGTH)[None] >= lengths[:, None]
    tokens, _ = case.block(lengths, GAMMA + 1)

    def poisoned(value):
        where = stale[:, None, :, None]
        memory = jax.tree.map(lambda x: jnp.where(where, value, x), filled.memory)
        cache = filled.replace(memory=memory, length=lengths)
        return np.asarray(decode(case.model, tokens, cache, case.encoded)[0])

    np.testing.assert_array_equal(poisoned(1e4), poisoned(0.0))
    everywhere = jax.tree.map(lambda x: x + 1e4, filled.memory)
    cache = filled.replace(memory=everywhere, length=lengths)
    visible, _ = decode(case.model, tokens, cache, case.encoded)
    assert case.distance(visible, poisoned(0.0)) > 100


def test_writes_past_the_end_are_dropped(case, filled):
    """Row 0 has room for two more tokens, row 1 is far past the end."""
    room = LENGTH - 2
    cache = filled.replace(length=jnp.array([room, 100], jnp.int32))
    tokens = jnp.pad(case.tokens[:, room:], ((0, 0), (0, 3)), constant_values=9)
    tokens = tokens.at[0, 0].add(1) % 48
    logits, after = decode(case.model, tokens, cache, case.encoded)
    np.testing.assert_array_equal(after.length, [room + GAMMA + 1, 105])
    old, new = (
        [np.asarray(x) for x in jax.tree.leaves(c.memory)] for c in (cache, after)
    )
    for before, now in zip(old, new, strict=True):
        np.testing.assert_array_equal(before[1], now[1])
        np.testing.assert_array_equal(before[0, :, :room], now[0, :, :room])
        assert np.abs(before[0, :, room] - now[0, :, room]).max() > 1e-3
    cache = after.replace(length=jnp.array([room, 100], jnp.int32))
    tokens = tokens.at[0, 0].set(case.tokens[0, room])
    logits, _ = decode(case.model, tokens, cache, case.encoded)
    assert case.distance(logits[0, :2], case.full[0, room:]) <= 1


def test_cross_attention_is_projected_once_and_never_written(case, filled):
    encoded = case.encoded
    assert len(encoded.cross) == case.model.config.num_decoder_layers
    before = [np.array(x) for x in jax.tree.leaves(encoded)]
    cache = filled.replace(length=jnp.array([9, 2], jnp.int32))
    tokens, expected = case.block([9, 2], GAMMA + 1)
    logits, _ = decode(case.model, tokens, cache, encoded)
    for old, new in zip(before, jax.tree.leaves(encoded), strict=True):
        np.testing.assert_array_equal(old, new)
    # The encoder's output is no longer looked at ...
    blind = encoded.replace(hidden=jnp.full_like(encoded.hidden, jnp.nan))
    again, _ = decode(case.model, tokens, cache, blind)
    np.testing.assert_array_equal(logits, again)
    # ... unless the projections are left out, which changes nothing but the time.
    without, _ = decode(case.model, tokens, cache, encoded.replace(cross=None))
    assert case.distance(without, expected) <= 1
    other = jax.tree.map(lambda x: x + 0.1, encoded.cross)
    changed, _ = decode(case.model, tokens, cache, encoded.replace(cross=other))
    assert case.distance(changed, expected) > 100


def test_source_padding_changes_nothing(case):
    inputs = jnp.pad(case.inputs, ((0, 0), (0, 56)), constant_values=3)
    mask = jnp.pad(case.mask, ((0, 0), (0, 56)))
    encoded = encode(case.model, inputs, mask)
    logits = teacher_force(case.model, case.tokens, encoded)
    assert case.distance(logits, case.full) <= 1
    # On the left it changes nothing either: positions are relative.
    order = jnp.roll(jnp.arange(64), 56)
    encoded = encode(case.model, inputs[:, order], mask[:, order])
    logits = teacher_force(case.model, case.tokens, encoded)
    assert case.distance(logits, case.full) <= 1
    unmasked = encode(case.model, inputs, jnp.ones_like(mask))
    logits = teacher_force(case.model, case.tokens, unmasked)
    assert case.distance(logits, case.full) > 100


def test_id_0_inside_a_source_is_a_token(case):
    inputs = case.inputs.at[:, 2].set(0)

    def run(inputs, mask):
        return teacher_force(case.model, case.tokens, encode(case.model, inputs, mask))

    seen = np.asarray(run(inputs, case.mask))
    masked = run(inputs, case.mask.at[:, 2].set(False))
    other = run(inputs.at[:, 2].set(5), case.mask)
    assert case.distance(masked, seen) > 100
    assert case.distance(other, seen) > 100
    # Under the mask the id does not matter.
    mask = case.mask.at[:, 2].set(False)
    again = run(inputs.at[:, 2].set(5), mask)
    assert case.distance(again, np.asarray(masked)) <= 1


def test_a_row_without_source_stays_finite(case):
    encoded = encode(case.model, case.inputs, case.mask.at[1].set(False))
    logits = teacher_force(case.model, case.tokens, encoded)
    assert bool(jnp.isfinite(logits).all())
    assert case.distance(logits[0], case.full[0]) <= 1


def test_taps(case):
    model, last = case.model, case.model.config.num_decoder_layers - 1

    @jax.jit
    def run(model, tokens, encoded):
        output, _ = model.decode(tokens, None, encoded, taps=(-1, 0, last))
        return output, model.decoder_norm(output.features[2])

    output, normed = run(model, case.tokens, case.encoded)
    final, first, top = (np.asarray(f) for f in output.features)
    assert final.shape == first.shape == top.shape == (2, LENGTH, 32)
    assert case.distance(output.logits, case.full) <= 1
    np.testing.assert_allclose(final, normed, rtol=1e-5, atol=1e-6)
    head = model.embedding if model.head is None else model.head
    scale = model.config.d_model**-0.5 if model.config.scaled_head else 1.0
    logits = (scale * final) @ np.asarray(head[...]).T
    assert case.distance(logits, case.full) <= 1
    assert np.abs(first - top).max() > 0.1
    # When the later layers add nothing, the first layer's output is the last one's.
    idle = nnx.merge(*nnx.split(model))
    for block in idle.decoder[1:]:
        for param in (block.attention.out, block.cross.out, block.feed_forward.wo):
            param[...] = jnp.zeros_like(param[...])
    output, _ = run(idle, case.tokens, case.encoded)
    np.testing.assert_array_equal(output.features[1], output.features[2])
    np.testing.assert_array_equal(output.features[1], first)


@pytest.mark.slow
def test_dropout_follows_its_key():
    model = strong_t5(SHALLOW)
    ids = jnp.arange(6, dtype=jnp.int32)[None]

    @jax.jit
    def run(model, key):
        keys = (None, None) if key is None else jax.random.split(key)
        encoded = model.encode(ids, ids >= 0, dropout_key=keys[0])
        return model.decode(ids, None, encoded, dropout_key=keys[1])[0].logits

    plain, first, second, again = (
        np.asarray(run(model, key))
        for key in (None, *(jax.random.key(seed) for seed in (0, 1, 0)))
    )
    np.testing.assert_array_equal(first, again)
    for other in (second, plain):
        assert np.abs(first - other).max() > 0.01 * np.abs(plain).max()


def test_bfloat16_gives_float32_logits_near_those_of_float32():
    model = strong_t5(SHALLOW)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model)
    ids = jnp.arange(6, dtype=jnp.int32)[None]

    @jax.jit
    def run(model, ids):
        encoded = model.encode(ids, ids >= 0)
        output, cache = model.decode(ids, model.init_cache(1, 6), encoded)
        return output.logits, encoded.hidden, cache.memory

    expected, _, _ = run(model, ids)
    logits, hidden, memory = run(half, ids)
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves((hidden, memory))} == {half.dtype}
    assert half.dtype == jnp.bfloat16
    difference = np.abs(np.asarray(logits) - np.asarray(expected))
    assert 0 < difference.mean() < 0.03 * np.abs(np.asarray(expected)).max()


def test_different_weights_share_one_program(case):
    other = strong_t5(case.model.config, seed=5)
    before = teacher_force._cache_size()
    logits = teacher_force(other, case.tokens, case.encoded)
    assert teacher_force._cache_size() == before
    assert case.distance(logits, case.full) > 100


def test_traces_without_arrays():
    """Shapes at the largest model's width, without its gigabytes."""
    config = dataclasses.replace(
        T5Config.preset("t5-11b"), num_encoder_layers=2, num_decoder_layers=3
    )
    model = jax.eval_shape(lambda: t5.T5(config, jax.random.key(0)))

    def run(model, inputs, tokens):
        encoded = model.encode(inputs, inputs > 0)
        cache = model.init_cache(2, 16)
        return model.decode(tokens, cache, encoded, taps=(2,))

    ids = jax.ShapeDtypeStruct((2, 7), jnp.int32)
    output, cache = jax.eval_shape(run, model, ids, ids)
    assert output.logits.shape == (2, 7, 32128)
    assert output.features[0].shape == (2, 7, 1024)
    assert cache.length.shape == (2,) and len(cache.memory) == 3
    assert cache.memory[0].keys.shape == (2, 128, 16, 128)


def assert_no_sharing(model):
    if hasattr(nnx, "set_graph_mode"):
        with nnx.set_graph_mode(False):
            nnx.split(model)
    owners = [id(x) for x in jax.tree.leaves(model, is_leaf=_is_param) if _is_param(x)]
    if len(set(owners)) < len(owners):
        raise ValueError("a parameter has two owners")


def _is_param(x):
    return isinstance(x, nnx.Param)


def test_no_parameter_has_two_owners(case):
    assert_no_sharing(case.model)
    twin = strong_t5(PER_LAYER)
    twin.head = twin.embedding
    with pytest.raises(ValueError):
        assert_no_sharing(twin)
