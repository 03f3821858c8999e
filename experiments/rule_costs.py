"""What a verification rule itself takes, beside one decoder step of a large target."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import benchmark, picking
from specjax import metrics, trees
from specjax.models import t5_config
from specjax.types import DraftBlock, Law, Noise
from specjax.verify import Scored, Verifier

# Rules end early or late: each is timed on several blocks.
_BLOCKS = 4
# How far made-up laws are from flat, and the draft's from the target's: about two
# drafts in three stand.
_SPREAD, _ERROR = 3.0, 0.6
_SOURCE = 64  # tokens of the step's source


@dataclasses.dataclass(frozen=True)
class Case:
    """A rule on a block of one shape.

    Attributes:
        verifier: the rule.
        parents: of the tree; a chain's own for rules of chains.
        siblings: how the tree's were drawn; None: the block is a chain.
    """

    verifier: Verifier
    parents: tuple[int, ...]
    siblings: str | None


def measure(
    cases: Mapping[str, Case],
    shape: t5_config.T5Config,
    *,
    seed: int,
    seconds: float,
    repeats: int,
) -> dict[str, Any]:
    """Times all rules and the step in turn, one row, at the shape's vocabulary.

    Args:
        cases: by name.
        shape: of the target; its encoder counts for nothing.
        seed: of the made-up weights and laws.
        seconds: least length of a timing of the step.
        repeats: timings of each.

    Returns:
        ``step_seconds``; ``call_seconds``: what calling any compiled function on such a
        block takes; and under ``rules``, by name: ``seconds`` beyond such a call,
        ``of_step``, their share of a step (median within rounds), ``first_quartile``,
        ``third_quartile``, and ``compile_seconds``.
    """
    model = benchmark.random_model(
        dataclasses.replace(shape, num_encoder_layers=1), jnp.float32, seed
    )
    inputs = jnp.full((1, _SOURCE), 2, jnp.int32)
    encoded = jax.jit(lambda model: model.encode(inputs, jnp.ones((1, _SOURCE), bool)))(
        model
    )
    step = functools.partial(picking.run_passes, model, encoded, fed=1, size=_SOURCE)
    steps = metrics.enough_steps(step, seconds, picking.MOST_PASSES)
    calls: dict[str, Callable[[], Any]] = {
        "steps": functools.partial(step, steps),
        "no step": functools.partial(step, 0),
    }
    for name, case in cases.items():
        blocks = made_blocks(case, shape.vocab_size, seed)
        for label, rule in ((name, case.verifier.rule), (f"{name}, call", _nothing)):
            run = jax.jit(jax.vmap(rule, in_axes=(0, 0, 0, None)))
            calls[label] = functools.partial(_each, run, blocks, case.verifier.params)
    timings = metrics.time_calls(calls, repeats=repeats)
    one = metrics.per_step(timings["steps"], timings["no step"], steps)
    rules, empty = {}, []
    for name in cases:
        call = timings[f"{name}, call"]
        empty.append(call.median / _BLOCKS)
        rounds = zip(timings[name].times, call.times, strict=True)
        own = metrics.Timing(
            tuple(max(whole - bare, 0.0) / _BLOCKS for whole, bare in rounds)
        )
        rules[name] = {
            "seconds": own.median,
            "first_quartile": own.low,
            "third_quartile": own.high,
            "of_step": metrics.time_ratio(own, one),
            "compile_seconds": timings[name].compile_seconds,
        }
    return {
        "step_seconds": one.median,
        "call_seconds": float(np.median(empty)),
        "rules": rules,
    }


def _nothing(noise: Noise, block: DraftBlock, scored: Scored, params: Any) -> Any:
    return block.length


def _each(run: Callable[..., Any], blocks: Any, params: Any) -> list[Any]:
    return [run(*block, params) for block in blocks]


def made_blocks(
    case: Case, vocab_size: int, seed: int
) -> list[tuple[Noise, DraftBlock, Scored]]:
    """Blocks of one row whose tokens are drawn as a drafter would draw them.

    Args:
        case: shape and siblings.
        vocab_size: of the laws, which are dense.
        seed: equal seeds and shapes give equal laws.
    """
    rng = np.random.default_rng(seed)
    levels = trees.levels(case.parents)
    nodes, above = len(case.parents), levels[-1].start
    found = []
    for number in range(_BLOCKS):
        wanted = _SPREAD * rng.standard_normal((nodes, vocab_size), np.float32)
        error = rng.standard_normal((above, vocab_size), np.float32)
        p, q = _softmax(wanted), _softmax(wanted[:above] + _ERROR * error)
        tokens = np.zeros(nodes - 1, np.int32)
        for node in range(above):
            children = [n for n, parent in enumerate(case.parents) if parent == node]
            # The fastest of exponential clocks: a draw, and the next ones without
            # replacement.
            distinct = case.siblings == "distinct"
            clocks = rng.exponential(
                size=(1 if distinct else len(children), vocab_size)
            )
            order = np.argsort(clocks / np.maximum(q[node], 1e-30), axis=1)
            drawn = order[0, : len(children)] if distinct else order[:, 0]
            for child, token in zip(children, drawn, strict=True):
                tokens[child - 1] = token
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), number)
        tree = case.siblings is not None
        block = DraftBlock(
            tokens=jnp.asarray(tokens)[None],
            length=jnp.full(1, nodes - 1, jnp.int32),
            law=Law(probs=jnp.asarray(q)[None]),
            parents=jnp.asarray(case.parents, jnp.int32)[None] if tree else None,
        )
        scored = Scored(
            law=Law(probs=jnp.asarray(p)[None]), logits=jnp.asarray(wanted)[None]
        )
        noise = Noise(
            keys=key[None], start=jnp.zeros(1, jnp.int32), by=case.verifier.noise
        )
        found.append((noise, block, scored))
    return found


def _softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)
