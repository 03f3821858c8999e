"""One training step: a pure function of a frozen state and a batch."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import errors
from specjax.models import t5
from specjax.training import distill, losses


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with a warm-up, a decay to a given number of steps, and clipping.

    Attributes:
        learning_rate: peak.
        warmup_steps: linear from 0 to the peak.
        steps: length of the run; the decay ends here.
        schedule: from the peak on. "cosine": down to a twentieth of it at the end.
            "trapezoid": constant, then linear to zero over the last `decay_steps`, so
            that a run can still be made longer before these begin. "inverse_sqrt".
        decay_steps: of the trapezoid.
        weight_decay: decoupled; matrices only, not norms or bias tables.
        clip: largest global norm of the gradient.
        b1: decay of the first moment.
        b2: decay of the second moment.
    """

    learning_rate: float = 1.5e-3
    warmup_steps: int = 150
    steps: int = 1000
    schedule: str = "trapezoid"
    decay_steps: int = 300
    weight_decay: float = 0.01
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.98


@struct.dataclass
class Batch:
    """Padded sources and targets; masks are True at real tokens."""

    inputs: Int[Array, "B S"]
    inputs_mask: Bool[Array, "B S"]
    targets: Int[Array, "B T"]
    targets_mask: Bool[Array, "B T"]


@struct.dataclass
class TrainState:
    """All that a run is: saved whole, it resumes exactly.

    Attributes:
        model: the T5 in training.
        opt_state: AdamW's moments and count.
        step: steps taken.
        key: the run's key; step s draws its dropout from ``fold_in(key, s)``.
        epoch: pass over the data that the next batch belongs to.
        index: number of the next batch within its epoch.
    """

    model: t5.T5
    opt_state: optax.OptState
    step: Int[Array, ""]
    key: Key[Array, ""]
    epoch: Int[Array, ""]
    index: Int[Array, ""]


def check_optimizer(config: OptimizerConfig, name: str) -> None:
    """Refuses settings that mean nothing.

    Args:
        config: the settings.
        name: how the caller names them, for the message.

    Raises:
        errors.InputError: naming the first that is wrong.
    """
    at_least = dict(warmup_steps=0, steps=1, decay_steps=0, weight_decay=0, b1=0, b2=0)
    for field, least in at_least.items():
        if getattr(config, field) < least:
            raise errors.InputError(
                f"{name}.{field} is {getattr(config, field)}: at least {least}"
            )
    for field in ("learning_rate", "clip"):
        if not getattr(config, field) > 0:
            raise errors.InputError(
                f"{name}.{field} is {getattr(config, field)}: above 0"
            )
    for field in ("b1", "b2"):
        if not getattr(config, field) < 1:
            raise errors.InputError(
                f"{name}.{field} is {getattr(config, field)}: below 1"
            )
    learning_rate(config)  # knows the schedules


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """The schedule: step -> learning rate."""
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup, max(config.steps, warmup + 1), end_value=peak / 20
        )
    if config.schedule == "trapezoid":
        fall = max(config.decay_steps, 1)
        return lambda step: (
            peak
            * jnp.clip(
                jnp.minimum((step + 1) / warmup, (config.steps - step) / fall), 0.0, 1.0
            )
        )
    if config.schedule == "inverse_sqrt":
        return lambda step: (
            peak
            * jnp.minimum(
                (step + 1) / warmup, jnp.sqrt(warmup / jnp.maximum(step + 1, warmup))
            )
        )
    raise errors.InputError(
        f"the schedule {config.schedule!r} is unknown: it must be 'cosine', "
        "'trapezoid' or 'inverse_sqrt'"
    )


def optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipped AdamW on the schedule of `config`."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(
            learning_rate(config),
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=_decays,
        ),
    )


def _decays(params: t5.T5) -> t5.T5:
    """True at weight matrices: not at norms, nor at the small tables of biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim > 1 and "bias" not in jax.tree_util.keystr(path),
        params,
    )


def init_state(
    model: t5.T5, config: OptimizerConfig, key: Key[Array, ""]
) -> TrainState:
    """The state before the first step."""
    # One buffer each: donation refuses an array that stands in the state twice.
    zero = [jnp.array(0, jnp.int32) for _ in range(3)]
    return TrainState(
        model=model,
        opt_state=optimizer(config).init(model),
        step=zero[0],
        key=key,
        epoch=zero[1],
        index=zero[2],
    )


def teacher_forced(
    model: t5.T5, batch: Batch, dropout_key: Key[Array, ""] | None = None
) -> Float[Array, "B T V"]:
    """Logits of each target token given the source and the targets before it."""
    encode_key = decode_key = None
    if dropout_key is not None:
        encode_key, decode_key = jax.random.split(dropout_key)
    encoded = model.encode(batch.inputs, batch.inputs_mask, dropout_key=encode_key)
    fed = losses.shift_right(batch.targets, model.config.pad_id)
    output, _ = model.decode(fed, None, encoded, dropout_key=decode_key)
    return output.logits


@partial(
    jax.jit,
    static_argnames=("config", "label_smoothing", "divergence"),
    donate_argnums=0,
)
def train_step(
    state: TrainState,
    batch: Batch,
    *,
    config: OptimizerConfig,
    label_smoothing: float = 0.0,
    target: t5.T5 | None = None,
    divergence: distill.Divergence | None = None,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One step of AdamW on the mean loss of the batch's target tokens.

    With a `target` the loss is the divergence from its laws on these texts instead of
    the cross entropy of the texts themselves.

    Args:
        state: donated: use the returned one from here on.
        batch: the batch at ``(state.epoch, state.index)``; the caller moves these on.
        config: of the optimizer.
        label_smoothing: see `losses.token_loss`.
        target: the model to distil, with `divergence`; its logits stay on the device.
        divergence: from the target's laws.

    Returns:
        The next state, and ``loss``, ``nll``, ``tokens``, ``grad_norm`` and
        ``learning_rate`` of this step; with a target ``alpha`` too.
    """
    dropout_key = jax.random.fold_in(state.key, state.step)
    taught = None if target is None else teacher_forced(target, batch)

    def mean_loss(
        model: t5.T5,
    ) -> tuple[jax.Array, tuple[losses.TokenLoss, dict[str, jax.Array]]]:
        logits = teacher_forced(model, batch, dropout_key)
        sums = losses.token_loss(
            logits, batch.targets, batch.targets_mask, label_smoothing
        )
        count = jnp.maximum(sums.tokens, 1.0)
        if taught is None or divergence is None:
            return sums.loss / count, (sums, {})
        apart = distill.distill_loss(taught, logits, batch.targets_mask, divergence)
        return apart.loss / count, (sums, {"alpha": apart.alpha / count})

    (loss, (sums, more)), grads = jax.value_and_grad(mean_loss, has_aux=True)(
        state.model
    )
    updates, opt_state = optimizer(config).update(grads, state.opt_state, state.model)
    metrics = {
        "loss": loss,
        "nll": sums.nll / jnp.maximum(sums.tokens, 1.0),
        "tokens": sums.tokens,
        "grad_norm": jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))),
        "learning_rate": jnp.asarray(learning_rate(config)(state.step), jnp.float32),
        **more,
    }
    state = state.replace(
        model=optax.apply_updates(state.model, updates),
        opt_state=opt_state,
        step=state.step + 1,
    )
    return state, metrics


@jax.jit
def eval_step(model: t5.T5, batch: Batch) -> losses.TokenLoss:
    """Sums of loss and hits over one batch, without dropout or smoothing."""
    logits = teacher_forced(model, batch)
    return losses.token_loss(logits, batch.targets, batch.targets_mask)


@partial(jax.jit, static_argnames="divergence")
def eval_distill_step(
    model: t5.T5, target: t5.T5, batch: Batch, divergence: distill.Divergence
) -> distill.DistillLoss:
    """The same of the divergence from a target's laws."""
    taught, logits = teacher_forced(target, batch), teacher_forced(model, batch)
    return distill.distill_loss(taught, logits, batch.targets_mask, divergence)
