"""Trains a drafter with weights of its own to say what its target says, block by block.

    python -m experiments.train_drafter --config=configs/train_drafter.py \
        --config.kind=KIND --config.data.folder=DATA --config.data.train=FILE \
        --workdir=DIR

A run that was stopped goes on where it was. Evaluations log ``expected_length``, the
drafted tokens per block that stand at temperature 1, ``expected_length_greedy``, and
the share accepted by slot: ``acceptance_1`` is that of the first drafted token.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
from absl import flags

from configs import train_drafter as default
from experiments import (
    build,
    build_drafter,
    command,
    train_data,
    train_log,
    train_settings,
    train_state,
)
from experiments.train import check_finite
from specjax import checkpoints, errors
from specjax.data import batches, tokenizer
from specjax.drafters import files
from specjax.models import t5_weights
from specjax.models.t5 import T5
from specjax.pair import load_model
from specjax.report import card
from specjax.training import distill, slots, step, texts

# Beside the run's own, for what evaluations draw by chance: the same each time.
_HELD_OUT = 2**32 - 2
# Whether the factors of products are rounded, by ``config.compute_dtype``.
COMPUTE = {"": False, step.PRODUCTS: True}


def train(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    show: Callable[[str], None] = print,
) -> step.TrainState:
    """Trains to ``config.optimizer.steps``, from the newest checkpoint if there is one.

    Args:
        config: see `configs/train_drafter.py`.
        workdir: receives `manifest.json`, `train.jsonl`, `tensorboard/` if asked for,
            `checkpoints/`, `metrics.json` (the last evaluation) and, at the end,
            `export/`: the drafter's folder, with a card.
        show: prints a line.

    Returns:
        The last state, whose model is the drafter.

    Raises:
        errors.InputError: a setting or a file is wrong, or `workdir` holds another run.
    """
    how = check(config)
    optimizer = train_settings.optimizer_config(config)
    folder = build.checkpoint_folder(config.target, "target")
    target, pieces, num_tokens = load_model(folder)
    tokenizer.check_same_tokenizer(pieces, tokenizer.load_tokenizer(config.data.folder))
    fingerprint = t5_weights.fingerprint(folder)
    state = initial_state(config, target, fingerprint)
    state.model.nodes(config.gamma)  # what it cannot draft, it cannot be trained for
    workdir.mkdir(parents=True, exist_ok=True)
    restored = checkpoints.restore(
        workdir / "checkpoints",
        state,
        check=lambda saved: train_state.check_same_run(config, saved, workdir, show),
    )
    data = train_data.read_data(config, pieces, show)
    fingerprints = data.fingerprints | {"target": fingerprint}
    if restored is not None:
        show(f"resumed at step {restored.step} of {optimizer.steps}")
        train_state.check_same_files(restored.config, fingerprints, workdir)
        checkpoints.set_aside(workdir / "checkpoints", restored.skipped)
        state = restored.state
    number = first = int(state.step)
    if first > optimizer.steps:
        raise errors.InputError(
            f"{workdir} holds a run of {first} steps, past config.optimizer.steps = "
            f"{optimizer.steps}: ask for more"
        )
    manifest = command.manifest(
        config,
        first_step=first,
        starts=train_log.starts(workdir, first),
        train_rows=len(data.train),
        validation_rows=len(data.sources),
        too_long=data.dropped,
    )
    command.write_json(workdir / "manifest.json", manifest)
    held_out, key = data.validation, jax.random.key(_HELD_OUT)
    if config.data.rewrite:
        held_out = [
            texts.rewrite(
                target,
                batch,
                key,
                at,
                temperature=None,
                num_tokens=num_tokens,
                eos_id=target.config.eos_id,
            )
            for at, batch in enumerate(held_out)
        ]
    stream = batches.training_batches(
        data.train,
        config.data.tokens_per_batch,
        config.data.buckets,
        config.seed,
        batches.Position(int(state.epoch), int(state.index)),
        multiple_of=config.data.multiple_of,
    )
    log_file = train_log.open_log(
        workdir, optimizer.steps, first, tensorboard=config.tensorboard
    )
    recent: list[dict[str, jax.Array]] = []
    since, aside = time.monotonic(), 0.0
    with log_file as log, train_state.saver(config, workdir, fingerprints) as save:
        for batch, position in stream:
            if number >= optimizer.steps:
                break
            state, metrics = slots.slot_step(
                state,
                target,
                train_data.to_device(batch),
                config=optimizer,
                how=how,
                gamma=config.gamma,
                rounds=COMPUTE[config.compute_dtype],
            )
            state = state.replace(
                epoch=jnp.array(position.epoch, jnp.int32),
                index=jnp.array(position.index, jnp.int32),
            )
            number += 1
            recent.append(metrics)
            scoring = number % config.evaluate_every == 0 or number == optimizer.steps
            saving = scoring or number % config.checkpoint_every == 0
            # At each checkpoint too, as in `experiments.train`.
            if saving or number % config.log_every == 0:
                jax.block_until_ready(metrics)
                seconds = time.monotonic() - since - aside
                log(train_log.averages(number, recent, seconds, 0, None))
                check_finite(number, metrics)
                recent, since, aside = [], time.monotonic(), 0.0
            if not saving:
                continue
            paused = time.monotonic()
            scores: dict[str, float] = {}
            if scoring:
                scores = evaluate(state.model, target, held_out, how, config.gamma, key)
                log({"step": number} | scores)
            save(number, state, scores)
            aside += time.monotonic() - paused
    evaluation = train_log.last_evaluation(workdir)
    command.write_json(workdir / "metrics.json", evaluation)
    export(config, state.model, workdir, fingerprint, manifest, number)
    show(f"exported step {number} to {workdir / 'export'}")
    return state


def check(config: ml_collections.ConfigDict) -> slots.Objective:
    """Refuses settings that mean nothing, before any work.

    Returns:
        What training makes smaller.

    Raises:
        errors.InputError: naming the setting.
    """
    train_settings.check_run(config, default.get_config())
    build.named(build_drafter.TRAINABLE, config.kind, "kind")
    build.named(COMPUTE, config.compute_dtype, "compute_dtype")
    for kind, given in config.settings.items():
        unread = [name for name in given if given[name] is not None]
        if kind != config.kind and unread:
            raise errors.InputError(
                f"config.settings.{kind}.{unread[0]} is set and config.kind is "
                f"{config.kind!r}, which does not read it: leave it out"
            )
    build.positive(config, "gamma")
    own = config.loss.to_dict()
    divergence = {field.name for field in dataclasses.fields(distill.Divergence)}
    how = slots.Objective(
        divergence=distill.Divergence(**{name: own.pop(name) for name in divergence}),
        **own,
    )
    slots.check_objective(how, "config.loss")
    return how


def initial_state(
    config: ml_collections.ConfigDict, target: T5, fingerprint: str
) -> step.TrainState:
    """The state before the first step, as ``config.init`` says.

    Args:
        config: see `configs/train_drafter.py`.
        target: that the drafter is made for.
        fingerprint: of the target's folder.

    Raises:
        errors.InputError: the drafter cannot be made so, or the folder ``config.init``
            holds nothing that it could start from.
    """
    kind = build_drafter.TRAINABLE[config.kind]
    given = config.settings.get(config.kind) or {}
    settings = {name: own for name, own in given.items() if own is not None}
    seed = jax.random.fold_in(jax.random.key(config.seed), train_state.RUN)
    drafter_key, run_key = jax.random.split(seed)
    if not config.init:
        drafter = kind.create(target, settings, drafter_key)
    else:
        folder = build.checkpoint_folder(config.init, "init")
        if (folder / files.DRAFTER_FILE).is_file():
            drafter = files.load_drafter(kind, folder, target, fingerprint)
            found = drafter.settings()
            for name, own in settings.items():
                if found.get(name) != own:
                    raise errors.InputError(
                        f"config.settings.{config.kind}.{name} is {own!r} and the "
                        f"drafter in {folder} has {found.get(name)!r}: leave it out"
                    )
        elif hasattr(kind, "from_model"):
            model = t5_weights.load_t5(folder)
            drafter = kind.from_model(target, model, settings, drafter_key)
        else:
            raise errors.InputError(
                f"config.init is {config.init!r}: {config.kind} starts from an earlier "
                f"drafter of its kind alone, and there is no {files.DRAFTER_FILE}"
            )
    # Copied: a step donates its state, and the target's arrays must outlive it.
    drafter = jax.tree.map(jnp.copy, drafter)
    return step.init_state(drafter, train_settings.optimizer_config(config), run_key)


def evaluate(
    drafter: Any,
    target: T5,
    data: Sequence[step.Batch],
    how: slots.Objective,
    gamma: int,
    key: jax.Array,
) -> dict[str, float]:
    """Scores on held-out texts.

    Args:
        drafter: what is judged.
        target: that it drafts for.
        data: the texts.
        how: of the loss.
        gamma: tokens of a block.
        key: of what the drafter draws by chance.

    Returns:
        ``validation_loss``, ``expected_length``, ``expected_length_greedy``, and by
        slot (from 1) ``acceptance_k`` and ``agreement_k``: see `slots.SlotScores`.
    """
    sums = [
        slots.slot_eval_step(drafter, target, batch, key, how=how, gamma=gamma)
        for batch in data
    ]
    means = jax.tree.map(lambda *leaves: sum(leaves), *sums).means()
    scores = {"validation_loss": float(means["loss"])}
    for name in ("expected_length", "expected_length_greedy"):
        scores[name] = float(means[name])
    for name in ("acceptance", "agreement"):
        scores |= {f"{name}_{k}": float(own) for k, own in enumerate(means[name], 1)}
    return scores


def export(
    config: ml_collections.ConfigDict,
    drafter: Any,
    workdir: pathlib.Path,
    fingerprint: str,
    manifest: dict[str, Any],
    number: int,
) -> None:
    """Writes `workdir/export`: a drafter's folder, with a card.

    Args:
        config: of the run.
        drafter: what was trained.
        workdir: of the run.
        fingerprint: of the target's folder.
        manifest: the run's.
        number: of the step.
    """
    lines = train_log.read_lines(workdir)
    minutes = train_log.minutes(lines)
    scores = train_log.last_evaluation(workdir)
    files.save_drafter(
        drafter,
        workdir / "export",
        fingerprint,
        dtype=train_settings.STORED[config.export.dtype],
        about={"minutes": round(minutes, 1)} | scores,
    )
    content = card.drafter_markdown(
        title=workdir.name,
        kind=config.kind,
        settings=drafter.settings(),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(drafter)),
        optimizer=dataclasses.asdict(train_settings.optimizer_config(config)),
        manifest=manifest,
        lines=lines,
        step=number,
        minutes=minutes,
    )
    (workdir / "export" / "README.md").write_text(content, encoding="utf-8")


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    # A checkpoint that cannot be read is a line for the log, not a stack.
    warnings.showwarning = lambda message, *_: print(
        f"warning: {message}", file=sys.stderr
    )
    train(config, workdir)


if __name__ == "__main__":
    command.run(main)
