"""The optimizer of a run: its settings, its schedule, and what they make in optax."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from specjax import errors

PyTree = Any

NAMES = ("adamw", "adafactor")
SCHEDULES = ("cosine", "trapezoid", "inverse_sqrt")

# Field -> the one value of the setting under which it is read.
_READ_UNDER = {
    "b1": ("name", "adamw"),
    "b2": ("name", "adamw"),
    "momentum": ("name", "adafactor"),
    "multiply_by_parameter_scale": ("name", "adafactor"),
    "decay_steps": ("schedule", "trapezoid"),
}


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW or Adafactor with a warm-up, a decay, and clipping of the gradient.

    T5 was trained with Adafactor, scaled by its parameters, without weight decay and
    without clipping of the global norm: ``name="adafactor", schedule="inverse_sqrt",
    learning_rate=0.01, warmup_steps=10_000, weight_decay=0.0, clip=inf``; it was
    fine-tuned at a constant 0.001.

    Attributes:
        name: "adamw" (Loshchilov & Hutter 2019, arXiv:1711.05101) or "adafactor"
            (Shazeer & Stern 2018, arXiv:1804.04235) with T5's settings.
        learning_rate: peak. Of an Adafactor that multiplies by the parameters' scale
            it is relative: 0.01 changes a matrix by about a hundredth of its size.
        warmup_steps: linear from 0 to the peak.
        steps: length of the run; the decay ends here.
        schedule: from the peak on. "cosine": down to a twentieth of it at the end.
            "trapezoid": constant, then linear to zero over the last `decay_steps`, so
            that a run can still be made longer before these begin. "inverse_sqrt":
            ``peak * sqrt(warmup_steps / step)``. T5 (arXiv:1910.10683) writes
            ``1 / sqrt(max(step, k))``: that is ``warmup_steps=k`` and
            ``learning_rate=k**-0.5`` from step k on; before it T5 stands at the peak,
            to which this rises.
        decay_steps: of the trapezoid.
        weight_decay: decoupled, times the learning rate; matrices only, not norms or
            bias tables.
        clip: largest global norm of the gradient; inf clips nothing.
        b1: of AdamW: decay of the first moment.
        b2: of AdamW: decay of the second moment.
        momentum: of Adafactor: decay of the first moment; 0 keeps none.
        multiply_by_parameter_scale: of Adafactor: steps are relative to the root mean
            square of what they change (at least 1e-3).
    """

    name: str = "adamw"
    learning_rate: float = 1.5e-3
    warmup_steps: int = 150
    steps: int = 1000
    schedule: str = "trapezoid"
    decay_steps: int = 300
    weight_decay: float = 0.01
    clip: float = 1.0
    b1: float = 0.9
    b2: float = 0.98
    momentum: float = 0.0
    multiply_by_parameter_scale: bool = True


def check_optimizer(config: OptimizerConfig, name: str) -> None:
    """Refuses settings that mean nothing, and those that nothing would read.

    Args:
        config: the settings.
        name: how the caller names them, for the message.

    Raises:
        errors.InputError: naming the first that is wrong.
    """
    at_least = dict(warmup_steps=0, steps=1, decay_steps=0, weight_decay=0)
    for field, least in at_least.items():
        if not getattr(config, field) >= least:
            raise errors.InputError(
                f"{name}.{field} is {getattr(config, field)}: at least {least}"
            )
    for field in ("learning_rate", "weight_decay"):
        if getattr(config, field) == math.inf:
            raise errors.InputError(f"{name}.{field} is inf: it must be a number")
    for field in ("learning_rate", "clip"):
        if not getattr(config, field) > 0:
            raise errors.InputError(
                f"{name}.{field} is {getattr(config, field)}: above 0"
            )
    for field in ("b1", "b2", "momentum"):
        if not 0 <= getattr(config, field) < 1:
            raise errors.InputError(
                f"{name}.{field} is {getattr(config, field)}: in [0, 1)"
            )
    optimizer(config)  # knows the optimizers and the schedules
    defaults = OptimizerConfig()
    for field, (setting, reader) in _READ_UNDER.items():
        value, default = getattr(config, field), getattr(defaults, field)
        if value != default and getattr(config, setting) != reader:
            raise errors.InputError(
                f"{name}.{field} is {value}, which is read where {name}.{setting} is "
                f"{reader!r} alone, and it is {getattr(config, setting)!r}: leave "
                f"{field} at {default}, its default"
            )


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """The schedule: step -> learning rate.

    Raises:
        errors.InputError: the schedule is unknown.
    """
    peak, warmup = config.learning_rate, max(config.warmup_steps, 1)
    if config.schedule == "cosine":
        cosine = optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup, max(config.steps, warmup + 1), end_value=peak / 20
        )
        return lambda step: cosine(step + 1)  # the first step moves too
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
        f"the schedule {config.schedule!r} is unknown: it must be one of "
        f"{', '.join(SCHEDULES)}"
    )


def optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optimizer of `config`, on its schedule, behind the clipping.

    Raises:
        errors.InputError: the optimizer or the schedule is unknown.
    """
    rate = learning_rate(config)
    if config.name == "adamw":
        rule = optax.adamw(
            rate,
            b1=config.b1,
            b2=config.b2,
            weight_decay=config.weight_decay,
            mask=_decays,
        )
    elif config.name == "adafactor":
        rule = _adafactor(config, rate)
    else:
        raise errors.InputError(
            f"the optimizer {config.name!r} is unknown: it must be one of "
            f"{', '.join(NAMES)}"
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), rule)


def _adafactor(
    config: OptimizerConfig, rate: optax.Schedule
) -> optax.GradientTransformation:
    """T5's Adafactor; `optax.adafactor` but for stacks and for weight decay.

    The second moment of a matrix is kept as the means of its rows and of its columns
    (where there are 128 or more of both), and decays by ``1 - step**-0.8``; an update
    whose root mean square is above 1 is scaled down to it.

    An array that stacks matrices (q, k and v; the two inputs of a gate) counts as the
    matrices apart, as in T5: there q is ``d_kv**0.5`` times smaller than k, and with
    one scale for both it would move as many times too fast. Weight decay is multiplied
    by the learning rate, as in AdamW.
    """
    clipped = optax.stateless_with_tree_map(lambda u, _: u / jnp.maximum(_rms(u), 1.0))
    scaled = optax.stateless_with_tree_map(
        lambda u, param: u * jnp.maximum(_rms(param), 1e-3)
    )
    return optax.chain(
        optax.scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=128),
        clipped,
        scaled if config.multiply_by_parameter_scale else optax.identity(),
        optax.ema(config.momentum, debias=False)
        if config.momentum
        else optax.identity(),
        optax.add_decayed_weights(config.weight_decay, mask=_decays),
        optax.scale_by_learning_rate(rate),
    )


def _rms(x: jax.Array) -> jax.Array:
    """Root mean square of a vector, or of each matrix of a stack."""
    axes = tuple(range(x.ndim))[-2:]
    return jnp.sqrt(jnp.mean(x * x, axis=axes, keepdims=True))


def _decays(params: PyTree) -> PyTree:
    """True at weight matrices: not at norms, nor at the small tables of biases."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf.ndim > 1 and "bias" not in jax.tree_util.keystr(path),
        params,
    )
