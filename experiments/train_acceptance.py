"""Trains a head that predicts which tokens of a draft stand, on the target's texts.

    python -m experiments.train_acceptance --config=configs/repair_acceptance.py \
        --input=FILE --workdir=DIR

The target writes an output to each source of the file; there the chance that a drafted
token stands is known exactly. Best are sources that neither model has learnt from.
Writes DIR/head, which ``config.draft.length.acceptance.head`` names, DIR/manifest.json
and DIR/metrics.json: the loss on lines that were held out, in nats a place, beside that
of a constant and the least that there can be.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from jaxtyping import Float32

from configs import repair_acceptance
from experiments import baseline, build, command, input_lines
from specjax import errors
from specjax.data import batches, pairs
from specjax.data import tokenizer as tokenizers
from specjax.drafters import files
from specjax.models import t5_weights
from specjax.models.t5 import T5
from specjax.pair import load_model
from specjax.sampling import Sampling
from specjax.training import acceptance


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    build.check_settings(config, repair_acceptance.get_config())
    build.positive(config, "batch_size", "hidden", "steps")
    build.check_max_length(config)
    build.check_limit(config)
    buckets = build.buckets(config)
    if not 0 < config.held_out < 1:
        raise errors.InputError(
            f"config.held_out is {config.held_out}: a share between 0 and 1"
        )
    if not config.learning_rate > 0:
        raise errors.InputError(
            f"config.learning_rate is {config.learning_rate}: a number above 0"
        )
    path = input_lines.input_file(values.input or config.input)
    sources = [pair.source for pair in pairs.load_pairs(path)][: config.limit or None]
    folders = {
        role: build.checkpoint_folder(config[role].checkpoint, f"{role}.checkpoint")
        for role in ("target", "draft")
    }
    target, tokenizer, num_tokens = load_model(folders["target"])
    draft, own, _ = load_model(folders["draft"], role="draft")
    tokenizers.check_same_tokenizer(tokenizer, own)
    temperature = ml_collections.ConfigDict(
        dict(temperature=config.temperature, top_k=None, top_p=None)
    )
    sampling = (
        Sampling(temperature=None, num_tokens=num_tokens)
        if config.temperature is None
        else build.build_sampling(temperature, "temperature", num_tokens)
    )
    rows = [tokenizer.encode(source) for source in sources]
    input_lines.check_lengths(rows, buckets, path)
    held = round(len(rows) * config.held_out)
    if not 0 < held < len(rows):
        raise errors.InputError(
            f"config.held_out is {config.held_out} of {len(rows)} lines: at least one "
            "must be held out, and one learnt from"
        )

    prints = {role: t5_weights.fingerprint(own) for role, own in folders.items()}
    workdir.mkdir(parents=True, exist_ok=True)
    command.write_json(
        workdir / "manifest.json",
        command.manifest(config, input=str(path), lines=len(rows), weights=prints),
    )
    keys = build.row_keys(config.seed, len(rows))
    options: dict[str, Any] = dict(
        sampling=sampling,
        buckets=buckets,
        batch_size=config.batch_size,
        max_length=config.max_length,
    )
    inputs, wanted = places(target, draft, rows[held:], keys[held:], **options)
    head = acceptance.fit_head(
        jnp.asarray(inputs),
        jnp.asarray(wanted),
        jax.random.key(config.seed),
        hidden=config.hidden,
        steps=config.steps,
        learning_rate=config.learning_rate,
        draft=prints["draft"],
    )
    result = {"places": len(wanted), "acceptance": float(np.mean(wanted))}
    unseen, truth = places(target, draft, rows[:held], keys[:held], **options)
    result |= {
        "held_out_places": len(truth),
        "loss": loss(np.asarray(head.logits(jnp.asarray(unseen))), truth),
        "loss_of_a_constant": loss(np.full(len(truth), _log_odds(wanted)), truth),
        "least_loss": least_loss(truth),
    }
    kept: Any = head  # no drafter, but kept as one
    files.save_drafter(kept, workdir / "head", prints["target"], about=result)
    command.write_json(workdir / "metrics.json", result)
    print(json.dumps(result, indent=2))


def places(
    target: T5,
    draft: T5,
    rows: list[list[int]],
    keys: jax.Array,
    *,
    sampling: Sampling,
    buckets: tuple[int, ...],
    batch_size: int,
    max_length: int,
) -> tuple[Float32[np.ndarray, "N F"], Float32[np.ndarray, " N"]]:
    """Inputs of the head and acceptance at each token that the target writes.

    Args:
        target: writes and judges.
        draft: whose tokens are judged.
        rows: ids of the sources.
        keys: one per source.
        sampling: of both.
        buckets: source lengths that are padded to.
        batch_size: sources that are decoded together.
        max_length: decoder tokens, start token included.
    """
    inputs, wanted = [], []
    for part in batches.inference_batches(rows, batch_size, buckets):
        output = baseline.decode(target, part, keys, sampling, max_length)
        examples = acceptance.acceptance_examples(
            target,
            draft,
            jnp.asarray(part.inputs),
            jnp.asarray(part.mask),
            output.tokens[:, :-1],
            sampling,
        )
        written = np.arange(1, max_length)[None] < np.asarray(output.length)[:, None]
        written &= np.asarray(part.valid)[:, None]
        inputs.append(np.asarray(examples.inputs)[written])
        wanted.append(np.asarray(examples.acceptance)[written])
    return np.concatenate(inputs), np.concatenate(wanted)


def loss(logits: np.ndarray, wanted: np.ndarray) -> float:
    """Mean cross entropy of log-odds against probabilities, in nats."""
    given = (jnp.asarray(own, jnp.float32) for own in (logits, wanted))
    return float(jnp.mean(acceptance.cross_entropy(*given)))


def least_loss(wanted: np.ndarray) -> float:
    """The loss of who knows the probabilities: their mean entropy."""
    sure = np.clip(wanted.astype(np.float64), 1e-12, 1 - 1e-12)
    return float(-np.mean(sure * np.log(sure) + (1 - sure) * np.log1p(-sure)))


def _log_odds(wanted: np.ndarray) -> float:
    mean = float(np.clip(np.mean(wanted), 1e-6, 1 - 1e-6))
    return float(np.log(mean / (1 - mean)))


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("input", None, "File of pairs.", flag_values=values)


if __name__ == "__main__":
    command.run(main, define=_define)
