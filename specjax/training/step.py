"""One training step: a pure function of a frozen state and a batch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from specjax import errors
from specjax.models import dense, shared_encoder, t5
from specjax.models.base import DecoderOutput
from specjax.training import distill, layer_skip, losses, optimizer

# In place of a type to compute in: float32, but for products of bfloat16 factors.
PRODUCTS = "bfloat16_products"
_COMPUTE = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16))


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
        model: the T5 in training, or the drafter.
        opt_state: of the optimizer: moments and counts.
        step: steps taken.
        key: the run's key; micro-batch m of step s draws its dropout from
            ``fold_in(fold_in(key, s), m)``; a drafter draws from the former.
        epoch: pass over the data that the next batch belongs to.
        index: number of the next batch within its epoch.
    """

    model: Any
    opt_state: optax.OptState
    step: Int[Array, ""]
    key: Key[Array, ""]
    epoch: Int[Array, ""]
    index: Int[Array, ""]


def init_state(
    model: Any, config: optimizer.OptimizerConfig, key: Key[Array, ""]
) -> TrainState:
    """The state before the first step."""
    # One buffer each: donation refuses an array that stands in the state twice.
    zero = [jnp.array(0, jnp.int32) for _ in range(3)]
    return TrainState(
        model=model,
        opt_state=optimizer.optimizer(config).init(model),
        step=zero[0],
        key=key,
        epoch=zero[1],
        index=zero[2],
    )


def teacher_forced(
    model: t5.T5 | shared_encoder.SharedEncoderDraft,
    batch: Batch,
    dropout_key: Key[Array, ""] | None = None,
) -> Float[Array, "B T V"]:
    """Logits of each target token given the source and the targets before it."""
    return forced_output(model, batch, dropout_key).logits


def forced_output(
    model: t5.T5 | shared_encoder.SharedEncoderDraft,
    batch: Batch,
    dropout_key: Key[Array, ""] | None = None,
    taps: tuple[int, ...] = (),
) -> DecoderOutput:
    """The same with outputs of layers.

    Args:
        taps: which; see `T5.decode`.
    """
    encode_key = decode_key = None
    if dropout_key is not None:
        encode_key, decode_key = jax.random.split(dropout_key)
    encoded = model.encode(batch.inputs, batch.inputs_mask, dropout_key=encode_key)
    fed = losses.shift_right(batch.targets, model.config.pad_id)
    output, _ = model.decode(fed, None, encoded, taps=taps, dropout_key=decode_key)
    return output


def mean_gradients(
    model: t5.T5,
    batch: Batch,
    key: Key[Array, ""],
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    accumulate: int = 1,
    compute_dtype: DTypeLike | None = None,
    target: t5.T5 | None = None,
    divergence: distill.Divergence | None = None,
    skip: layer_skip.LayerSkip | None = None,
) -> tuple[t5.T5, dict[str, Float[Array, ""]]]:
    """Gradients of the mean loss of a batch's target tokens; arguments of `train_step`.

    Micro-batches are summed after each of their tokens was divided by the number of
    tokens of the *whole* batch, so that a token weighs the same wherever it stands.

    Args:
        key: of the step; micro-batch m draws its dropout from ``fold_in(key, m)``.

    Returns:
        Gradients of the type of the parameters, and ``loss``, ``nll``, ``tokens``;
        ``z_loss``, ``exit_loss`` and, with a target, ``alpha`` where they apply.

    Raises:
        errors.InputError: arguments that do not fit together.
    """
    _check(batch, label_smoothing, z_loss, accumulate, compute_dtype)
    if (target is None) != (divergence is None):
        raise errors.InputError("a target and a divergence are given together, or none")
    if target is not None and label_smoothing:
        raise errors.InputError(
            f"label_smoothing is {label_smoothing}, and a target is given, whose laws "
            "take the place of labels: set it to 0"
        )
    if skip is not None:
        layer_skip.check_layer_skip(skip, len(model.decoder), "skip")
        if target is not None:
            raise errors.InputError(
                "skip is given, which trains a target for early exits, and a target "
                "to distil: give one of them"
            )
    early = skip is not None and skip.exit_loss > 0
    rounds = compute_dtype is PRODUCTS
    master = dense.rounded(target) if rounds and target is not None else target
    tokens = jnp.sum(batch.targets_mask, dtype=jnp.float32)
    count = jnp.maximum(tokens, 1.0)

    def share(
        computing: t5.T5, rows: Batch, number: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        if rounds:
            computing = dense.rounded(computing)
        own = jax.random.fold_in(key, number)
        # Dropout splits it in two.
        layers_key, exit_key = (jax.random.fold_in(own, purpose) for purpose in (2, 3))
        if skip is not None and skip.layer_dropout:
            computing = layer_skip.drop_layers(
                computing, skip.layer_dropout, layers_key
            )
        taps = tuple(range(len(computing.decoder) - 1)) if early else ()
        whole = shared_encoder.whole(computing, master)
        output = forced_output(whole, rows, own, taps)
        logits = output.logits
        sums = losses.token_loss(
            logits, rows.targets, rows.targets_mask, label_smoothing, z_loss
        )
        shares = {"loss": sums.loss, "nll": sums.nll}
        if z_loss:
            shares["z_loss"] = sums.z_loss
        if skip is not None and early:
            exits = layer_skip.exit_logits(computing, output.features, exit_key)
            at_exit = losses.token_loss(exits, rows.targets, rows.targets_mask)
            shares["exit_loss"] = at_exit.loss
            shares["loss"] = shares["loss"] + skip.exit_loss * at_exit.loss
        if master is not None and divergence is not None:
            taught = teacher_forced(master, rows)
            apart = distill.distill_loss(
                taught, logits, rows.targets, rows.targets_mask, divergence
            )
            shares |= {"loss": apart.loss + sums.z_loss, "alpha": apart.alpha}
        shares = {name: value / count for name, value in shares.items()}
        return shares["loss"], shares

    computing = _cast(model, compute_dtype)
    gradients = jax.grad(share, has_aux=True)

    def add(total: t5.T5, group: tuple[Batch, jax.Array]) -> tuple[t5.T5, dict]:
        grads, shares = gradients(computing, *group)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), shares

    if accumulate == 1:
        grads, shares = gradients(computing, batch, jnp.array(0))
    else:
        # Every accumulate-th row: a batch spread over devices stays on all of them.
        groups = jax.tree.map(
            lambda x: x.reshape(-1, accumulate, *x.shape[1:]).swapaxes(0, 1), batch
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), model)
        grads, stacked = jax.lax.scan(add, zeros, (groups, jnp.arange(accumulate)))
        shares = jax.tree.map(lambda x: jnp.sum(x, axis=0), stacked)
    grads = jax.tree.map(lambda g, param: g.astype(param.dtype), grads, model)
    return grads, shares | {"tokens": tokens}


def _check(
    batch: Batch,
    label_smoothing: float,
    z_loss: float,
    accumulate: int,
    compute_dtype: DTypeLike | None,
) -> None:
    rows = batch.targets.shape[0]
    if accumulate < 1 or rows % accumulate:
        raise errors.InputError(
            f"accumulate is {accumulate}, and the batch has {rows} rows: it must be at "
            "least 1 and divide them evenly"
        )
    if not 0 <= label_smoothing < 1:
        raise errors.InputError(f"label_smoothing is {label_smoothing}: in [0, 1)")
    if not z_loss >= 0:
        raise errors.InputError(f"z_loss is {z_loss}: at least 0")
    known = compute_dtype is None or compute_dtype is PRODUCTS
    if not known and jnp.dtype(compute_dtype) not in _COMPUTE:
        raise errors.InputError(
            f"compute_dtype is {jnp.dtype(compute_dtype)}: float32, bfloat16, "
            f"{PRODUCTS} or None; T5's activations overflow float16"
        )


def _cast(model: t5.T5, dtype: DTypeLike | None) -> t5.T5:
    if dtype is None or dtype is PRODUCTS:
        return model
    return jax.tree.map(lambda x: x.astype(dtype), model)


@partial(
    jax.jit,
    static_argnames=(
        "config",
        "label_smoothing",
        "z_loss",
        "accumulate",
        "compute_dtype",
        "divergence",
        "skip",
    ),
    donate_argnums=0,
)
def train_step(
    state: TrainState,
    batch: Batch,
    *,
    config: optimizer.OptimizerConfig,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    accumulate: int = 1,
    compute_dtype: DTypeLike | None = None,
    target: t5.T5 | None = None,
    divergence: distill.Divergence | None = None,
    skip: layer_skip.LayerSkip | None = None,
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """One step of the optimizer on the mean loss of the batch's target tokens.

    With a `target` the loss is the divergence from its laws on these texts instead of
    the cross entropy of the texts themselves.

    Memory: with `accumulate` the activations and logits of one micro-batch stand at a
    time, which is 1 / accumulate of the batch's, beside one more copy of the gradients;
    the step is the plain step's up to rounding (with dropout: and to other masks).
    Computing in bfloat16 adds a copy of the parameters in it and halves activations.

    Args:
        state: donated: use the returned one from here on.
        batch: the batch at ``(state.epoch, state.index)``; the caller moves these on.
        config: of the optimizer.
        label_smoothing: see `losses.token_loss`; 0 with a target.
        z_loss: see `losses.token_loss`; with a target it is added to the divergence.
        accumulate: micro-batches, one after another; divides the rows of the batch.
        compute_dtype: of parameters and activations on the way forward and back:
            float32 or bfloat16. The parameters that are kept, the sum of the
            micro-batches' gradients, the optimizer's state, the logits and the loss
            stay float32. `PRODUCTS`: float32, but for the factors of products with
            weights (`dense.Rounded`). None: that of the parameters.
        target: the model to distil, with `divergence`; its logits stay on the device.
            It computes in its own type; with `PRODUCTS` its factors are rounded too.
        divergence: from the target's laws.
        skip: how a target is trained for early exits; None: it is not.

    Returns:
        The next state, and ``loss``, ``nll``, ``tokens``, ``grad_norm`` and
        ``learning_rate`` of this step; with a z-loss its part ``z_loss`` of the loss,
        with a loss at exits its mean ``exit_loss``, with a target ``alpha`` too.

    Raises:
        errors.InputError: before anything compiles: arguments that do not fit together.
    """
    grads, metrics = mean_gradients(
        state.model,
        batch,
        jax.random.fold_in(state.key, state.step),
        label_smoothing=label_smoothing,
        z_loss=z_loss,
        accumulate=accumulate,
        compute_dtype=compute_dtype,
        target=target,
        divergence=divergence,
        skip=skip,
    )
    state, moved = apply_gradients(state, grads, config)
    return state, metrics | moved


def apply_gradients(
    state: TrainState, grads: Any, config: optimizer.OptimizerConfig
) -> tuple[TrainState, dict[str, Float[Array, ""]]]:
    """The state one step of the optimizer on.

    Args:
        state: before the step.
        grads: of all arrays of its model.
        config: of the optimizer.

    Returns:
        The next state, and ``grad_norm`` and ``learning_rate`` of the step.
    """
    updates, opt_state = optimizer.optimizer(config).update(
        grads, state.opt_state, state.model
    )
    rate = optimizer.learning_rate(config)(state.step)
    metrics = {
        "grad_norm": jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))),
        "learning_rate": jnp.asarray(rate, jnp.float32),
    }
    state = state.replace(
        model=optax.apply_updates(state.model, updates),
        opt_state=opt_state,
        step=state.step + 1,
    )
    return state, metrics


@jax.jit
def eval_step(
    model: t5.T5, batch: Batch, target: t5.T5 | None = None
) -> losses.TokenLoss:
    """Sums of loss and hits over one batch, without dropout or smoothing.

    Args:
        model: what is judged.
        batch: texts that it was not trained on.
        target: whose encoder the model reads, if it has none.
    """
    logits = teacher_forced(shared_encoder.whole(model, target), batch)
    return losses.token_loss(logits, batch.targets, batch.targets_mask)


@partial(jax.jit, static_argnames="divergence")
def eval_distill_step(
    model: t5.T5, target: t5.T5, batch: Batch, divergence: distill.Divergence
) -> distill.DistillLoss:
    """The same of the divergence from a target's laws."""
    taught = teacher_forced(target, batch)
    logits = teacher_forced(shared_encoder.whole(model, target), batch)
    return distill.distill_loss(
        taught, logits, batch.targets, batch.targets_mask, divergence
    )
