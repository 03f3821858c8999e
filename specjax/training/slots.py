"""Training a drafter on whole blocks: each of its slots is judged by the target.

Slot i of anchor t proposes what row t + i of the target's own logits predicts, and is
only used if the slots before it were accepted: hence the weights by survival, and the
expected length of what is accepted as the score.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import errors
from specjax.drafters.base import SlotLogits, TrainableDrafter
from specjax.models import dense
from specjax.models.base import Encoded
from specjax.training import distill, losses, optimizer, step

Grid = Float[Array, "B T G"]

# How much a slot counts: all alike; less by a constant factor from slot to slot; by the
# target's chance to write the text so far (CAT, PARD-2, arXiv:2605.08632); by what it
# adds to the expected length (D-PACE).
WEIGHTS = ("none", "decay", "cat", "d_pace")


@dataclasses.dataclass(frozen=True)
class Objective:
    """What training makes smaller. Hashable, so that it can be static.

    Attributes:
        divergence: of each slot from the target's law of its row.
        weights: one of `WEIGHTS`.
        slot_decay: of "decay": slot i (from 0) weighs slot_decay**i; in (0, 1].
        floor: of "d_pace": the draft's probability q of the text's token counts as
            (1 - floor) q + floor; in [0, 1].
    """

    divergence: distill.Divergence = distill.Divergence("lk_hybrid")
    weights: str = "cat"
    slot_decay: float = 0.8
    floor: float = 0.5


@struct.dataclass
class SlotScores:
    """Sums over the anchors of a batch, so that batches add up by plain addition.

    Acceptance is sum min(p, q) at temperature 1: the chance that a token drawn from the
    slot's law is accepted there. Agreement is 1 where both laws have the same likeliest
    token: acceptance in greedy decoding.

    Attributes:
        loss: weight times divergence.
        weight: of all slots.
        acceptance: by slot.
        survival: by slot: the product of the acceptances of the chain down to it.
        agreement: by slot.
        agreed: by slot: 1 where the chain down to it agrees.
        kept: by slot: how many there are in all, which lie within the texts.
        room: by slot: how many there would be had none been left out.
    """

    loss: Float[Array, ""]
    weight: Float[Array, ""]
    acceptance: Float[Array, " G"]
    survival: Float[Array, " G"]
    agreement: Float[Array, " G"]
    agreed: Float[Array, " G"]
    kept: Float[Array, " G"]
    room: Float[Array, " G"]

    def means(self) -> dict[str, jax.Array]:
        """Loss, expected accepted lengths, and acceptance by slot.

        Returns:
            ``loss``, the mean by weight; ``expected_length``, the mean over anchors of
            the sum over slots of the survival, and ``expected_length_greedy``, that of
            greedy decoding; ``acceptance`` and ``agreement``, ``[G]``. Slots that the
            drafter left out count as the others of their number do.
        """

        def length(chains: jax.Array) -> jax.Array:
            anchors = jnp.maximum(self.room[0], 1.0)
            return jnp.sum(chains / kept * self.room) / anchors

        kept = jnp.maximum(self.kept, 1.0)
        return {
            "loss": self.loss / jnp.maximum(self.weight, jnp.finfo(jnp.float32).tiny),
            "expected_length": length(self.survival),
            "expected_length_greedy": length(self.agreed),
            "acceptance": self.acceptance / kept,
            "agreement": self.agreement / kept,
        }


def check_objective(how: Objective, name: str) -> None:
    """Refuses settings that mean nothing, and those that nothing would read.

    Args:
        how: the settings.
        name: how the caller names them, for the message.

    Raises:
        errors.InputError: naming the first that is wrong.
    """
    distill.check_divergence(how.divergence, name)
    if how.weights not in WEIGHTS:
        raise errors.InputError(
            f"{name}.weights is {how.weights!r}: one of {', '.join(WEIGHTS)}"
        )
    for field, reader, holds, wanted in (
        ("slot_decay", "decay", 0 < how.slot_decay <= 1, "above 0, at most 1"),
        ("floor", "d_pace", 0 <= how.floor <= 1, "from 0 to 1"),
    ):
        value, usual = getattr(how, field), getattr(Objective(), field)
        if not holds:
            raise errors.InputError(f"{name}.{field} is {value}: {wanted}")
        if value != usual and how.weights != reader:
            raise errors.InputError(
                f"{name}.{field} is {value}, and {name}.weights {how.weights} does not "
                f"read it: leave it at {usual}, its default"
            )


def slot_loss(
    slots: SlotLogits,
    target_logits: Float[Array, "B T V"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    how: Objective,
    *,
    gamma: int,
) -> SlotScores:
    """How far the slots' laws are from the target's, and how long their chains stand.

    Slots of padding anchors and past the end of a text weigh nothing.

    Args:
        slots: what is judged; each slot of an anchor stands there once, at most.
        target_logits: raw; row t predicts ``targets[:, t]``. No gradient flows into
            them.
        targets: the texts.
        mask: True at their real tokens.
        how: divergence and weights.
        gamma: slots of a block.
    """
    size = targets.shape[1]
    row = slots.anchor + slots.slot
    inside = (slots.anchor >= 0) & (row < size)
    row = jnp.clip(row, 0, size - 1)
    real = inside & jnp.take_along_axis(mask, row, axis=1)
    labels = jnp.take_along_axis(targets, row, axis=1)
    target_logits = jax.lax.stop_gradient(target_logits)
    judging = jnp.take_along_axis(target_logits, row[..., None], axis=1)
    apart, accepted = distill.position_losses(
        judging, slots.logits, labels, how.divergence
    )

    # By anchor and slot. A slot of no anchor has no place.
    places = (
        jnp.arange(targets.shape[0])[:, None],
        jnp.where(real, slots.anchor, size),
        slots.slot,
    )

    def grid(values: jax.Array) -> Grid:
        empty = jnp.zeros((*targets.shape, gamma), jnp.float32)
        return empty.at[places].set(values.astype(jnp.float32), mode="drop")

    weights = _weights(how, grid, slots.logits, target_logits, targets, labels, gamma)
    weights = jax.lax.stop_gradient(weights).at[places].get(mode="fill", fill_value=0)
    both = min(slots.logits.shape[-1], target_logits.shape[-1])
    best = [jnp.argmax(own[..., :both], -1) for own in (judging, slots.logits)]
    kept, accepted = grid(jnp.ones_like(apart)), grid(accepted)
    agreed = grid(best[0] == best[1])

    def total(values: Grid) -> Float[Array, " G"]:
        return jnp.sum(values, axis=(0, 1))

    return SlotScores(
        loss=jnp.sum(apart * weights),
        weight=jnp.sum(weights),
        acceptance=total(accepted),
        survival=total(jnp.cumprod(accepted, axis=-1)),
        agreement=total(agreed),
        agreed=total(jnp.cumprod(agreed, axis=-1)),
        kept=total(kept),
        room=total(kept[..., :1] * _rows_from(mask.astype(jnp.float32), gamma)),
    )


def _weights(
    how: Objective,
    grid: Any,
    draft_logits: jax.Array,
    target_logits: jax.Array,
    targets: jax.Array,
    labels: jax.Array,
    gamma: int,
) -> Grid:
    """How much each slot of each anchor counts."""
    if how.weights == "cat":
        chain = _rows_from(_probability(target_logits, targets), gamma)
        before = jnp.pad(chain, ((0, 0), (0, 0), (1, 0)), constant_values=1.0)
        return jnp.cumprod(before[..., :-1], axis=-1)
    if how.weights == "d_pace":
        # d E / d log q of slot j, E the sum over k of the product of q down to k. What
        # is not there is 0, and ends the chain.
        smooth = (1 - how.floor) * _probability(draft_logits, labels) + how.floor
        chain = jnp.cumprod(grid(smooth), axis=-1)
        return jnp.flip(jnp.cumsum(jnp.flip(chain, -1), axis=-1), -1)
    decay = how.slot_decay if how.weights == "decay" else 1.0
    falling = decay ** jnp.arange(gamma, dtype=jnp.float32)
    return jnp.broadcast_to(falling, (*targets.shape, gamma))


def _probability(logits: jax.Array, ids: jax.Array) -> jax.Array:
    laws = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
    return jnp.exp(jnp.take_along_axis(laws, ids[..., None], axis=-1)[..., 0])


def _rows_from(values: Float[Array, "B T"], gamma: int) -> Grid:
    """The values of rows t .. t + gamma - 1 at each t; 0 past the end."""
    padded = jnp.pad(values, ((0, 0), (0, gamma - 1)))
    size = values.shape[1]
    return jnp.stack([padded[:, i : i + size] for i in range(gamma)], axis=-1)


def teach(
    target: Any, batch: step.Batch, taps: tuple[int, ...]
) -> tuple[Encoded, Int[Array, "B T"], tuple[jax.Array, ...], Float[Array, "B T V"]]:
    """What a target says of texts: encoder's result, fed tokens, features, logits.

    Args:
        target: a whole model.
        batch: sources and texts.
        taps: layers whose output is wanted.
    """
    encoded = target.encode(batch.inputs, batch.inputs_mask)
    fed = losses.shift_right(batch.targets, target.config.pad_id)
    output, _ = target.decode(fed, None, encoded, taps=taps)
    return jax.lax.stop_gradient((encoded, fed, output.features, output.logits))


def slot_scores(
    drafter: TrainableDrafter,
    target: Any,
    batch: step.Batch,
    key: Key[Array, ""],
    how: Objective,
    *,
    gamma: int,
) -> SlotScores:
    """The drafter's slots on a batch of texts, judged by its target.

    Args:
        drafter: what is judged, and through which gradients flow.
        target: the model that it drafts for; no gradient flows into it.
        batch: texts, best the target's own.
        key: of what the drafter draws by chance, such as its anchors.
        how: divergence and weights.
        gamma: slots of a block.
    """
    encoded, fed, features, logits = teach(target, batch, drafter.taps)
    slots = drafter.slot_logits(
        target,
        encoded,
        batch.inputs,
        batch.inputs_mask,
        fed,
        features,
        key,
        gamma=gamma,
    )
    return slot_loss(slots, logits, batch.targets, batch.targets_mask, how, gamma=gamma)


@partial(
    jax.jit, static_argnames=("config", "how", "gamma", "rounds"), donate_argnums=0
)
def slot_step(
    state: step.TrainState,
    target: Any,
    batch: step.Batch,
    *,
    config: optimizer.OptimizerConfig,
    how: Objective,
    gamma: int,
    rounds: bool = False,
) -> tuple[step.TrainState, dict[str, jax.Array]]:
    """One step of the optimizer on all arrays of a drafter, and on nothing else.

    Args:
        state: donated: use the returned one from here on. Its model is the drafter.
        target: the model that it drafts for.
        batch: the batch at ``(state.epoch, state.index)``; the caller moves these on.
        config: of the optimizer.
        how: divergence and weights.
        gamma: slots of a block.
        rounds: the factors of products with weights, to bfloat16 (`dense.Rounded`).

    Returns:
        The next state, and ``loss``, ``expected_length``, ``tokens``, ``grad_norm`` and
        ``learning_rate`` of this step.
    """
    key = jax.random.fold_in(state.key, state.step)
    if rounds:
        target = dense.rounded(target)

    def loss(drafter: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        drafter = dense.rounded(drafter) if rounds else drafter
        means = slot_scores(drafter, target, batch, key, how, gamma=gamma).means()
        return means["loss"], means

    grads, means = jax.grad(loss, has_aux=True)(state.model)
    state, metrics = step.apply_gradients(state, grads, config)
    metrics |= {name: means[name] for name in ("loss", "expected_length")}
    metrics["tokens"] = jnp.sum(batch.targets_mask, dtype=jnp.float32)
    return state, metrics


@partial(jax.jit, static_argnames=("how", "gamma"))
def slot_eval_step(
    drafter: TrainableDrafter,
    target: Any,
    batch: step.Batch,
    key: Key[Array, ""],
    *,
    how: Objective,
    gamma: int,
) -> SlotScores:
    """Sums over one batch, of texts that the drafter was not trained on.

    Args:
        drafter: what is judged.
        target: the model that it drafts for.
        batch: the texts.
        key: as in `slot_scores`: one for all evaluations makes them comparable.
        how: divergence and weights, of the loss alone.
        gamma: slots of a block.
    """
    return slot_scores(drafter, target, batch, key, how, gamma=gamma)
