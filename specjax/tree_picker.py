"""Which tree of drafts pays best: Sequoia's dynamic programme on measured acceptance.

Acceptance is a table: entry r of a row is the chance that of a node's children the
r-th, counted from 0 in the order in which they were drawn, is the one that stands,
given that the node stands. The first row is of the children of the last committed
token, the next of theirs, and so on; the last row holds at all greater depths. A node
then stands with the product of the entries on the path to it, and a round writes one
token more than nodes stand.

Chen et al. 2024, Sequoia (arXiv:2402.12374).
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from specjax import trees
from specjax.decode_state import DecodeOutput
from specjax.errors import InputError

Table = Float[np.ndarray, " R"] | Float[np.ndarray, "D R"]
# Of a pass, in target steps: always the same, or by the number of tokens it is fed,
# measured at some numbers and taken to be straight between them.
Cost = float | int | Mapping[int, float]

# Shares that were counted may sum to 1 and a rounding.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class Picked:
    """A tree and what it promises.

    Attributes:
        parents: of each node, -1 at the root (see `specjax.trees`).
        expected_tokens: per round, the corrected or bonus token included.
        predicted_speedup: over plain decoding; below 1 is slower.
    """

    parents: tuple[int, ...]
    expected_tokens: float
    predicted_speedup: float


def best_tree(
    acceptance: Table, nodes: int, depth: int | None = None
) -> tuple[int, ...]:
    """The tree of most `expected_tokens`.

    Args:
        acceptance: see the module.
        nodes: at most so many, the root not counted; those that would never stand are
            left out.
        depth: at most so deep; None: as `nodes` allows.

    Raises:
        InputError: a table that holds no chances, too few nodes or too little depth.
    """
    rows = _by_depth(acceptance, nodes, depth)
    return _unfold(_programme(rows, nodes), nodes)


def pick_tree(
    acceptance: Table,
    nodes: int,
    *,
    draft: Cost,
    verify: Cost,
    depth: int | None = None,
) -> Picked:
    """The tree of most `expected_tokens` per `round_cost`, of all sizes and depths.

    Args:
        acceptance: see the module.
        nodes: the greatest number of nodes, the root not counted.
        draft: cost of a pass of the draft.
        verify: cost of the target's pass over all nodes and the root.
        depth: the greatest depth; None: as `nodes` allows.

    Returns:
        The smallest of the best. A predicted speedup of 1 or less says that no tree
        beats plain decoding.

    Raises:
        InputError: as `best_tree`, and costs that do not reach as far as the trees.
    """
    rows = _by_depth(acceptance, nodes, depth)
    found: dict[tuple[int, ...], Picked] = {}
    for deepest in range(1, len(rows) + 1):
        choice = _programme(rows[:deepest], nodes)
        for count in range(1, nodes + 1):
            parents = _unfold(choice, count)
            if parents not in found:
                tokens = expected_tokens(parents, rows)
                cost = round_cost(parents, draft=draft, verify=verify)
                found[parents] = Picked(parents, tokens, tokens / cost)
    return max(
        found.values(), key=lambda own: (own.predicted_speedup, -len(own.parents))
    )


def expected_tokens(parents: tuple[int, ...], acceptance: Table) -> float:
    """Tokens per round of a tree, its root's own (corrected or bonus) included.

    Args:
        parents: of each node, -1 at the root.
        acceptance: see the module.

    Raises:
        InputError: no tree, a table that holds no chances, or a node of more children
            than it has ranks.
    """
    trees.check_parents(parents)
    levels = trees.levels(parents)
    rows = _by_depth(acceptance, len(parents) - 1, len(levels) - 1)
    stands = np.ones(len(parents))
    for depth, level in enumerate(levels[1:]):
        for node in level:
            rank = node - parents.index(parents[node])
            if rank >= rows.shape[1]:
                raise InputError(
                    f"node {parents[node]} has more than {rows.shape[1]} children, "
                    "and acceptance no chance for them"
                )
            stands[node] = stands[parents[node]] * rows[depth, rank]
    return float(stands.sum())


def round_cost(parents: tuple[int, ...], *, draft: Cost, verify: Cost) -> float:
    """What drafting and verifying a tree costs, in target steps.

    The draft makes a pass per level: over the last two committed tokens, then over each
    level that has one below it.

    Args:
        parents: of each node, -1 at the root.
        draft: cost of a pass of the draft.
        verify: cost of the target's pass over all nodes and the root.

    Raises:
        InputError: no tree, or costs that mean nothing or were not measured for so many
            tokens.
    """
    trees.check_parents(parents)
    fed = [2] + [len(level) for level in trees.levels(parents)[1:-1]]
    drafting = sum(_cost("draft", draft, count) for count in fed)
    whole = drafting + _cost("verify", verify, len(parents))
    if whole == 0:
        raise InputError("draft and verify are 0: a round that costs nothing")
    return whole


def wide_tree(ranks: int, depth: int) -> tuple[int, ...]:
    """A tree to measure `rank_acceptance` with: only first children have children.

    Args:
        ranks: children of a node.
        depth: levels below the root.
    """
    spine = [0] + [1 + ranks * level for level in range(depth - 1)]
    return (-1, *(node for node in spine for _ in range(ranks)))


def rank_acceptance(
    outputs: Sequence[DecodeOutput], eos_id: int = 1, *, depths: int = 1
) -> Float[np.ndarray, "D R"]:
    """Measures acceptance by rank from traces of decodes with a wide tree.

    A child counts where its parent stood and no earlier sibling did. Nothing stands
    below an accepted end of the text, as nothing is written there.

    Args:
        outputs: of decodes with trees and ``trace=True``.
        eos_id: ends a text.
        depths: rows of the table; the last takes all greater depths together.

    Returns:
        The table of the module. It is 0 for what was never tried.

    Raises:
        InputError: an output without a trace of trees, or depths below 1.
    """
    if depths < 1:
        raise InputError(f"depths is {depths}: a table has at least 1 row")
    stood: collections.Counter[tuple[int, int]] = collections.Counter()
    tried: collections.Counter[tuple[int, int]] = collections.Counter()
    for output in outputs:
        trace = output.trace
        if trace is None or trace.parents is None or trace.path is None:
            raise InputError(
                "an output has no trace of trees: decode with a TreeDrafter and "
                "trace=True"
            )
        calls = np.asarray(output.stats.target_calls)
        parents, tokens = np.asarray(trace.parents), np.asarray(trace.tokens)
        paths, accepted = np.asarray(trace.path), np.asarray(trace.num_accepted)
        lengths = np.asarray(trace.length)
        for row, call in ((r, c) for r, n in enumerate(calls) for c in range(n)):
            children = _children(tuple(parents[row, call].tolist()))
            path = paths[row, call, : accepted[row, call]].tolist()
            ends = tokens[row, call, np.array(path, int) - 1] == eos_id
            if ends.any():
                path = path[: 1 + int(np.argmax(ends))]
            steps = zip([0, *path], [*path, None], strict=True)
            for depth, (node, child) in enumerate(steps):
                for rank, other in enumerate(children.get(node, ())):
                    if other > lengths[row, call]:
                        break
                    place = min(depth, depths - 1), rank
                    tried[place] += 1
                    stood[place] += other == child
                    if other == child:
                        break
    ranks = 1 + max((rank for _, rank in tried), default=0)
    counts = np.zeros((2, depths, ranks))
    for place in tried:
        counts[(0, *place)], counts[(1, *place)] = stood[place], tried[place]
    # The chance of a rank whose turn has come, times that of its turn: such a row never
    # sums to more than 1, whatever was tried how often.
    chance = counts[0] / np.maximum(counts[1], 1)
    turn = np.cumprod(1 - chance, axis=-1)
    return chance * np.concatenate([np.ones_like(turn[..., :1]), turn[..., :-1]], -1)


@functools.lru_cache(maxsize=64)
def _children(parents: tuple[int, ...]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def _by_depth(acceptance: Table, nodes: int, depth: int | None) -> np.ndarray:
    """The table with a row for each depth that may be used, checked."""
    table = np.asarray(acceptance, float)
    if table.ndim not in (1, 2) or table.size == 0:
        raise InputError(
            f"acceptance has shape {table.shape}: a chance per rank, or a row of them "
            "per depth"
        )
    wrong = ~((table >= 0) & (table <= 1))  # NaN too
    if wrong.any():
        raise InputError(
            f"acceptance has {table[wrong][0]:g}: chances lie between 0 and 1"
        )
    sums = table.sum(axis=-1)
    if np.any(sums > 1 + _ROUNDING):
        raise InputError(
            f"acceptance sums to {sums.max():.4f} over ranks: one child stands at "
            "most, so the chances sum to 1 or less"
        )
    if nodes < 1:
        raise InputError(f"nodes is {nodes}: a tree needs at least 1 below its root")
    if depth is not None and depth < 1:
        raise InputError(f"depth is {depth}: a tree is at least 1 deep")
    deepest = min(depth or nodes, nodes)
    last = len(np.atleast_2d(table)) - 1
    return np.atleast_2d(table)[np.minimum(np.arange(deepest), last)]


def _programme(rows: np.ndarray, nodes: int) -> np.ndarray:
    """Sequoia's recursion over depth, rank and nodes.

    Returns:
        ``[d, r, m]``: m nodes are the children from rank r on of a node at depth d and
        all below these; so many of them make up child r and what is below it, 0 where
        there is to be none.
    """
    depth, ranks = rows.shape
    # The most accepted nodes that they give, where their parent stands and no earlier
    # child counts.
    best = np.zeros((depth + 1, ranks + 1, nodes + 1))
    choice = np.zeros(best.shape, int)
    for level in reversed(range(depth)):
        for rank in reversed(range(ranks)):
            for count in range(1, nodes + 1):
                below = best[level + 1, 0, :count]  # of 0 .. count - 1 nodes
                beside = best[level, rank + 1, count - 1 :: -1]
                worth = rows[level, rank] * (1 + below) + beside
                if worth.max() > 0:
                    best[level, rank, count] = worth.max()
                    choice[level, rank, count] = 1 + np.argmax(worth)
    return choice


def _unfold(choice: np.ndarray, nodes: int) -> tuple[int, ...]:
    """The tree behind the choices, numbered level by level."""
    parents = [-1]
    waiting = collections.deque([(0, 0, nodes)])
    while waiting:
        node, depth, left = waiting.popleft()
        rank = 0
        while own := int(choice[depth, rank, left]):
            waiting.append((len(parents), depth + 1, own - 1))
            parents.append(node)
            rank, left = rank + 1, left - own
    # Where nothing is ever accepted, one node is as good as any.
    return tuple(parents) if len(parents) > 1 else (-1, 0)


def _cost(name: str, cost: Cost, fed: int) -> float:
    """Of a pass that is fed so many tokens."""
    table = dict(cost) if isinstance(cost, Mapping) else {fed: cost}
    if not table or not all(0 <= value < np.inf for value in table.values()):
        raise InputError(f"{name} is {cost}: costs are numbers in target steps, from 0")
    counts = sorted(table)
    if not counts[0] <= fed <= counts[-1]:
        raise InputError(
            f"{name} is known for {counts[0]} to {counts[-1]} tokens, and a tree needs "
            f"a pass over {fed}: measure that too"
        )
    return float(np.interp(fed, counts, [table[count] for count in counts]))
