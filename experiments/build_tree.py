"""From settings to a tree of drafts: its shape, and what it does not go with."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from experiments import build, build_drafter
from specjax import errors, trees
from specjax.drafters.tree import TreeDrafter
from specjax.types import SIBLINGS
from specjax.verify import Verifier

AUTO = "auto"  # the tree is picked by measurement: `experiments.picking`
_NODES = 16  # of such a tree, where nothing else is asked


@dataclasses.dataclass(frozen=True)
class Tree:
    """The shape of a tree of drafts, and how it is filled.

    Attributes:
        parents: of each node, -1 at the root; see `specjax.trees`.
        siblings: how the children of a node are drawn, one of `types.SIBLINGS`.
    """

    parents: tuple[int, ...]
    siblings: str

    @property
    def depth(self) -> int:
        """Tokens on the longest path: gamma."""
        return trees.depth(self.parents)


def siblings_to_pick(config: ml_collections.ConfigDict, verifier: Verifier) -> str:
    """How the siblings are drawn of a tree that is yet to be picked.

    Raises:
        InputError: a gamma, which the tree decides, no node to pick, or what
            `build_siblings` refuses.
    """
    if config.gamma is not None:
        raise errors.InputError(
            f"config.gamma is {config.gamma!r} and config.tree {AUTO!r}: a tree's "
            "gamma is its depth; leave config.gamma out"
        )
    nodes_to_pick(config)
    return build_siblings(config, verifier)


def nodes_to_pick(config: ml_collections.ConfigDict) -> int:
    """The most nodes of a tree that is yet to be picked, its root not counted.

    Raises:
        InputError: below 1.
    """
    if config.tree_nodes is None:
        return _NODES
    build.positive(config, "tree_nodes")
    return int(config.tree_nodes)


def build_tree(config: ml_collections.ConfigDict, verifier: Verifier) -> Tree | None:
    """The tree that is drafted; None: a chain, or one that is yet to be picked.

    Raises:
        InputError: no tree, one of more nodes than the decode has tokens, or what
            `build_siblings` refuses; a number of nodes where none is picked.
    """
    if config.tree == AUTO:
        return None
    if config.tree_nodes is not None:
        raise errors.InputError(
            f"config.tree_nodes is {config.tree_nodes} and config.tree is not "
            f"{AUTO!r}: it bounds the tree that is picked; leave it out"
        )
    parents = _parents(config.tree)
    if parents is None:
        if config.siblings:
            raise errors.InputError(
                f"config.siblings is {config.siblings!r} and config.tree is empty: a "
                "chain has no siblings; leave it out"
            )
        return None
    tree = Tree(parents, build_siblings(config, verifier))
    try:
        trees.check_parents(parents)
        TreeDrafter(None, parents, tree.siblings).nodes(tree.depth)
    except errors.InputError as error:
        raise errors.InputError(f"config.tree: {error}") from error
    if len(parents) > config.max_length:
        raise errors.InputError(
            f"config.tree has {len(parents)} nodes, its root included, and "
            f"config.max_length is {config.max_length}: a tree must fit into the buffer"
        )
    return tree


def build_siblings(config: ml_collections.ConfigDict, verifier: Verifier) -> str:
    """How the children of a tree's node are drawn, whatever the tree.

    Raises:
        InputError: a drafter or a verifier of chains, siblings that the verifier is not
            exact for, or a sampling of drafts that are not drawn.
    """
    siblings = config.siblings
    if config.drafter not in build_drafter.MODELS:
        raise errors.InputError(
            f"config.tree is set and the drafter {config.drafter!r} drafts chains: "
            "leave the tree out, or --config.drafter=model"
        )
    if not verifier.trees:
        able = ", ".join(name for name, own in build.VERIFIERS.items() if own.trees)
        raise errors.InputError(
            f"config.tree is set and the verifier {config.verifier!r} judges chains: "
            f"leave the tree out, or set config.verifier to one of {able}"
        )
    drawn = [name for name, own in config.draft_sampling.items() if own is not None]
    if siblings == "chosen" and drawn:
        raise errors.InputError(
            f"config.draft_sampling.{drawn[0]} is set and config.siblings is 'chosen': "
            "the most probable tokens are not drawn; leave it out"
        )
    if not siblings:
        return verifier.usual_siblings
    exact = SIBLINGS if verifier.siblings is None else verifier.siblings
    if siblings not in exact:
        raise errors.InputError(
            f"config.siblings is {siblings!r}: the verifier {config.verifier!r} is "
            f"exact for {' or '.join(exact)}"
        )
    return siblings


def _parents(value: Any) -> tuple[int, ...] | None:
    """The numbers of ``config.tree``, or None where it is empty."""
    if value is None or value == "" or value == ():
        return None
    numbers = value.split(",") if isinstance(value, str) else value
    try:
        if any(isinstance(own, bool | float) for own in numbers):
            raise ValueError
        return tuple(int(own) for own in numbers)
    except (TypeError, ValueError) as error:
        raise errors.InputError(
            f"config.tree is {value!r}: it must be the parent of each node, root "
            "first, such as -1,0,0,1,1,2, or auto, or empty: a chain"
        ) from error


def with_tree(pair: build.Pair, tree: Tree) -> build.Pair:
    """The pair with a draft model that drafts a tree instead of a chain.

    Raises:
        InputError: a node has more children than there are tokens.
    """
    known = pair.num_tokens or pair.target.vocab_size
    widest = max(tree.parents.count(node) for node in set(tree.parents))
    if widest > known:
        raise errors.InputError(
            f"config.tree has a node of {widest} children and the vocabulary {known} "
            "tokens: siblings are different tokens"
        )
    drafter = TreeDrafter(pair.drafting_model, tree.parents, tree.siblings)
    return dataclasses.replace(pair, drafter=drafter)
