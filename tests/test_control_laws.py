"""Sampled text follows the exact law of the controlled target; wrong twins do not."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    ModelDrafter,
    Sampling,
    block_verify,
    decoding,
    speculative_generate,
)
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import as_table, joint_law, table_model
from tests.control_cases import EOS, Lying, Nothing, by_row, reference
from tests.helpers import (
    quick_compile,  # noqa: F401
    row_keys,
)

VOCAB, TOKENS, FEW, MANY = 5, 3, 2_500, 15_000
TARGET = table_model(3, VOCAB, TOKENS - 1)
DRAFT = table_model(4, VOCAB, TOKENS - 1, like=TARGET, mix=0.4)
# Those whose edit depends on what was drafted before.
MOVING: dict[str, dict[str, Any]] = {
    "minimum length": {"length": 4},
    "banned sequences": {"sequences": ((3, 4), (4, 3, 3), (0, 1))},
    "repetition penalty": {"penalty": 3.0},
    "counts": {"frequency": 0.8, "presence": -1.5, "start": 1},
    "no bigram twice": {"size": 2},
}
CASES = {**MOVING, "banned tokens": {"ids": (1,)}, "none": {}}


def controls(rows: int) -> tuple[Any, ...]:
    """Of so many rows per case, case by case."""
    return jax.tree.map(
        lambda x: jnp.repeat(x, rows, axis=0) if np.ndim(x) else x,
        by_row(list(CASES.values())),
    )


def p_values(rows: int, drafter=None, **changes) -> dict[str, float]:
    """By case, of the rows' tokens under the exact law of the controlled target."""
    batch = rows * len(CASES)
    output = speculative_generate(
        TARGET,
        drafter or ModelDrafter(DRAFT),
        jnp.zeros((batch, 1), jnp.int32),
        jnp.ones((batch, 1), bool),
        row_keys(0, batch),
        verifier=block_verify,
        **{"sampling": Sampling(controls=controls(rows)), **changes},
        gamma=2,
        max_length=TOKENS + 1,
        eos_id=EOS,
    )
    written = np.asarray(output.tokens[:, 1:]).reshape(len(CASES), -1, TOKENS)
    drafted, accepted = (
        np.asarray(own).reshape(len(CASES), -1).sum(1)
        for own in (output.stats.drafted, output.stats.accepted)
    )
    assert (0.05 * drafted < accepted).all() and (accepted < 0.95 * drafted).all()
    prefixes = [
        [0, *text]
        for depth in range(TOKENS)
        for text in itertools.product(range(VOCAB), repeat=depth)
    ]
    found = {}
    for tokens, (name, case) in zip(written, CASES.items(), strict=True):
        weights = np.exp(
            [
                reference(logits, text, case)
                for logits, text in zip(TARGET.logits, prefixes, strict=True)
            ]
        )
        table = as_table(weights / weights.sum(-1, keepdims=True), TOKENS - 1)
        found[name] = chi_square_p(tokens, joint_law(table, TOKENS, eos_id=EOS))
    return found


@pytest.mark.parametrize("rows", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_sampled_text_follows_the_controlled_law(rows):
    right = p_values(rows)
    assert min(right.values()) > 1e-3, right


@pytest.mark.slow
def test_one_prefix_for_a_whole_block_is_found_out(monkeypatch):
    """The wrong twin: every place of a block is judged by the prefix of its first."""
    whole = decoding.block_prefix

    def stale(state, block):
        prefix = whole(state, block)
        first = jnp.broadcast_to(prefix.length[:, :1], prefix.length.shape)
        return prefix.replace(length=first)

    monkeypatch.setattr(decoding, "block_prefix", stale)
    own = (*controls(MANY), Nothing())  # a structure, so a program, of its own
    wrong = p_values(MANY, sampling=Sampling(controls=own))
    assert max(wrong[name] for name in MOVING) < 1e-6, wrong
    assert min(wrong["banned tokens"], wrong["none"]) > 1e-3, wrong


@pytest.mark.slow
def test_controls_on_one_side():
    """On the target alone they are as exact; on the draft alone, ignored.

    A draft that draws without them and reports its law with them is found out.
    """
    right = p_values(MANY, draft_sampling=Sampling(controls=(Nothing(),)))
    assert min(right.values()) > 1e-3, right
    on_draft = Sampling(controls=controls(MANY))
    wrong = p_values(MANY, sampling=Sampling(), draft_sampling=on_draft)
    assert wrong.pop("none") > 1e-3 and max(wrong.values()) < 1e-6, wrong
    wrong = p_values(MANY, Lying(ModelDrafter(DRAFT)))
    assert wrong.pop("none") > 1e-3 and max(wrong.values()) < 1e-6, wrong
