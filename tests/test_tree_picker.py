"""Picked trees are the best of all trees, and acceptance is counted as by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specjax import trees
from specjax.decode_state import DecodeOutput, Stats, Trace
from specjax.errors import InputError
from specjax.tree_picker import (
    best_tree,
    expected_tokens,
    pick_tree,
    rank_acceptance,
    round_cost,
    wide_tree,
)

FALLING = np.array([0.5, 0.2, 0.1])
# Later ranks that stand more often need earlier ones beside them, worth little.
RISING = np.array([0.05, 0.5, 0.3])
BY_DEPTH = np.array([[0.4, 0.3, 0.2], [0.8, 0.1, 0.0], [0.3, 0.3, 0.3]])


def all_trees(nodes: int, ranks: int, depth: int) -> list[tuple[int, ...]]:
    """Every tree of 1 to `nodes` nodes, by trying all lists of parents."""
    found = []
    for count in range(1, nodes + 1):
        for below in itertools.product(range(count), repeat=count):
            parents = (-1, *below)
            if list(below) != sorted(below) or any(
                parent >= node for node, parent in enumerate(parents)
            ):
                continue
            widest = max(parents.count(node) for node in range(count))
            if widest <= ranks and len(trees.levels(parents)) - 1 <= depth:
                found.append(parents)
    return found


def tokens_by_hand(parents, table, node=0, depth=0) -> float:
    """1, and for each child its chance times its own."""
    row = table if table.ndim == 1 else table[min(depth, len(table) - 1)]
    children = [child for child, parent in enumerate(parents) if parent == node]
    return 1 + sum(
        row[rank] * tokens_by_hand(parents, table, child, depth + 1)
        for rank, child in enumerate(children)
    )


@pytest.mark.parametrize("table", [FALLING, RISING, BY_DEPTH], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_no_tree_is_better(table, depth):
    """Of all trees, by number of nodes, and of greatest speedup."""
    known = all_trees(6, 3, depth)
    tokens = {parents: tokens_by_hand(parents, table) for parents in known}
    for nodes in range(1, 7):
        found = best_tree(table, nodes, depth)
        trees.check_parents(found)
        most = max(own for parents, own in tokens.items() if len(parents) <= nodes + 1)
        assert tokens[found] == pytest.approx(most)
        assert expected_tokens(found, table) == pytest.approx(most)
    verify = {1: 1.0, 3: 1.1, 7: 2.0}
    picked = pick_tree(table, 6, draft=0.1, verify=verify, depth=depth)
    speedups = {
        parents: own
        / (
            0.1 * (len(trees.levels(parents)) - 1)
            + np.interp(len(parents), [1, 3, 7], [1.0, 1.1, 2.0])
        )
        for parents, own in tokens.items()
    }
    assert picked.predicted_speedup == pytest.approx(max(speedups.values()))
    assert speedups[picked.parents] == pytest.approx(picked.predicted_speedup)
    assert picked.expected_tokens == pytest.approx(tokens[picked.parents])


def test_first_children_alone_make_a_chain():
    assert best_tree(np.array([0.7, 0.0, 0.0]), 5) == (-1, 0, 1, 2, 3, 4)
    # And where the first never stands, none is drafted below it.
    assert best_tree(np.array([0.0, 0.5]), 3, 1) == (-1, 0, 0)
    assert best_tree(np.zeros(3), 4) == (-1, 0)


def test_more_nodes_never_harm():
    tokens = [expected_tokens(best_tree(FALLING, n), FALLING) for n in range(1, 20)]
    assert all(more > less for less, more in itertools.pairwise(tokens))
    assert tokens[0] == 1.5
    deeper = [expected_tokens(best_tree(FALLING, 12, d), FALLING) for d in range(1, 12)]
    assert deeper == sorted(deeper) and deeper[0] == pytest.approx(1.8)


def test_costs_shape_the_tree():
    """Dear passes of the draft make it flat, dear verification makes it small."""
    deep = pick_tree(FALLING, 12, draft=0.01, verify=1.0).parents
    flat = pick_tree(FALLING, 12, draft=2.0, verify=1.0).parents
    small = pick_tree(FALLING, 12, draft=0.01, verify={1: 1.0, 13: 13.0}).parents
    assert len(trees.levels(deep)) > len(trees.levels(flat)) == 2
    assert len(deep) == 13 and len(small) == 2


def test_passes_are_paid_by_what_they_are_fed():
    """Two committed tokens, then the levels that have one below; the target: all."""
    parents, cost = (-1, 0, 0, 0, 1, 1, 4), {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    tokens = tokens_by_hand(parents, FALLING)
    whole = round_cost(parents, draft=cost, verify={1: 1.0, 7: 4.0})
    assert expected_tokens(parents, FALLING) / whole == pytest.approx(
        tokens / (0.2 + 0.3 + 0.2 + 4.0)
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_tree(np.array([1.2]), 3), "acceptance has 1.2: chances"),
        (lambda: best_tree(np.array([-0.1, 0.5]), 3), "acceptance has -0.1: chances"),
        (lambda: best_tree(np.array([np.nan]), 3), "acceptance has nan: chances"),
        (lambda: best_tree(np.array([0.7, 0.4]), 3), "acceptance sums to 1.1"),
        (lambda: best_tree(np.zeros(0), 3), "acceptance has shape"),
        (lambda: best_tree(FALLING, 0), "nodes is 0"),
        (lambda: best_tree(FALLING, 3, 0), "depth is 0"),
        (lambda: expected_tokens((-1, 0, 0, 0, 0), FALLING), "more than 3 children"),
        (lambda: expected_tokens((0, 0), FALLING), "parents is"),
        (
            lambda: pick_tree(FALLING, 4, draft=0.1, verify={1: 1.0, 4: 2.0}),
            "verify is known for 1 to 4 tokens",
        ),
        (lambda: pick_tree(FALLING, 4, draft=-0.1, verify=1.0), "draft is -0.1"),
        (lambda: pick_tree(FALLING, 4, draft=0, verify=0), "costs nothing"),
        (lambda: pick_tree(FALLING, 4, draft=0.1, verify={}), "verify is {}"),
    ],
)
def test_what_means_nothing_is_refused(call, message):
    with pytest.raises(InputError, match="^[^\n]*$") as caught:
        call()
    assert message in str(caught.value)


def traced(parents, rounds, tokens=None) -> DecodeOutput:
    """One row whose rounds accepted these paths; a call more that did not happen."""
    nodes, calls, gamma = len(parents) - 1, len(rounds) + 1, 3
    path = np.zeros((1, calls, gamma), np.int32)
    accepted = np.full((1, calls), gamma, np.int32)
    for call, own in enumerate(rounds):
        path[0, call, : len(own)] = own
        accepted[0, call] = len(own)
    ids = np.full((1, calls, nodes), 7, np.int32)
    if tokens is not None:
        ids[0, :-1] = tokens
    none = np.zeros((1, calls, nodes), np.float32)
    return DecodeOutput(
        tokens=np.zeros((1, 4), np.int32),
        length=np.ones(1, np.int32),
        stats=Stats(
            target_calls=np.array([len(rounds)], np.int32),
            emitted=np.zeros(1, np.int32),
            drafted=np.zeros((1, gamma), np.int32),
            accepted=np.zeros((1, gamma), np.int32),
        ),
        trace=Trace(
            tokens=ids,
            p=none,
            q=none,
            length=np.full((1, calls), nodes, np.int32),
            num_accepted=accepted,
            next_token=np.zeros((1, calls), np.int32),
            parents=np.tile(np.array(parents, np.int32), (1, calls, 1)),
            path=path,
        ),
    )


WIDE = (-1, 0, 0, 0, 1, 1, 1, 4, 4, 4)


def test_wide_tree():
    assert wide_tree(3, 3) == WIDE
    trees.check_parents(wide_tree(5, 6))
    assert wide_tree(1, 3) == (-1, 0, 1, 2)


def test_acceptance_counts_where_the_parent_stood():
    """Ten rounds; of depth 1 the first child's children are asked alone."""
    rounds = [(1, 4, 8)] * 3 + [(1, 5)] * 2 + [(1,)] + [(2,)] * 2 + [()] * 2
    table = rank_acceptance([traced(WIDE, rounds)], depths=3)
    # Depth 3 is offered in the first three rounds, and then its second child stands.
    expected = [[0.6, 0.2, 0.0], [3 / 6, 2 / 6, 0.0], [0.0, 1.0, 0.0]]
    assert table == pytest.approx(np.array(expected))
    pooled = rank_acceptance([traced(WIDE, rounds[:5]), traced(WIDE, rounds[5:])])
    # 10 + 6 + 3 nodes stood that have children.
    assert pooled == pytest.approx(np.array([[6 + 3, 2 + 2 + 3, 0]]) / 19)


def test_ranks_that_some_lack_make_no_row_of_more_than_one():
    """Node 1 has one child, which always stands; the root's second always does."""
    parents = (-1, 0, 0, 1)
    rounds = [(2,)] * 4 + [(1, 3)]
    table = rank_acceptance([traced(parents, rounds)])
    # Rank 0 was tried 5 + 1 times and stood twice; rank 1 stood 4 times of 4.
    assert table == pytest.approx(np.array([[2 / 6, 4 / 6]]))


def test_nothing_stands_below_the_end_of_the_text():
    tokens = np.full((1, 9), 7, np.int32)
    tokens[0, 0] = 1
    table = rank_acceptance([traced(WIDE, [(1, 4, 7)], tokens)], depths=3)
    assert table.tolist() == [[1.0, 0.0, 0.0], [0.0] * 3, [0.0] * 3]
    whole = rank_acceptance([traced(WIDE, [(1, 4, 7)], tokens)], 5, depths=3)
    assert whole.tolist() == [[1.0]] * 3


def test_deeper_rows_are_taken_together():
    rounds = [(1, 4, 8)] * 3 + [(1, 5)] * 2 + [(1,)] + [(2,)] * 2 + [()] * 2
    table = rank_acceptance([traced(WIDE, rounds)], depths=2)
    assert table == pytest.approx(np.array([[6, 2, 0], [3 / 0.9, 5 / 0.9, 0]]) / 10)
    with pytest.raises(InputError, match="depths is 0"):
        rank_acceptance([], depths=0)


def test_acceptance_needs_a_trace_of_trees():
    output = traced(WIDE, [()])
    for trace in (None, output.trace.replace(parents=None, path=None)):
        with pytest.raises(InputError, match="has no trace of trees"):
            rank_acceptance([output.replace(trace=trace)])
