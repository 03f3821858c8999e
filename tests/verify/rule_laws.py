"""The joint law that a rule writes on drafted trees of tables, without any decoding."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import trees
from specjax.proof.tables import TableModel, joint_law
from specjax.sampling import draw, draw_distinct
from specjax.types import DraftBlock, Law, Noise
from specjax.verify import Scored, Verifier

TOKENS = 3  # whose joint law is looked at
HOW = ("independent", "distinct", "chosen")


def law_table(model: TableModel) -> jax.Array:
    """Probabilities by number of the prefix."""
    return jnp.exp(model.logits)


@functools.partial(
    jax.jit, static_argnames=("verifier_rule", "needs_law", "noise_by", "tree")
)
def _sample(
    keys, target, draft, params, how, *, verifier_rule, needs_law, noise_by, tree
):
    vocab_size, nodes = target.shape[1], len(tree) - 1
    parents = jnp.array(tree)
    depth = [len(_path(node, tree)) for node in range(nodes + 1)]

    def one(key):
        ours, theirs, rest = jax.random.split(key, 3)
        drafting = ours if noise_by == "step" else theirs
        noise = Noise(keys=drafting, start=jnp.int32(0), by=noise_by)
        numbers, drawn = [jnp.int32(0)], []
        for node in range(nodes + 1):
            children = [n for n in range(1, nodes + 1) if tree[n] == node]
            if not children:
                continue
            law = draft[numbers[node]]
            own = [noise.key(child, depth[node] + 1) for child in children]
            ways = {
                "independent": jnp.stack([draw(key, law) for key in own]),
                "distinct": draw_distinct(jax.random.clone(own[0]), law, len(own)),
                "chosen": jax.lax.top_k(law, len(own))[1].astype(jnp.int32),
            }
            for token in jnp.stack([ways[name] for name in HOW])[how]:
                numbers.append(numbers[node] * vocab_size + token + 1)
                drawn.append(token)
        at = jnp.stack(numbers)
        block = DraftBlock(
            tokens=jnp.stack(drawn),
            length=jnp.int32(nodes),
            law=Law(probs=draft[at]) if needs_law else None,
            parents=parents,
        )
        scored = Scored(law=Law(probs=target[at]), logits=jnp.log(target[at]))
        judging = jax.random.clone(theirs) if noise_by == "position" else theirs
        noise = Noise(keys=judging, start=jnp.int32(0), by=noise_by)
        verdict = verifier_rule(noise, block, scored, params)
        text, number = [], jnp.int32(0)
        for place in range(TOKENS):
            # What the rule wrote, then the target's own tokens.
            path = verdict.path[min(place, nodes - 1)]
            free = draw(jax.random.fold_in(rest, place), target[number])
            token = jnp.where(place == verdict.num_accepted, verdict.next_token, free)
            stands = place < verdict.num_accepted
            token = jnp.where(stands, block.tokens[path - 1], token)
            text.append(token)
            number = number * vocab_size + token + 1
            number = jnp.minimum(number, target.shape[0] - 1)
        return jnp.stack(text), verdict.num_accepted

    return jax.vmap(one)(keys)


def sample(
    verifier: Verifier,
    target: TableModel,
    draft: TableModel,
    tree: tuple[int, ...],
    how: str,
    rows: int,
    seed: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens ``[rows, TOKENS]`` and how many of the drafted ones stood."""
    texts, accepted = _sample(
        jax.random.split(jax.random.key(seed), rows),
        law_table(target),
        law_table(draft),
        verifier.params,
        jnp.int32(HOW.index(how)),  # traced: no program of its own
        verifier_rule=verifier.rule,
        needs_law=verifier.needs_law,
        noise_by=verifier.noise,
        tree=tree,
    )
    return np.asarray(texts), np.asarray(accepted)


def exact(target: TableModel) -> np.ndarray:
    """The law that every lossless rule must write."""
    return joint_law(target, TOKENS)


def _path(node: int, tree: tuple[int, ...]) -> list[int]:
    return [] if node == 0 else [*_path(tree[node], tree), node]


def depth_of(tree: tuple[int, ...]) -> int:
    """The deepest node's depth."""
    return int(trees.depths(jnp.array(tree)).max())
