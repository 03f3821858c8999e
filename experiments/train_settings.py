"""The settings of a training run, as records, and refused where they mean nothing."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import jax.numpy as jnp
import ml_collections

from configs import repair_target
from experiments import build, teacher, train_log
from specjax import checkpoints, errors, zoo
from specjax.data import batches
from specjax.metrics import text
from specjax.models import t5_config
from specjax.training import distill, layer_skip, optimizer, step, texts

INITS = ("mimetic", "dictionary", "random", "target")

# Of the exported model; trained weights fit into all of them.
STORED = {"float32": jnp.float32, "float16": jnp.float16, "bfloat16": jnp.bfloat16}
# Of parameters and activations within a step; empty: that of the parameters.
COMPUTE = {
    "": None,
    "float32": jnp.float32,
    "bfloat16": jnp.bfloat16,
    step.PRODUCTS: step.PRODUCTS,
}

# What an evaluation writes, and whether more of it is better. Scores of decoded texts
# bear a prefix: `exact_match` alone is counted under teacher forcing.
DECODED = "decoded_"
METRICS = {
    "validation_nll": False,
    "token_accuracy": True,
    "exact_match": True,
    "validation_divergence": False,
    "validation_alpha": True,
    "alpha_greedy": True,
    "alpha_sampled": True,
} | {f"{DECODED}{name}": name not in text.ERRORS for name in text.SCORES}


def model_config(config: ml_collections.ConfigDict) -> t5_config.T5Config:
    """The model's shape from ``config.model``."""
    return t5_config.T5Config(**config.model)


def layer_skip_config(
    config: ml_collections.ConfigDict,
) -> layer_skip.LayerSkip | None:
    """How a target is trained for early exits; None: it is not."""
    how = layer_skip.LayerSkip(config.layer_dropout, config.exit_loss)
    return None if how == layer_skip.LayerSkip() else how


def optimizer_config(config: ml_collections.ConfigDict) -> optimizer.OptimizerConfig:
    """The optimizer's settings from ``config.optimizer``."""
    return optimizer.OptimizerConfig(**config.optimizer)


def check(config: ml_collections.ConfigDict) -> None:
    """Refuses settings that mean nothing, before any work.

    Raises:
        errors.InputError: naming the setting.
    """
    check_run(config, repair_target.get_config(), model=t5_config.T5Config)
    build.positive(config, "accumulate")
    build.positive(config.data, "multiple_of", path="data.")
    build.named(COMPUTE, config.compute_dtype, "compute_dtype")
    if not 0 <= config.label_smoothing < 1:
        raise errors.InputError(
            f"config.label_smoothing is {config.label_smoothing}: in [0, 1)"
        )
    if not 0 <= config.z_loss < math.inf:
        raise errors.InputError(
            f"config.z_loss is {config.z_loss}: a number, at least 0"
        )
    shape = model_config(config)
    layer_skip.check_layer_skip(
        layer_skip.LayerSkip(config.layer_dropout, config.exit_loss),
        shape.num_decoder_layers,
        "config",
    )
    _check_evaluation(config)
    _check_distillation(config)
    if config.init not in INITS:
        init_folder(config)


def init_folder(config: ml_collections.ConfigDict) -> pathlib.Path:
    """The folder of the model that ``config.init`` starts from.

    Raises:
        errors.InputError: there is none.
    """
    if config.init:
        try:
            folder = zoo.locate(config.init).expanduser()
        except errors.InputError as error:
            raise errors.InputError(f"config.init: {error}") from error
        if folder.is_dir():
            return folder
    raise errors.InputError(
        f"config.init is {config.init!r}: it must be {', '.join(INITS)} or the "
        'directory of a trained model; "zoo/..." ships with specjax'
    )


def check_run(
    config: ml_collections.ConfigDict,
    known: ml_collections.ConfigDict,
    **records: type[Any],
) -> None:
    """Refuses what any training run reads and cannot use.

    Args:
        config: the settings.
        known: a config of this command that has all of its settings.
        **records: sections that may set any field of a record.

    Raises:
        errors.InputError: naming the setting.
    """
    for name, record in ({"optimizer": optimizer.OptimizerConfig} | records).items():
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
    try:
        batches.bucket_shapes(config.data.buckets)
    except errors.InputError as error:
        raise errors.InputError(f"config.data.buckets: {error}") from error
    build.row_keys(config.seed, 1)
    build.named(STORED, config.export.dtype, "export.dtype")
    optimizer.check_optimizer(optimizer_config(config), "config.optimizer")
    if config.tensorboard:
        train_log.check_tensorboard()
    folder = pathlib.Path(config.data.folder)
    if not config.data.folder or not folder.is_dir():
        raise errors.InputError(
            f"config.data.folder is {config.data.folder!r}: name the folder that "
            "holds train.jsonl, validation.jsonl and the tokenizer"
        )


def _check_distillation(config: ml_collections.ConfigDict) -> None:
    distill.check_divergence(teacher.divergence(config), "config.distill")
    mixture = teacher.mixture(config)
    texts.check_mixture(mixture, "config.distill.texts")
    layers = config.init_layers
    if config.init != "target" and (layers.encoder or layers.decoder):
        raise errors.InputError(
            f"config.init_layers names layers of the target and config.init is "
            f"{config.init!r}: set config.init=target, or leave them out"
        )
    if config.distill.target:
        if config.label_smoothing:
            raise errors.InputError(
                f"config.label_smoothing is {config.label_smoothing} and "
                "config.distill names a target, whose laws take the place of labels: "
                "set it to 0"
            )
        if layer_skip_config(config) is not None:
            raise errors.InputError(
                "config.layer_dropout or config.exit_loss is set, which train a target "
                "for early exits, and config.distill names a target: leave one out"
            )
        return
    for setting, needs_target in (
        ("config.init=target", config.init == "target"),
        ("config.model.encoder_width", config.model.get("encoder_width") is not None),
        ("config.distill.texts", mixture.truth != 1),
        ("config.distill", teacher.divergence(config) != distill.Divergence()),
    ):
        if needs_target:
            raise errors.InputError(
                f"{setting} is set and config.distill.target empty: name the target"
            )


def _check_evaluation(config: ml_collections.ConfigDict) -> None:
    if config.decode_every < 0:
        raise errors.InputError(
            f"config.decode_every is {config.decode_every}: at least 0 (never)"
        )
    own = config.evaluate
    build.positive(own, "rows", "batch_size", path="evaluate.")
    if own.max_length < 2:
        raise errors.InputError(
            f"config.evaluate.max_length is {own.max_length}: at least 2, the start "
            "token and one more"
        )
    written = {"validation_nll", "token_accuracy", "exact_match"}
    if config.distill.target:
        written |= {name for name in METRICS if "alpha" in name or "diverg" in name}
    if config.decode_every:
        if not own.scores:
            raise errors.InputError(
                f"config.decode_every is {config.decode_every} and "
                f"config.evaluate.scores empty: name some of {', '.join(text.SCORES)}"
            )
        text.check_scores(own.scores, "config.evaluate.scores")
        written |= {f"{DECODED}{name}" for name in own.scores}
    if config.best and config.best not in METRICS:
        raise errors.InputError(
            f"config.best is {config.best!r}: a metric, {', '.join(METRICS)}, or empty"
        )
    if config.best and config.best not in written:
        raise errors.InputError(
            f"config.best is {config.best!r}, which this run does not measure; it "
            f"measures {', '.join(sorted(written))}"
        )
    if config.export.which not in ("last", "best"):
        raise errors.InputError(
            f"config.export.which is {config.export.which!r}: last or best"
        )
    if config.export.which == "best" and not config.best:
        raise errors.InputError(
            "config.export.which is 'best' and config.best empty: name the metric"
        )


def best(config: ml_collections.ConfigDict) -> checkpoints.Best | None:
    """Which checkpoint stays as the best, from ``config.best``; None: none does."""
    if not config.best:
        return None
    return checkpoints.Best(config.best, largest=METRICS[config.best])
