"""A model's tree of drafts: its shape, its laws, its memory, what it leaves alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    Sampling,
    autoregressive_generate,
    speculative_generate,
    token_verify,
    verify,
)
from specjax.drafters.tree import TreeDrafter
from specjax.errors import InputError
from specjax.types import Noise
from tests.helpers import (
    perturbed,
    quick_compile,  # noqa: F401
    ragged_sources,
    row_keys,
    tiny_t5,
)

ROWS, LENGTH, GAMMA = 5, 20, 3
TREE = (-1, 0, 0, 0, 1, 1, 2, 4)
PATHS = (-1, 0, 0, 0, 1, 2, 3)
WARM = Sampling(temperature=0.7)
GREEDY = Sampling(temperature=None)
VERIFIERS = {
    "coupled": (verify.coupled_verify, TREE, "distinct"),
    "coupled, chosen": (verify.coupled_verify, TREE, "chosen"),
    "exact match": (verify.exact_match_verify, TREE, "chosen"),
    "recursive": (verify.recursive_verify, TREE, "independent"),
    "recursive, distinct": (verify.recursive_distinct_verify, TREE, "distinct"),
    "k-seq": (verify.kseq_verify, TREE, "independent"),
    "best path": (verify.best_path_verify, PATHS, "paths"),
    "traversal": (verify.traversal_verify, TREE, "distinct"),
}


@pytest.fixture(scope="module")
def target():
    return tiny_t5(0)


@pytest.fixture(scope="module")
def draft(target):
    return perturbed(target, 1, 0.1)


def decode(target, drafter, verifier, sampling=WARM, rows=slice(None)):
    inputs, mask = ragged_sources(2, ROWS, 9)
    return speculative_generate(
        target,
        drafter,
        inputs[rows],
        mask[rows],
        row_keys(8, ROWS)[rows],
        verifier=verifier,
        sampling=sampling,
        gamma=GAMMA,
        max_length=LENGTH,
        eos_id=3,
    )


def plain(target, sampling):
    sources = ragged_sources(2, ROWS, 9)
    return autoregressive_generate(
        target,
        *sources,
        row_keys(8, ROWS),
        sampling=sampling,
        max_length=LENGTH,
        eos_id=3,
    )


SLOW = pytest.mark.slow


@SLOW
@pytest.mark.parametrize("siblings", ["distinct", "chosen"])
def test_coupled_decoding_writes_the_autoregressive_sample(target, draft, siblings):
    """Token for token, at a temperature, with a draft that often errs."""
    output = decode(target, TreeDrafter(draft, TREE, siblings), verify.coupled_verify)
    expected = plain(target, WARM)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    np.testing.assert_array_equal(output.length, expected.length)
    assert 0 < output.stats.accepted.sum() < output.stats.drafted.sum()
    # Another rule writes another sample.
    other = decode(
        target, TreeDrafter(draft, TREE, siblings), verify.exact_match_verify
    )
    assert (other.tokens != expected.tokens).any()


@pytest.mark.slow
@pytest.mark.parametrize("siblings", ["independent", "distinct", "chosen"])
def test_greedy_decoding_writes_the_greedy_text(target, draft, siblings):
    drafter = TreeDrafter(draft, TREE, siblings)
    output = decode(target, drafter, token_verify, GREEDY)
    expected = plain(target, GREEDY)
    np.testing.assert_array_equal(output.tokens, expected.tokens)
    calls, chain = output.stats.target_calls, expected.stats.target_calls
    assert (calls < chain).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["coupled", "recursive", "recursive, distinct", "k-seq", "traversal"]
)
def test_a_draft_like_the_target_always_stands(target, name):
    """The first child does, and with it the first child's first child."""
    verifier, tree, siblings = VERIFIERS[name]
    output = decode(target, TreeDrafter(target, tree, siblings), verifier)
    np.testing.assert_array_equal(output.stats.accepted, output.stats.drafted)
    assert (output.stats.drafted > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", VERIFIERS)
def test_a_row_decodes_alike_alone(target, draft, name):
    verifier, tree, siblings = VERIFIERS[name]
    drafter = TreeDrafter(draft, tree, siblings)
    together = decode(target, drafter, verifier)
    for row in (1, 3):
        alone = decode(target, drafter, verifier, rows=slice(row, row + 1))
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])


def test_tokens_follow_the_laws_that_the_block_reports(target, draft):
    """One draft for many keys: children of the root, drawn without replacement."""
    drafter = TreeDrafter(draft, (-1, 0, 0, 1), "distinct")
    inputs, mask = (own[:1] for own in ragged_sources(2, ROWS, 9))
    many = 3000
    inputs, mask = jnp.tile(inputs, (many, 1)), jnp.tile(mask, (many, 1))
    tokens = jnp.zeros((many, 12), jnp.int32)
    length = jnp.ones(many, jnp.int32)
    sharp = Sampling(temperature=1.0, top_k=4)

    @jax.jit
    def once(draft, keys):
        drafter = TreeDrafter(draft, (-1, 0, 0, 1), "distinct")
        encoded = draft.encode(inputs, mask)
        state = drafter.init(draft, encoded, inputs, mask, tokens[:, :1], length, 12)
        noise = Noise(keys=keys, start=jnp.zeros(many, jnp.int32))
        block, _ = drafter.draft(
            draft, noise, state, tokens, length, gamma=2, sampling=sharp
        )
        return block

    assert drafter.nodes(2) == 3
    block = once(draft, row_keys(0, many))
    law = np.asarray(block.law.probs[0, 0])
    first, second = np.asarray(block.tokens[:, 0]), np.asarray(block.tokens[:, 1])
    assert (first != second).all()
    expected = np.zeros_like(law)
    for token, drawn in enumerate(law):
        if drawn:
            rest = np.where(np.arange(len(law)) == token, 0.0, law)
            expected += drawn * rest / rest.sum()
    for found, wanted in ((first, law), (second, expected)):
        share = np.bincount(found, minlength=len(law)) / many
        np.testing.assert_allclose(share, wanted, atol=4 * (0.25 / many) ** 0.5)
    # The grandchild follows its own parent's law, which differs from row to row.
    below = np.asarray(block.law.probs[:, 1])
    assert (below[np.arange(many), np.asarray(block.tokens[:, 2])] > 0).all()
    assert np.abs(below - below[:1]).max() > 0.1


BAD_TREES = {
    (-1, 0, 3, 0): r"parents\[2\] is 3: a node stands below one of those before it",
    (-1, 0, -1): r"parents\[2\] is -1",
    (0, 0): "node 0 is the root",
    (-1,): "at least one node stands below it",
    (-1, 0, 1, 0): r"parents\[3\] is 0, after 1: nodes are numbered level by level",
    (-1, 0, 1, 2, 3): "the tree is 4 deep and gamma 3",
}


@pytest.mark.parametrize("tree", BAD_TREES)
def test_what_is_no_tree(target, draft, tree):
    with pytest.raises(InputError, match=BAD_TREES[tree]):
        decode(target, TreeDrafter(draft, tree), verify.traversal_verify)


MISFITS = {
    "independent": (verify.traversal_verify, "independent' and .*exact for distinct"),
    "distinct": (
        verify.kseq_verify,
        "'distinct' and .* is exact for independent or pa",
    ),
    "chosen": (verify.recursive_distinct_verify, "reads the draft's law and"),
    "paths": (
        verify.coupled_verify,
        "'paths' and the verifier match_rule is exact for",
    ),
    "any": (verify.coupled_verify, "has siblings='any' and the verifier match_rule"),
}


@pytest.mark.parametrize("siblings", MISFITS)
def test_what_a_rule_is_not_exact_for(target, draft, siblings):
    verifier, message = MISFITS[siblings]
    with pytest.raises(InputError, match=message):
        decode(target, TreeDrafter(draft, PATHS, siblings), verifier)
    if siblings == "paths":
        with pytest.raises(InputError, match="branches below its root"):
            decode(target, TreeDrafter(draft, TREE, "paths"), verify.best_path_verify)
