"""Whose texts a draft learns on: people's, the target's, or its own.

A draft is judged at the prefixes that decoding reaches. People's texts are the cheapest
and the furthest from those; the target's are what Leviathan et al. measure alpha on;
the draft's own ("on-policy") show it the consequences of its errors (Agarwal et al.
2024, arXiv:2306.13649; Zhou et al. 2024, arXiv:2310.08461).
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from specjax import errors
from specjax.decoding import autoregressive_generate
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling
from specjax.training import step

WRITERS = ("truth", "target", "draft")
# Beside the numbers of micro-batches, which dropout folds into a step's key.
_CHOICE, _DRAWS = 1_000_001, 1_000_002


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Shares of the steps that learn on each writer's texts; they add up to 1.

    A whole batch has one writer, so that nothing is decoded and thrown away.

    Attributes:
        truth: the texts of the training file.
        target: written by the target at that moment.
        draft: written by the draft in training at that moment.
        temperature: of what is written; None: greedily.
    """

    truth: float = 1.0
    target: float = 0.0
    draft: float = 0.0
    temperature: float | None = 1.0


def check_mixture(mixture: Mixture, name: str) -> None:
    """Refuses settings that mean nothing.

    Args:
        mixture: the settings.
        name: how the caller names them, for the message.

    Raises:
        errors.InputError: naming what is wrong.
    """
    shares = {writer: getattr(mixture, writer) for writer in WRITERS}
    for writer, share in shares.items():
        if not 0 <= share <= 1:
            raise errors.InputError(f"{name}.{writer} is {share}: from 0 to 1")
    if abs(sum(shares.values()) - 1) > 1e-6:
        raise errors.InputError(
            f"{name}: the shares of {', '.join(WRITERS)} add up to "
            f"{sum(shares.values()):g}, not to 1"
        )
    if mixture.temperature is not None and not 0 < mixture.temperature < math.inf:
        raise errors.InputError(
            f"{name}.temperature is {mixture.temperature}: a number above 0; greedy "
            "texts have None, in a config 0"
        )
    if mixture.truth == 1 and mixture.temperature != Mixture.temperature:
        raise errors.InputError(
            f"{name}.temperature is {mixture.temperature} and {name}.truth 1: no model "
            f"writes, so leave it at {Mixture.temperature}"
        )


def choose_writer(mixture: Mixture, key: Key[Array, ""], number: int) -> str:
    """Whose texts step `number` learns on: a function of the run's key and the step.

    Args:
        mixture: the shares.
        key: of the run, `TrainState.key`.
        number: of the step.
    """
    shares = [getattr(mixture, writer) for writer in WRITERS]
    if 1.0 in shares:
        return WRITERS[shares.index(1.0)]
    own = jax.random.fold_in(jax.random.fold_in(key, number), _CHOICE)
    logits = jnp.log(jnp.array(shares, jnp.float32))
    return WRITERS[int(jax.random.categorical(own, logits))]


def rewrite(
    model: EncoderDecoder,
    batch: step.Batch,
    key: Key[Array, ""],
    number: int,
    *,
    temperature: float | None,
    num_tokens: int | None = None,
    eos_id: int = 1,
) -> step.Batch:
    """The batch with the model's own outputs for its sources in place of its targets.

    Args:
        model: the writer.
        batch: its targets' width is the room for what is written; a text that has not
            ended there is cut and trains no end of sequence. Rows that only fill the
            batch stay empty.
        key: of the run, `TrainState.key`.
        number: of the step.
        temperature: None writes greedily.
        num_tokens: ids from here on are never written; see `Sampling`.
        eos_id: ends a text.

    Returns:
        A batch of the same shapes.
    """
    rows, width = batch.targets.shape
    own = jax.random.fold_in(jax.random.fold_in(key, number), _DRAWS)
    output = autoregressive_generate(
        model,
        batch.inputs,
        batch.inputs_mask,
        jax.random.split(own, rows),
        sampling=Sampling(temperature=temperature, num_tokens=num_tokens),
        max_length=width + 1,
        budget=jnp.where(jnp.any(batch.targets_mask, axis=1), width, 0),
        eos_id=eos_id,
    )
    return batch.replace(
        targets=output.tokens[:, 1:],
        targets_mask=jnp.arange(1, width + 1)[None] < output.length[:, None],
    )
