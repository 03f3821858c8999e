"""Decoding a file's batches, with and without a draft: what several commands do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import metrics, sharding
from specjax.data import batches
from specjax.decoding import (
    DecodeOutput,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters.base import Drafter
from specjax.models.shared_encoder import SharedEncoderDraft
from specjax.models.t5 import T5
from specjax.sampling import Sampling

# Outputs may part where two tokens score alike up to rounding, and only there.
# A bfloat16 keeps 8 bits: near 16, two neighbours are 1/8 apart.
TIES = {"float32": 1e-4, "bfloat16": 0.5}


def batch_keys(keys: jax.Array, part: batches.InferenceBatch) -> jax.Array:
    """Each row's own key; rows that fill the batch take the first."""
    return keys[np.maximum(part.rows, 0)]


def batch_budget(part: batches.InferenceBatch, most: int) -> jax.Array:
    """No tokens for rows that only fill the batch, at most so many for others."""
    return jnp.where(jnp.asarray(part.valid), most, 0)


def decode(
    model: T5 | SharedEncoderDraft,
    part: batches.InferenceBatch,
    keys: jax.Array,
    sampling: Sampling,
    max_length: int,
    budget: int | None = None,
    **settings: Any,
) -> DecodeOutput:
    """Decodes a batch with the model alone.

    Args:
        model: the model.
        part: the batch.
        keys: one key per row of the whole file.
        sampling: how tokens are drawn.
        max_length: decoder tokens, start token included.
        budget: tokens that a row may write; None: what `max_length` leaves.
        **settings: of `autoregressive_generate`.
    """
    inputs, mask, own_keys, tokens = _arguments(model, part, keys, max_length, budget)
    output = autoregressive_generate(
        model,
        inputs,
        mask,
        own_keys,
        sampling=sampling,
        max_length=max_length,
        budget=tokens,
        eos_id=model.config.eos_id,
        **settings,
    )
    return sharding.fetch(output)


def _arguments(
    model: T5 | SharedEncoderDraft,
    part: batches.InferenceBatch,
    keys: jax.Array,
    max_length: int,
    budget: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Sources, masks, keys and budgets, on the model's mesh if it lies on one."""
    rows = (
        jnp.asarray(part.inputs),
        jnp.asarray(part.mask),
        batch_keys(keys, part),
        batch_budget(part, max_length if budget is None else budget),
    )
    mesh = sharding.mesh_of(model)
    return rows if mesh is None else sharding.place_rows(rows, mesh)


def speculate(
    target: T5,
    drafter: Drafter,
    part: batches.InferenceBatch,
    keys: jax.Array,
    *,
    max_length: int,
    budget: int | None = None,
    **settings: Any,
) -> DecodeOutput:
    """Decodes a batch with a draft in front of the target.

    Args:
        target: the target model.
        drafter: proposes tokens.
        part: the batch.
        keys: one key per row of the whole file.
        max_length: decoder tokens, start token included.
        budget: tokens that a row may write; None: what `max_length` leaves.
        **settings: of `speculative_generate`.
    """
    inputs, mask, own_keys, tokens = _arguments(target, part, keys, max_length, budget)
    output = speculative_generate(
        target,
        drafter,
        inputs,
        mask,
        own_keys,
        max_length=max_length,
        budget=tokens,
        eos_id=target.config.eos_id,
        **settings,
    )
    return sharding.fetch(output)


def differences(
    target: T5,
    part: batches.InferenceBatch,
    keys: jax.Array,
    plain: DecodeOutput,
    other: DecodeOutput,
    sampling: Sampling,
) -> list[dict[str, Any]]:
    """Where rows first part from the target's own, by row of the file.

    Args:
        target: the target model.
        part: the batch.
        keys: one key per row of the whole file.
        plain: of the target alone.
        other: of the same batch.
        sampling: of both.

    Returns:
        `row`, `position` and `top2_gap`, which is that of the noisy scores of samples.
    """
    found = metrics.differences(
        target,
        jnp.asarray(part.inputs),
        jnp.asarray(part.mask),
        batch_keys(keys, part),
        plain,
        other,
        sampling=sampling,
    )
    return [
        {
            "row": int(part.rows[one.row]),
            "position": one.position,
            "top2_gap": one.gap,
        }
        for one in found
    ]


def decode_all(
    model: T5 | SharedEncoderDraft,
    parts: Sequence[batches.InferenceBatch],
    keys: jax.Array,
    sampling: Sampling,
    max_length: int,
    budget: int | None = None,
) -> list[DecodeOutput]:
    """`decode` of each of a file's batches."""
    return [decode(model, part, keys, sampling, max_length, budget) for part in parts]


def alpha(
    target: T5,
    draft: T5 | SharedEncoderDraft,
    parts: Sequence[batches.InferenceBatch],
    outputs: Sequence[DecodeOutput],
    sampling: Sampling,
) -> float:
    """Mean of sum min(p, q) on texts that the target has written.

    Args:
        target: the model whose texts they are.
        draft: the model that would draft them.
        parts: the sources.
        outputs: the texts, from `decode_all` of the target.
        sampling: how they were drawn.
    """
    measure = functools.partial(metrics.teacher_forced_alpha, target, draft)
    return _alpha(measure, parts, outputs, sampling)


def drafter_alpha(
    target: T5,
    drafter: Drafter,
    parts: Sequence[batches.InferenceBatch],
    outputs: Sequence[DecodeOutput],
    sampling: Sampling,
) -> float:
    """The same of a drafter without a model, asked at every place; see `alpha`."""
    measure = functools.partial(metrics.drafter_alpha, target, drafter)
    return _alpha(measure, parts, outputs, sampling)


def _alpha(
    measure: Callable[..., metrics.Agreement],
    parts: Sequence[batches.InferenceBatch],
    outputs: Sequence[DecodeOutput],
    sampling: Sampling,
) -> float:
    return metrics.alpha(
        *(
            measure(
                jnp.asarray(part.inputs),
                jnp.asarray(part.mask),
                output.tokens,
                output.length,
                sampling=sampling,
            )
            for part, output in zip(parts, outputs, strict=True)
        )
    )


def new_tokens(output: DecodeOutput, slot: int, given: int = 1) -> list[int]:
    """What one row wrote after the `given` first tokens, one of them the start."""
    return np.asarray(output.tokens)[slot, given : int(output.length[slot])].tolist()


def finished(tokens: Sequence[int], eos_id: int) -> bool:
    """Whether a row ended by itself; else its ``max_length`` cut it."""
    return bool(tokens) and tokens[-1] == eos_id


def tokens_by_row(
    parts: Sequence[batches.InferenceBatch],
    outputs: Sequence[DecodeOutput],
    num_rows: int,
) -> list[list[int]]:
    """What each row of the file wrote, in order."""
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for part, output in zip(parts, outputs, strict=True):
        for slot in np.flatnonzero(part.valid):
            rows[part.rows[slot]] = new_tokens(output, int(slot))
    return rows
