"""Trees of drafts: their shape, their attention, and what is kept of them."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import trees
from specjax.decoding import autoregressive_generate, speculative_generate
from specjax.errors import InputError
from specjax.report import trace
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Law
from specjax.verify import greedy_rule
from tests.helpers import (
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

# Node 0 has children 1, 2 and 3; 1 has 4 and 5; 3 has 6; 4 has 7; 6 has 8.
PARENTS = (-1, 0, 0, 0, 1, 1, 3, 4, 6)
DEPTHS = (0, 1, 1, 1, 2, 2, 2, 3, 3)
CHAIN = (-1, 0, 1, 2, 3)
GREEDY = Sampling(temperature=None)


def path_to(node: int, parents=PARENTS) -> list[int]:
    """Nodes from the root down, by hand."""
    return ([] if node == 0 else path_to(parents[node], parents)) + [node]


@pytest.mark.parametrize(
    "parents", [PARENTS, CHAIN, (-1,), (-1, 0, 0), tuple(range(-1, 40))]
)
def test_ancestors_and_depths(parents):
    seen = np.asarray(trees.ancestors(jnp.array(parents)))
    for node in range(len(parents)):
        assert list(np.flatnonzero(seen[node])) == path_to(node, parents)
    depth = [len(path_to(node, parents)) - 1 for node in range(len(parents))]
    assert trees.depths(jnp.array(parents)).tolist() == depth


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ((), []),
        ((2,), [2]),
        ((1, 2, 3), [1]),  # the first of several
        ((1, 5, 7), [1, 5]),  # 7 stands below 4, which was not chosen
        ((3, 6, 8, 1), [1]),  # siblings are not tried again
        ((3, 6, 8), [3, 6, 8]),
        ((4, 7), []),
        ((1, 4, 7), [1, 4, 7]),
    ],
)
@pytest.mark.parametrize("gamma", [2, 3, 5])
def test_follow(chosen, expected, gamma):
    flags = jnp.zeros(len(PARENTS), bool).at[jnp.array(chosen, int)].set(True)
    path, length = trees.follow(jnp.array(PARENTS), flags, gamma)
    expected = expected[:gamma]
    assert length == len(expected)
    assert path.tolist() == expected + [0] * (gamma - len(expected))


def test_write_paths():
    tokens = jnp.array([0, 5, 6, 9, 9, 9, 9], jnp.int32)
    drafted = jnp.arange(11, 19, dtype=jnp.int32)  # of nodes 1 .. 8
    buffers, length = trees.write_paths(
        tokens, jnp.int32(3), drafted, jnp.array(PARENTS)
    )
    for node in range(len(PARENTS)):
        below = [10 + n for n in path_to(node)[1:]]
        assert buffers[node, : length[node]].tolist() == [0, 5, 6, *below]


@pytest.mark.parametrize(
    ("tokens", "length", "path", "next_token"),
    [
        ([40, 41, 42, 50, 51, 52, 60, 61], 8, [], 43),
        ([40, 43, 42, 50, 51, 52, 60, 61], 8, [2], 72),
        ([43, 43, 42, 50, 51, 52, 60, 61], 8, [1], 71),
        ([40, 41, 43, 50, 51, 73, 60, 76], 8, [3, 6, 8], 78),
        ([40, 41, 43, 50, 51, 73, 60, 76], 7, [3, 6], 76),  # node 8 is not real
        ([43, 41, 42, 71, 51, 52, 74, 61], 8, [1, 4, 7], 77),
    ],
)
def test_greedy_rule_by_hand(tokens, length, path, next_token):
    """The target writes 43 after the root and 70 + i after node i."""
    block = DraftBlock(
        tokens=jnp.array(tokens, jnp.int32),
        length=jnp.int32(length),
        parents=jnp.array(PARENTS),
    )
    best = jnp.array([43, *range(71, 79)], jnp.int32)
    verdict = greedy_rule(best, block, 3)
    assert verdict.num_accepted == len(path)
    assert verdict.path[: len(path)].tolist() == path
    assert verdict.next_token == next_token


@pytest.fixture(scope="module")
def model():
    return tiny_t5(0)


@pytest.fixture(scope="module")
def fed(model):
    """Two rows with 7 and 4 tokens in the cache, and a node's tokens for each."""
    inputs, mask = ragged_sources(0, 2, 6)
    encoded = jax.jit(lambda model: model.encode(inputs, mask))(model)
    tokens = np.random.default_rng(0).integers(2, 64, (2, 7 + len(PARENTS)))
    tokens = jnp.asarray(tokens, jnp.int32)
    cache = model.init_cache(2, 24)
    _, cache = decode(model, tokens[:, :7], cache, encoded)
    lengths = jnp.array([7, 4])
    return encoded, tokens, cache.replace(length=lengths), tokens[:, 7:]


@functools.partial(jax.jit, static_argnames="start")
def decode(model, tokens, cache, encoded, parents=None, start=0):
    return model.decode(tokens, cache, encoded, parents=parents, start=start)


def chain_logits(model, fed, row: int, node: int) -> np.ndarray:
    """Logits after a node, its path fed as plain text."""
    encoded, tokens, cache, nodes = fed
    start = int(cache.length[row])
    text = [*tokens[row, :start].tolist(), *(int(nodes[row, n]) for n in path_to(node))]
    return text_logits(model, encoded, row, text)[-1]


def text_logits(model, encoded, row: int, text: list[int]) -> np.ndarray:
    """Logits after each token of a text of one row, in one pass."""
    padded = jnp.asarray(text + [0] * (16 - len(text)), jnp.int32)[None]
    own = jax.tree.map(lambda x: x[row : row + 1], encoded)
    return np.asarray(decode(model, padded, None, own)[0].logits[0, : len(text)])


@pytest.mark.parametrize("cuts", [(9,), (1, 4, 9), (4, 7, 9), (1, 2, 3, 4, 9)])
def test_every_node_sees_its_own_path(model, fed, cuts):
    """In one call, or in several that go on where the one before stopped."""
    encoded, _, cache, nodes = fed
    parents = jnp.broadcast_to(jnp.array(PARENTS), (2, len(PARENTS)))
    logits, start = [], 0
    for cut in cuts:
        output, cache = decode(
            model, nodes[:, start:cut], cache, encoded, parents=parents, start=start
        )
        logits.append(output.logits)
        start = cut
    logits = np.concatenate(logits, axis=1)
    assert cache.length.tolist() == [16, 13]
    for row in range(2):
        for node in range(len(PARENTS)):
            expected = chain_logits(model, fed, row, node)
            limit = 2e-5 * np.abs(expected).max()
            assert np.abs(logits[row, node] - expected).max() <= limit
    # Fed as a chain, most nodes would see their neighbours.
    chain, _ = decode(model, nodes, fed[2], encoded)
    assert np.abs(np.asarray(chain.logits) - logits)[:, 2:].max() > 0.1


def test_a_chain_is_a_tree(model, fed):
    encoded, _, cache, nodes = fed
    parents = jnp.broadcast_to(jnp.arange(-1, 8), (2, 9))
    one, _ = decode(model, nodes, cache, encoded, parents=parents)
    other, _ = decode(model, nodes, cache, encoded)
    np.testing.assert_allclose(one.logits, other.logits, atol=1e-5)


def test_a_kept_path_is_as_if_it_had_been_fed_alone(model, fed):
    encoded, tokens, cache, nodes = fed
    parents = jnp.broadcast_to(jnp.array(PARENTS), (2, len(PARENTS)))
    base = cache.length
    _, after = decode(model, nodes, cache, encoded, parents=parents)
    paths = jnp.array([[3, 6, 8], [1, 5, 0]])  # the last of row 1 means nothing
    accepted = jnp.array([3, 2])
    after = model.keep(after, base, paths).replace(length=base + 1 + accepted)
    following = jnp.array([[11, 12], [13, 14]], jnp.int32)
    output, _ = decode(model, following, after, encoded)
    for row, path in enumerate(([0, 3, 6, 8], [0, 1, 5])):
        text = [
            *tokens[row, : int(base[row])].tolist(),
            *(int(nodes[row, node]) for node in path),
            *following[row].tolist(),
        ]
        expected = text_logits(model, encoded, row, text)[-2:]
        np.testing.assert_allclose(output.logits[row], expected, atol=1e-4)
    # Not kept, the slots hold other nodes.
    _, stale = decode(model, nodes, cache, encoded, parents=parents)
    stale = stale.replace(length=base + 1 + accepted)
    wrong, _ = decode(model, following, stale, encoded)
    assert np.abs(np.asarray(wrong.logits - output.logits)).max() > 0.1


@struct.dataclass
class TreeDrafter:
    """A fixed tree whose children are a model's most probable tokens, best first.

    It forgets everything between steps and reads the whole text anew.
    """

    model: Any
    parents: tuple[int, ...] = struct.field(pytree_node=False, default=PARENTS)

    taps: ClassVar[tuple[int, ...]] = (-1,)
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = True

    def nodes(self, gamma):
        return len(self.parents) - 1

    def init(self, target, encoded, inputs, mask, prefix, length, size):
        return self.model.encode(inputs, mask), jnp.zeros((len(inputs), 2))

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        own, _ = state
        batch, count = tokens.shape[0], len(self.parents)
        parents = jnp.broadcast_to(jnp.array(self.parents), (batch, count))
        cache = self.model.init_cache(batch, tokens.shape[1] + count)
        _, cache = self.model.decode(tokens, cache, own)
        cache = cache.replace(length=length - 1)
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)
        # Level by level: nodes of one depth stand side by side.
        levels = [len(path_to(node, self.parents)) for node in range(count)]
        nodes, logits, start = last, jnp.zeros((batch, 0, target.vocab_size)), 0
        while start < count:
            output, cache = self.model.decode(
                nodes[:, start:], cache, own, parents=parents, start=start
            )
            logits = jnp.concatenate([logits, output.logits], axis=1)
            best = jnp.argsort(-logits, axis=-1).astype(jnp.int32)
            start = nodes.shape[1]
            for node in range(start, start + levels.count(levels[start - 1] + 1)):
                above = self.parents[node]
                rank = self.parents[:node].count(above)
                nodes = jnp.concatenate([nodes, best[:, above, rank][:, None]], axis=1)
        probs = jax.nn.softmax(logits, axis=-1)
        block = DraftBlock(
            tokens=nodes[:, 1:],
            length=jnp.full(batch, count - 1, jnp.int32),
            law=Law(probs=probs),
            parents=parents,
        )
        return block, state

    def commit(self, state, committed):
        """Remembers the sum of the features that are valid, for a test to look at."""
        (features,) = committed.features
        valid = jnp.arange(features.shape[1])[None] <= committed.num_accepted[:, None]
        last = jnp.where(valid[..., None], features, 0.0)[:, :, :2]
        return state[0], state[1] + jnp.sum(last, axis=1)


@struct.dataclass
class NoRepeat:
    """Bans the last token, which differs from node to node."""

    def __call__(self, logits, tokens, length):
        return logits.at[tokens[length - 1]].set(-jnp.inf)


def generate(target, drafter, rows=5, **options):
    inputs, mask = ragged_sources(1, rows, 6)
    options = {"sampling": GREEDY, "max_length": 26, "eos_id": 1, **options}
    arguments = (inputs, mask, row_keys(0, rows))
    fast = speculative_generate(target, drafter, *arguments, gamma=3, **options)
    for only_speculative in ("trace", "verifier"):
        options.pop(only_speculative, None)
    return autoregressive_generate(target, *arguments, **options), fast


@pytest.fixture(scope="module")
def drafter(model):
    return TreeDrafter(perturbed(model, 1, 0.3))


@pytest.fixture(scope="module")
def both(model, drafter):
    budget = jnp.array([0, 1, 5, 12, 25])
    return generate(model, drafter, log_probs=True, trace=True, budget=budget)


@pytest.mark.slow
def test_greedy_trees_write_the_autoregressive_text(both):
    plain, fast = both
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    np.testing.assert_array_equal(plain.length, fast.length)
    np.testing.assert_allclose(plain.log_probs, fast.log_probs, atol=1e-4)
    accepted, drafted = fast.stats.accepted, fast.stats.drafted
    assert 0 < accepted.sum() < drafted.sum()
    calls = fast.stats.target_calls
    np.testing.assert_array_equal(drafted, jnp.broadcast_to(calls[:, None], (5, 3)))
    # A second child stood at least once, which no chain of first children offers.
    calls = fast.trace
    real = np.arange(3)[None, None] < np.asarray(calls.num_accepted)[..., None]
    stood = np.asarray(calls.path)[real]
    assert {1, 2} <= set(stood.tolist())
    rows, steps = np.nonzero(np.asarray(calls.num_accepted))
    path = np.asarray(calls.path)
    for row, step in zip(rows, steps, strict=True):
        top = path[row, step, 0]
        assert PARENTS[top] == 0 and calls.parents[row, step].tolist() == [*PARENTS]
        assert calls.p[row, step, top - 1] == 1.0


@pytest.mark.slow
def test_controls_read_each_nodes_own_path(model, drafter):
    sampling = Sampling(temperature=None, controls=(NoRepeat(),))
    plain, fast = generate(model, drafter, sampling=sampling)
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    text = np.asarray(plain.tokens)
    assert all(
        (text[row, 1:n] != text[row, : n - 1]).all()
        for row, n in enumerate(np.asarray(plain.length))
    )
    without, _ = generate(model, drafter)
    assert (without.tokens != plain.tokens).any()
    assert fast.stats.accepted.sum() > 0


@pytest.mark.slow
def test_features_are_those_of_the_path(model, drafter):
    """Their sum over a decode is that of the text's own features."""
    from specjax.decoding import speculative_init, speculative_step
    from specjax.sampling import with_arrays

    inputs, mask = ragged_sources(1, 1, 6)
    init = jax.jit(speculative_init, static_argnames=("gamma", "max_length"))
    encoded, state = init(
        model,
        drafter,
        inputs,
        mask,
        gamma=3,
        max_length=20,
        budget=jnp.array([19]),
        prefix=jnp.zeros((1, 1), jnp.int32),
        prefix_length=jnp.ones(1, jnp.int32),
    )
    step = jax.jit(speculative_step, static_argnames="gamma")
    for _ in range(4):
        state = step(
            model,
            drafter,
            encoded,
            row_keys(0, 1),
            state,
            sampling=with_arrays(GREEDY),
            draft_sampling=with_arrays(GREEDY),
            gamma=3,
            eos_id=-1,
        )
    fed = state.tokens[:, : int(state.length[0]) - 1]
    output, _ = jax.jit(lambda model: model.decode(fed, None, encoded, taps=(-1,)))(
        model
    )
    expected = output.features[0][:, :, :2].sum(axis=1)
    np.testing.assert_allclose(state.draft_state[1], expected, atol=1e-4)
    assert state.stats.accepted.sum() > 2


@pytest.mark.slow
def test_a_tree_in_colour(both):
    _, fast = both
    for row in range(5):
        tokens = trace.traced_tokens(fast, row)
        written = fast.tokens[row, 1 : int(fast.length[row])].tolist()
        assert [token.token for token in tokens] == written
    kinds = {t.kind for row in range(5) for t in trace.traced_tokens(fast, row)}
    assert kinds == {trace.ACCEPTED, trace.CORRECTED, trace.BONUS}


@pytest.mark.slow
def test_a_small_tree_is_no_chain(model):
    """As many nodes as gamma: two children of the root, and a depth of one."""
    drafter = TreeDrafter(perturbed(model, 1, 0.3), parents=(-1, 0, 0))
    inputs, mask = ragged_sources(1, 5, 6)
    arguments = (inputs, mask, row_keys(0, 5))
    options = dict(sampling=GREEDY, max_length=20)
    plain = autoregressive_generate(model, *arguments, **options)
    fast = speculative_generate(
        model, drafter, *arguments, gamma=2, trace=True, **options
    )
    np.testing.assert_array_equal(plain.tokens, fast.tokens)
    assert fast.stats.accepted[:, 0].sum() > 0 == fast.stats.accepted[:, 1].sum()
    with pytest.raises(InputError, match="judges chains"):
        speculative_generate(model, drafter, *arguments, gamma=2)


@struct.dataclass
class Mislabelled(TreeDrafter):
    trees: ClassVar[bool] = False


def test_a_drafter_must_say_what_it_drafts(model):
    drafter = Mislabelled(model)
    with pytest.raises(InputError, match="Mislabelled has trees=False and drafted a"):
        generate(model, drafter)


def test_a_verifier_of_chains_is_refused(model, drafter):
    with pytest.raises(InputError, match="TreeDrafter drafts trees .* judges chains"):
        generate(model, drafter, sampling=Sampling())
