"""The settings of a training run, as records, and refused where they mean nothing."""

from __future__ import annotations

import dataclasses
import pathlib

import jax.numpy as jnp
import ml_collections

from configs import repair_target
from experiments import build
from specjax import errors
from specjax.data import tokenizer
from specjax.models import t5, t5_config
from specjax.pair import load_model
from specjax.training import distill, step

INITS = ("mimetic", "dictionary", "random")

# Of the exported model; trained weights fit into all of them.
STORED = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}


def model_config(config: ml_collections.ConfigDict) -> t5_config.T5Config:
    """The model's shape from ``config.model``."""
    return t5_config.T5Config(**config.model)


def optimizer_config(config: ml_collections.ConfigDict) -> step.OptimizerConfig:
    """The optimizer's settings from ``config.optimizer``."""
    return step.OptimizerConfig(**config.optimizer)


def check(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that mean nothing, before any work.

    Raises:
        errors.InputError: naming the setting.
    """
    known = repair_target.get_config()
    # Every field of these two records may be set.
    for name, record in (
        ("model", t5_config.T5Config),
        ("optimizer", step.OptimizerConfig),
    ):
        fields = {field.name for field in dataclasses.fields(record)}
        unknown = sorted(set(config.get(name, {})) - fields)
        if unknown:
            raise errors.InputError(f"config.{name} has no setting {unknown[0]}")
        known[name] = config.get(name, {})
    build.check_settings(config, known)
    build.positive(config, "log_every", "evaluate_every", "checkpoint_every", "keep")
    build.positive(
        config.data, "max_tokens", "tokens_per_batch", "validation_rows", path="data."
    )
    build.buckets(config.data, "data.")
    build.row_keys(config.seed, 1)
    build.named(STORED, config.export.dtype, "export.dtype")
    if not 0 <= config.label_smoothing < 1:
        raise errors.InputError(
            f"config.label_smoothing is {config.label_smoothing}: in [0, 1)"
        )
    model_config(config)
    step.check_optimizer(optimizer_config(config), "config.optimizer")
    distill.check_divergence(divergence_config(config), "config.distill")
    if config.distill.target and config.label_smoothing:
        raise errors.InputError(
            f"config.label_smoothing is {config.label_smoothing} and config.distill "
            "names a target, whose laws take the place of labels: set it to 0"
        )
    folder = pathlib.Path(config.data.folder)
    if not config.data.folder or not folder.is_dir():
        raise errors.InputError(
            f"config.data.folder is {config.data.folder!r}: name the folder that "
            "holds train.jsonl, validation.jsonl and the tokenizer"
        )
    if config.init not in INITS and not pathlib.Path(config.init).is_dir():
        raise errors.InputError(
            f"config.init is {config.init!r}: it must be {', '.join(INITS)} or the "
            "directory of a trained model"
        )


def load_target(
    config: ml_collections.ConfigDict,
) -> tuple[t5.T5 | None, distill.Divergence | None]:
    """The model to distil and the divergence from it; None where none is named.

    Raises:
        errors.InputError: the folder is no model's, or has another tokenizer.
    """
    if not config.distill.target:
        return None, None
    folder = build.checkpoint_folder(config.distill.target, "distill.target")
    target, own, _ = load_model(folder)
    tokenizer.check_same_tokenizer(own, tokenizer.load_tokenizer(config.data.folder))
    return target, divergence_config(config)


def divergence_config(config: ml_collections.ConfigDict) -> distill.Divergence:
    """The divergence from ``config.distill``."""
    settings = config.distill.to_dict()
    settings.pop("target")
    return distill.Divergence(**settings)
