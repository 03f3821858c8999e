"""The state of a training run: as it starts, and as an earlier run has left it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections

from configs import repair_target
from experiments import train_data, train_settings
from specjax import checkpoints, errors
from specjax.models import t5, t5_weights
from specjax.training import alignment, draft_init, init, step

# What a resumed run may change without becoming another run.
_FREE_SETTINGS = (
    "log_every",
    "evaluate_every",
    "decode_every",
    "evaluate",
    "checkpoint_every",
    "keep",
    "best",
    "tensorboard",
    "measure_peak",
    "export",
)


def initial_state(
    config: ml_collections.ConfigDict,
    examples: Sequence[train_data.Example],
    target: t5.T5 | None = None,
) -> step.TrainState:
    """The state before the first step, as ``config.init`` says.

    Args:
        config: see `configs/repair_target.py`.
        examples: the training examples, which "dictionary" reads.
        target: whose layers "target" takes.

    Raises:
        errors.InputError: the model in the directory ``config.init``, or the layers of
            the target, have not the shape ``config.model``.
    """
    model_key, run_key = jax.random.split(jax.random.key(config.seed))
    shape = train_settings.model_config(config)
    if config.init == "mimetic":
        model = init.mimetic_init(_random_model(shape, model_key))
    elif config.init == "dictionary":
        model = init.dictionary_init(
            _random_model(shape, model_key),
            alignment.align(examples, shape.vocab_size),
            # Beside the two keys above, which are numbers 0 and 1.
            jax.random.fold_in(jax.random.key(config.seed), 2),
        )
    elif config.init == "random":
        model = _random_model(shape, model_key)
    else:
        if config.init == "target" and target is not None:
            layers = config.init_layers
            model = draft_init.draft_from_target(
                target, tuple(layers.encoder), tuple(layers.decoder)
            )
        else:
            model = t5_weights.load_t5(config.init)
        found = dataclasses.replace(model.config, dropout_rate=shape.dropout_rate)
        if found != shape:
            raise errors.InputError(
                f"config.init={config.init} gives {found}, config.model asks for "
                f"{shape}"
            )
        model.config = shape
    return step.init_state(model, train_settings.optimizer_config(config), run_key)


# One program: made operation by operation, each shape would compile for itself.
_random_model = jax.jit(t5.T5, static_argnums=0)


def template(config: ml_collections.ConfigDict) -> step.TrainState:
    """A state of the run's structure, for a checkpoint to fill."""
    shape = train_settings.model_config(config)
    model = _random_model(shape, jax.random.key(0))
    return step.init_state(
        model, train_settings.optimizer_config(config), jax.random.key(0)
    )


def restore(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    show: Callable[[str], None],
) -> checkpoints.Restored | None:
    restored = checkpoints.restore(workdir / "checkpoints", template(config))
    if restored is None:
        return None
    # What a run from before a setting was made did, is what the setting is as shipped.
    default = _flat(repair_target.get_config().to_dict())
    saved, now = _flat(restored.config), _flat(config.to_dict())
    for name in sorted(now.keys() | saved.keys()):
        old, new = (own.get(name, default.get(name)) for own in (saved, now))
        section = name.partition(".")[0]
        if old == new or section in (*_FREE_SETTINGS, "fingerprints"):
            continue
        if section != "optimizer":
            raise errors.InputError(
                f"{workdir} holds a run with config.{name} = {old}, not {new}: resume "
                "with the same settings or take another --workdir"
            )
        show(f"config.{name} is now {new}, was {old}")
    show(f"resumed at step {restored.step} of {config.optimizer.steps}")
    return restored


def _flat(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by their whole names, as they come back from JSON."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{path}{name}.")
        else:
            flat[path + name] = list(value) if isinstance(value, tuple) else value
    return flat


def check_same_data(
    saved: dict[str, Any], data: train_data.Data, workdir: pathlib.Path
) -> None:
    before = saved.get("fingerprints", {})
    for name, own in data.fingerprints.items():
        if before.get(name, own) != own:
            raise errors.InputError(
                f"{workdir} holds a run with another {name.removesuffix('s')}: the "
                f"files of config.data have changed since; put the old {name} back or "
                "take another --workdir"
            )
