"""Picks a tree of drafts for one pair, from acceptance and costs that it measures."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import baseline
from specjax import errors, metrics, tree_picker
from specjax.data import batches
from specjax.drafters.tree import TreeDrafter
from specjax.models.base import Cache, Encoded, encode_draft
from specjax.models.t5 import T5
from specjax.sampling import Sampling
from specjax.verify import Verifier, recursive_distinct_verify, recursive_verify

# Of the tree that acceptance is measured with. Lower ranks stand less than once in a
# hundred rounds where a draft is any good.
_RANKS = 5
_DEPTH = 4
# Of a picked tree: each level is a pass of the draft, and compiled apart.
_DEEPEST = 16
# A pass is timed over so many tokens.
_FED = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_PASSES = 4096  # of one timing
# Rejection by node: what a rank accepts does not depend on the ranks after it, so that
# one wide tree tells of all narrower ones. Under rules that look at all siblings, or at
# whole paths, it does; they are taken to like the same trees.
_BY_NODE = {
    "independent": recursive_verify,
    "paths": recursive_verify,
    "distinct": recursive_distinct_verify,
}


def pick_for_pair(
    target: T5,
    draft_model: T5,
    parts: Sequence[batches.InferenceBatch],
    keys: jax.Array,
    *,
    verifier: Verifier,
    siblings: str,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    max_length: int,
    nodes: int,
    seconds: float = 0.1,
) -> tree_picker.Picked:
    """Picks the tree of greatest predicted speedup for these texts on this machine.

    Args:
        target: the target model.
        draft_model: the draft; it may share the target's encoder.
        parts: the texts' batches, all of them decoded once, with a wide tree.
        keys: one key per row of the texts.
        verifier: a rule of trees; greedily any lossless rule.
        siblings: how the tree's are drawn, one of `types.SIBLINGS`.
        sampling: of the target.
        draft_sampling: of the draft; None: the target's.
        max_length: decoder tokens, start token included.
        nodes: the greatest number of nodes, the root not counted.
        seconds: least length of each timing.

    Raises:
        InputError: nodes below 1, or a rule that judges chains.
    """
    if nodes < 1:
        raise errors.InputError(f"nodes is {nodes}: a tree needs at least 1")
    if not (verifier.trees or sampling.greedy):
        raise errors.InputError(
            f"the verifier {verifier.rule.__name__} judges chains: no tree is to be "
            "picked for it"
        )
    rule, drawn = measured_by(verifier, sampling, siblings)
    table = measure_acceptance(
        target,
        draft_model,
        parts,
        keys,
        verifier=rule,
        siblings=drawn,
        sampling=sampling,
        draft_sampling=draft_sampling,
        max_length=max_length,
        nodes=nodes,
    )
    verify, draft = pass_costs(
        target, draft_model, parts[0], nodes, max_length, seconds
    )
    return fastest(for_siblings(table, siblings), nodes, verify, draft)


def fastest(
    table: np.ndarray, nodes: int, verify: tree_picker.Cost, draft: tree_picker.Cost
) -> tree_picker.Picked:
    """`tree_picker.pick_tree`, to a depth that a program can have."""
    depth = min(nodes, _DEEPEST)
    return tree_picker.pick_tree(table, nodes, draft=draft, verify=verify, depth=depth)


def measure_acceptance(
    target: T5,
    draft_model: T5,
    parts: Sequence[batches.InferenceBatch],
    keys: jax.Array,
    *,
    verifier: Verifier,
    siblings: str,
    sampling: Sampling,
    draft_sampling: Sampling | None = None,
    max_length: int,
    nodes: int,
) -> np.ndarray:
    """Acceptance by rank, of the first level and of all deeper ones.

    Args: those of `pick_for_pair`; verifier and siblings those of `measured_by`.
    """
    ranks, depth = min(_RANKS, nodes), min(_DEPTH, nodes)
    drafter = TreeDrafter(draft_model, tree_picker.wide_tree(ranks, depth), siblings)
    outputs = [
        baseline.speculate(
            target,
            drafter,
            part,
            keys,
            verifier=verifier,
            sampling=sampling,
            draft_sampling=draft_sampling,
            gamma=depth,
            max_length=max_length,
            trace=True,
        )
        for part in parts
    ]
    # A round starts where the one before it failed: the first depth is the hardest.
    return tree_picker.rank_acceptance(outputs, target.config.eos_id, depths=2)


def measured_by(
    verifier: Verifier, sampling: Sampling, siblings: str
) -> tuple[Verifier, str]:
    """The rule, and the way to draw siblings, whose acceptance stands for these.

    The tree that measures branches at every level, as paths do not.
    """
    if sampling.greedy:
        # Nothing is drawn, and all lossless rules are one.
        return verifier, "distinct"
    drawn = "independent" if siblings == "paths" else siblings
    return (_BY_NODE[siblings] if verifier.needs_law else verifier), drawn


def for_siblings(table: np.ndarray, siblings: str) -> np.ndarray:
    """The table of `measure_acceptance` for trees of such siblings.

    Paths part at the root alone: below it there is no second child.
    """
    if siblings != "paths":
        return table
    return np.concatenate(
        [table[:1], np.where(np.arange(table.shape[1]), 0, table[1:])]
    )


def pass_costs(
    target: T5,
    draft_model: T5,
    part: batches.InferenceBatch,
    nodes: int,
    max_length: int,
    seconds: float = 0.1,
    repeats: int = 5,
) -> tuple[dict[int, float], dict[int, float]]:
    """What passes of both models over trees cost, in target steps, by tokens fed.

    The decoder alone: neither laws nor a verdict.

    Args:
        target: the target model.
        draft_model: the draft.
        part: a batch of the usual shape.
        nodes: of the greatest tree, the root not counted.
        max_length: decoder tokens; attention reads all of them.
        seconds: least length of each timing.
        repeats: timings of each, taken in turn.

    Returns:
        Costs of the target's passes and of the draft's.
    """
    fed = [count for count in _FED if count <= nodes] + [nodes + 1]
    inputs, mask = jnp.asarray(part.inputs), jnp.asarray(part.mask)
    encoded = jax.jit(lambda model: model.encode(inputs, mask))(target)
    own = jax.jit(lambda model: encode_draft(model, encoded, inputs, mask))(draft_model)
    sides = {"target": (target, encoded), "draft": (draft_model, own)}
    calls, steps = {}, {}
    for side, arguments in sides.items():
        for count in fed:
            call = functools.partial(
                run_passes, *arguments, fed=count, size=max_length + nodes + 1
            )
            steps[side, count] = metrics.enough_steps(call, seconds, MOST_PASSES)
            calls[f"{side} {count}"] = functools.partial(call, steps[side, count])
            calls[f"{side} {count}, none"] = functools.partial(call, 0)
    timings = metrics.time_calls(calls, repeats=repeats)

    def each(side: str, count: int) -> metrics.Timing:
        name = f"{side} {count}"
        whole, none = timings[name], timings[f"{name}, none"]
        return metrics.per_step(whole, none, steps[side, count])

    step = each("target", 1)
    verify, draft = (
        {count: metrics.time_ratio(each(side, count), step) for count in fed}
        for side in sides
    )
    return verify, draft


@functools.partial(jax.jit, static_argnames=("fed", "size"))
def run_passes(model: T5, encoded: Encoded, passes: Any, *, fed: int, size: int) -> Any:
    """So many passes over the same slots; one token is a step, several are a tree."""
    batch = encoded.mask.shape[0]
    cache = model.init_cache(batch, size)
    one = jnp.ones(batch, jnp.int32)
    chain = jnp.tile(jnp.arange(-1, fed - 1, dtype=jnp.int32)[None], (batch, 1))

    def step(_: Any, carry: tuple[jax.Array, Cache]) -> tuple[jax.Array, Cache]:
        tokens, cache = carry
        tree = None if fed == 1 else chain
        output, kept = model.decode(
            tokens, cache.replace(length=one), encoded, parents=tree
        )
        assert kept is not None  # only teacher forcing keeps nothing
        # All logits are read, and the next pass waits for them.
        high = jnp.max(output.logits, axis=-1) > 0
        return (tokens + 1 + high.astype(jnp.int32)) % model.vocab_size, kept

    tokens = jnp.zeros((batch, fed), jnp.int32)
    return jax.lax.fori_loop(0, passes, step, (tokens, cache))
