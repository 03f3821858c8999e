"""What every rule of the commands promises, on random blocks: chains or trees."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import build
from specjax import verify
from specjax.types import SIBLINGS, DraftBlock, Law, Noise
from specjax.verify import Scored, Verifier
from tests.helpers import quick_compile, row_keys  # noqa: F401

ROWS, VOCAB, NODES = 280, 7, 6
CHAIN = (-1, 0, 1, 2, 3, 4, 5)
# Node 0 has three children, of which the first has two, and one of these has one.
TREE = (-1, 0, 0, 0, 1, 1, 4)
PATHS = (-1, 0, 0, 1, 2, 3, 4)
NAMES = list(build.VERIFIERS)


def shapes(verifier: Verifier) -> np.ndarray:
    """Parents of each row's nodes: every other row is a chain, or all are."""
    tree = PATHS if verifier.siblings == ("paths",) else TREE
    return np.array([tree if verifier.trees else CHAIN, CHAIN] * (ROWS // 2), np.int32)


def drafts_for(verifier: Verifier) -> tuple[DraftBlock, jax.Array]:
    """Random drafts of every length, and the target's laws, with impossible tokens."""
    generator = np.random.default_rng(0)
    q = generator.dirichlet(0.3 * np.ones(VOCAB), (ROWS, NODES + 1))
    p = 0.4 * q + 0.6 * generator.dirichlet(0.3 * np.ones(VOCAB), q.shape[:2])
    p *= generator.random(p.shape) > 0.1
    p[..., 0] += 1e-3
    parents = shapes(verifier)
    tokens = np.zeros((ROWS, NODES), np.int32)
    for row, node in np.ndindex(ROWS, NODES):
        children = np.flatnonzero(parents[row] == node) - 1
        tokens[row, children] = generator.choice(
            VOCAB, len(children), replace=False, p=q[row, node]
        )
    block = DraftBlock(
        tokens=jnp.asarray(tokens),
        length=jnp.arange(ROWS, dtype=jnp.int32) // 2 % (NODES + 1),
        law=Law(probs=jnp.asarray(q[:, :NODES], jnp.float32))
        if verifier.needs_law
        else None,
        parents=jnp.asarray(parents) if verifier.trees else None,
    )
    return block, jnp.asarray(p / p.sum(-1, keepdims=True), jnp.float32)


@jax.jit
def judge_all(verifier, keys, block, p):
    """Verdicts on all rows."""

    def one(keys, block, p):
        noise = Noise(keys=keys, start=jnp.int32(0), by=verifier.noise)
        logits = jnp.log(jnp.maximum(p, 1e-30))
        scored = Scored(law=Law(probs=p), logits=logits)
        return verifier.rule(noise, block, scored, verifier.params)

    return jax.vmap(one)(keys, block, p)


def judge(verifier, drafts, order=slice(None)):
    """Verdicts as numpy arrays, of rows in another order."""
    keys = row_keys(3, ROWS)[order]
    block, p = jax.tree.map(lambda x: x[order], drafts)
    return jax.tree.map(np.asarray, judge_all(verifier, keys, block, p))


def walked(verdict, row: int) -> list[int]:
    """The nodes that stand, from the top down."""
    count = int(verdict.num_accepted[row])
    if verdict.path is None:
        return list(range(1, count + 1))
    return verdict.path[row][:count].tolist()


@pytest.mark.parametrize("name", NAMES)
def test_record(name):
    verifier = build.VERIFIERS[name]
    assert isinstance(verifier, Verifier)
    rule = verifier.rule
    assert getattr(sys.modules[rule.__module__], rule.__name__) is rule, "not one thing"
    # A program is looked up by all but the numbers.
    hash(jax.tree.structure(verifier))
    assert all(np.ndim(leaf) == 0 for leaf in jax.tree.leaves(verifier))
    assert verifier.noise in ("step", "position")
    assert set(verifier.siblings or ()) <= set(SIBLINGS)
    assert verifier.lossless == (name not in build.TUNED)


def test_every_rule_has_a_name():
    rules = {own.rule for own in build.VERIFIERS.values()}
    assert rules == {
        getattr(verify, name)
        for name in verify.__all__
        if name.endswith("_rule") and name != "greedy_rule"
    }


@pytest.mark.parametrize("name", NAMES)
def test_verdicts_are_possible(name):
    """In range, on a path from the root, of tokens that the target may write."""
    verifier = build.VERIFIERS[name]
    before = judge_all._cache_size()
    drafts = drafts_for(verifier)
    verdict = judge(verifier, drafts)
    # Rows are judged each by itself.
    order = np.random.default_rng(1).permutation(ROWS)
    moved = judge(verifier, drafts, order)
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[order], y), verdict, moved
    )
    assert judge_all._cache_size() == before + 1
    assert (verdict.path is not None) == verifier.trees
    tokens, lengths, p = map(
        np.asarray, (drafts[0].tokens, drafts[0].length, drafts[1])
    )
    seen = [set(), set()]
    for row, parents in enumerate(shapes(verifier)):
        at, path = 0, walked(verdict, row)
        for node in path:
            assert 1 <= node <= lengths[row] and parents[node] == at
            assert p[row, at, tokens[row, node - 1]] > 0
            at = node
        assert 0 <= verdict.next_token[row] < VOCAB
        assert p[row, at, verdict.next_token[row]] > 0
        seen[row % 2].add(len(path))
    assert {0, 1, 2} <= seen[0] & seen[1], "nothing is shown"


@pytest.mark.parametrize("name", [n for n in NAMES if n not in build.TUNED])
def test_a_target_that_is_sure_is_followed(name):
    """Its own token where it was drafted, as in greedy decoding, and as the next."""
    verifier = build.VERIFIERS[name]
    generator = np.random.default_rng(2)
    block, _ = drafts_for(verifier)
    tokens, lengths = np.asarray(block.tokens), np.asarray(block.length)
    sure = generator.integers(VOCAB, size=(ROWS, NODES + 1))
    for row, parents in enumerate(shapes(verifier)):
        for node in set(parents[1:]):  # often what a child holds
            if generator.random() < 0.8:
                child = generator.choice(np.flatnonzero(parents == node))
                sure[row, node] = tokens[row, child - 1]
    verdict = judge(verifier, (block, jax.nn.one_hot(jnp.asarray(sure), VOCAB)))
    for row, parents in enumerate(shapes(verifier)):
        at, path = 0, []
        for node in range(1, lengths[row] + 1):
            if parents[node] == at and tokens[row, node - 1] == sure[row, at]:
                path.append(node)
                at = node
        assert walked(verdict, row) == path
        assert verdict.next_token[row] == sure[row, at]


@pytest.mark.parametrize("name", build.TUNED)
def test_other_settings_need_no_other_program(name):
    make, settings = build.TUNED[name]
    drafts = drafts_for(build.VERIFIERS[name])
    usual = judge(build.VERIFIERS[name], drafts)
    before = judge_all._cache_size()
    other = judge(make(**{key: own / 10 for key, own in settings.items()}), drafts)
    assert judge_all._cache_size() == before
    # A tenth of each is laxer.
    assert other.num_accepted.sum() > usual.num_accepted.sum()
