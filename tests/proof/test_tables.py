"""Tables on trees are tables on the chains of their paths; each row has its table."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import Sampling, speculative_generate
from specjax.drafters.tree import TreeDrafter
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import as_table, joint_law, stacked, table_model
from specjax.verify import recursive_distinct_verify
from tests.helpers import (
    quick_compile,  # noqa: F401
    row_keys,
)

TREE = (-1, 0, 0, 1, 1, 2)
DRAFTED = (3, 1, 0, 2, 2)  # nodes 1 to 5
TEXT = (0, 2)  # the start token, and the root


def test_joint_law_by_hand():
    """p(0) = .5; p(1 | 0) = .4."""
    probs = np.array([[0.5, 0.3, 0.2], [0.1, 0.4, 0.5], [1, 0, 0], [0, 0, 1]])
    model = as_table(probs, 1)
    np.testing.assert_allclose(joint_law(model, 2)[0], [0.05, 0.2, 0.25], rtol=1e-6)
    ended = joint_law(model, 2, eos_id=1)
    np.testing.assert_allclose(ended[1], [0.3, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(ended.sum(), 1, rtol=1e-6)


@functools.partial(jax.jit, static_argnames="start")
def feed(model, fed, cache, source, parents=None, start=0):
    output, cache = model.decode(fed, cache, source, parents=parents, start=start)
    return output.logits, cache


def encoded(model, source):
    inputs = jnp.full((1, 1), source, jnp.int32)
    return model.encode(inputs, jnp.ones((1, 1), bool))


def chain_logits(model, tokens, source=0):
    """After the last of `tokens`, fed at once, padded to one width."""
    fed = jnp.asarray([[*tokens, *[0] * (5 - len(tokens))]], jnp.int32)
    logits, _ = feed(model, fed, model.init_cache(1, 12), encoded(model, source))
    return np.asarray(logits)[0, len(tokens) - 1]


def path_to(node):
    return [] if node == 0 else [*path_to(TREE[node]), DRAFTED[node - 1]]


def test_a_node_has_the_law_of_its_own_path():
    """All nodes at once, then level by level: the same rows of the table."""
    model = table_model(0, 4, 4)
    source = encoded(model, 0)
    start = model.init_cache(1, 12)
    _, start = feed(model, jnp.asarray([TEXT[:1]], jnp.int32), start, source)
    fed = jnp.asarray([[TEXT[1], *DRAFTED]], jnp.int32)
    parents = jnp.asarray([TREE], jnp.int32)
    expected = np.stack([chain_logits(model, [*TEXT, *path_to(n)]) for n in range(6)])
    logits, _ = feed(model, fed, start, source, parents)
    np.testing.assert_array_equal(logits[0], expected)

    found, cache = [], start
    for first, last in ((0, 1), (1, 3), (3, 6)):
        logits, cache = feed(model, fed[:, first:last], cache, source, parents, first)
        found.append(logits[0])
    np.testing.assert_array_equal(np.concatenate(found), expected)

    # The path to node 5 made contiguous: what follows it is what follows its text.
    kept = model.keep(cache, cache.length - 6, jnp.asarray([[2, 5]], jnp.int32))
    kept = kept.replace(length=jnp.asarray([4], jnp.int32))
    logits, _ = feed(model, jnp.asarray([[1]], jnp.int32), kept, source)
    text = [*TEXT, *path_to(5), 1]
    np.testing.assert_array_equal(logits[0, 0], chain_logits(model, text))
    assert (logits[0, 0] != chain_logits(model, [*TEXT, *path_to(4), 1])).any()


def test_the_first_source_token_picks_the_table():
    models = [table_model(seed, 4, 2) for seed in range(3)]
    both = stacked(models)
    for number, model in enumerate(models):
        for tokens in ([0], [0, 3], [0, 1, 2]):
            np.testing.assert_array_equal(
                chain_logits(both, tokens, source=number), chain_logits(model, tokens)
            )
    # A model of one table has it whatever the source.
    np.testing.assert_array_equal(
        chain_logits(models[1], [0, 3], source=3), chain_logits(models[1], [0, 3])
    )


def test_a_tree_of_fewer_nodes_than_gamma():
    """Two children, and room for four levels: the law is the target's all the same."""
    target = table_model(0, 4, 2)
    draft = table_model(1, 4, 2, like=target, mix=0.5)
    inputs = jnp.zeros((20_000, 1), jnp.int32)
    output = speculative_generate(
        target,
        TreeDrafter(draft, (-1, 0, 0)),
        inputs,
        inputs == 0,
        row_keys(0, 20_000),
        verifier=recursive_distinct_verify,
        sampling=Sampling(),
        gamma=4,
        max_length=4,
        eos_id=-1,
    )
    assert chi_square_p(output.tokens[:, 1:], joint_law(target, 3)) > 1e-3
    assert output.stats.accepted[:, 0].sum() > 0 == output.stats.accepted[:, 1:].sum()
