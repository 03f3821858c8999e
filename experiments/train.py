"""Trains a T5 on pairs of texts; resumes where it was stopped; exports what it has."""

import collections
import pathlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from jax.sharding import Mesh

from experiments import (
    baseline,
    build,
    build_mesh,
    command,
    teacher,
    train_card,
    train_data,
    train_log,
    train_settings,
    train_state,
)
from specjax import checkpoints, errors
from specjax.data import batches, tokenizer
from specjax.metrics import text
from specjax.models import shared_encoder, t5, t5_weights
from specjax.sampling import Sampling
from specjax.training import flops, step


def train(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    show: Callable[[str], None] = print,
) -> step.TrainState:
    """Trains to ``config.optimizer.steps``, from the newest checkpoint if there is one.

    Args:
        config: see `configs/repair_target.py`.
        workdir: receives `manifest.json`, `train.jsonl` (a line per logged step and per
            evaluation), `tensorboard/` if asked for, `checkpoints/`, `metrics.json`
            (the last evaluation) and, at the end, `export/`: the model, its tokenizer
            and a card, with curves where the extra `plots` is installed.
        show: prints a line.

    Returns:
        The last state.

    Raises:
        errors.InputError: a setting or a file is wrong, or `workdir` holds another run.
    """
    train_settings.check(config)
    rows = ("data.multiple_of", "evaluate.batch_size")
    with build_mesh.entered(config, *rows) as mesh:
        return _train(config, workdir, show, mesh)


def _train(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    show: Callable[[str], None],
    mesh: Mesh | None,
) -> step.TrainState:
    optimizer = train_settings.optimizer_config(config)
    shape, compute = train_settings.model_config(config), config.compute_dtype
    master = teacher.load_teacher(config, mesh)
    target = None if master is None else master.target
    workdir.mkdir(parents=True, exist_ok=True)
    restored = train_state.restore(config, workdir, show, mesh)
    data = train_data.load_data(config, show, mesh)
    if restored is None:
        state = train_state.initial_state(config, data.train, target, mesh)
    else:
        train_state.check_same_files(
            restored.config, _fingerprints(data, master), workdir
        )
        checkpoints.set_aside(workdir / "checkpoints", restored.skipped)
        state = restored.state
    number = first = int(state.step)
    if first > optimizer.steps:
        raise errors.InputError(
            f"{workdir} holds a run of {first} steps, past config.optimizer.steps = "
            f"{optimizer.steps}: ask for more, or export it with --export_only"
        )
    _show_cut_references(config, data, show)
    peak = flops.matmul_peak(compute or jnp.float32) if config.measure_peak else None
    manifest = command.manifest(
        config,
        first_step=first,
        starts=train_log.starts(workdir, first),
        train_rows=len(data.train),
        validation_rows=len(data.sources),
        too_long=data.dropped,
        matmul_flops_per_second=peak,
    )
    command.write_json(workdir / "manifest.json", manifest)
    held_out = {} if master is None else master.held_out(config, data)
    stream = batches.training_batches(
        data.train,
        config.data.tokens_per_batch,
        config.data.buckets,
        config.seed,
        batches.Position(int(state.epoch), int(state.index)),
        multiple_of=config.accumulate * config.data.multiple_of,
    )
    log_file = train_log.open_log(
        workdir, optimizer.steps, first, tensorboard=config.tensorboard
    )
    evaluation: dict[str, float] = {}
    writers: collections.Counter[str] = collections.Counter()
    recent: list[dict[str, jax.Array]] = []
    # Operations of the recent steps, their start, and seconds that no step took.
    work, since, aside = 0, time.monotonic(), 0.0
    saver = train_state.saver(
        config, workdir, _fingerprints(data, master), train_settings.best(config)
    )
    with log_file as log, saver as save:
        for batch, position in stream:
            if number >= optimizer.steps:
                break
            learnt, writer = train_data.to_device(batch, mesh), "truth"
            if master is not None:
                learnt, writer = master.texts_of_step(state, learnt, number)
                writers[writer] += 1
            state, metrics = step.train_step(
                state,
                learnt,
                config=optimizer,
                label_smoothing=config.label_smoothing,
                z_loss=config.z_loss,
                accumulate=config.accumulate,
                compute_dtype=train_settings.COMPUTE[compute],
                target=target,
                divergence=None if master is None else master.divergence,
                skip=train_settings.layer_skip_config(config),
            )
            state = state.replace(
                epoch=jnp.array(position.epoch, jnp.int32),
                index=jnp.array(position.index, jnp.int32),
            )
            number += 1
            recent.append(metrics)
            work += _flops(shape, target, batch, writer)
            last = number == optimizer.steps
            scoring = number % config.evaluate_every == 0 or last
            decoding = config.decode_every and (
                number % config.decode_every == 0 or last
            )
            saving = scoring or decoding or number % config.checkpoint_every == 0
            # At each checkpoint too: a run that goes on from it must average over the
            # same steps as one that was not stopped.
            if saving or number % config.log_every == 0:
                jax.block_until_ready(metrics)
                seconds = time.monotonic() - since - aside
                line = train_log.averages(number, recent, seconds, work, peak)
                log(line | {f"{name}_texts": own for name, own in writers.items()})
                check_finite(number, metrics)
                recent, work, since, aside = [], 0, time.monotonic(), 0.0
                writers.clear()
            if not saving:
                continue
            paused = time.monotonic()
            scores: dict[str, float] = {}
            if scoring:
                scores |= evaluate(state.model, data.validation, master, held_out)
            if decoding:
                scores |= decode_scores(config, state.model, data, target)
            if scores:
                evaluation = {"step": number} | scores
                log(evaluation)
            save(number, state, scores)
            aside += time.monotonic() - paused
    path = workdir / "metrics.json"
    if not evaluation and not path.is_file():  # lost since the run has ended
        evaluation = train_log.last_evaluation(workdir)
    if evaluation:
        command.write_json(path, evaluation)
    if config.export.which == "last":
        export(config, state.model, workdir, number)
    else:
        number = export_saved(config, workdir)
    show(f"exported step {number} to {workdir / 'export'}")
    return state


def evaluate(
    model: t5.T5,
    data: Sequence[step.Batch],
    master: teacher.Teacher | None = None,
    held_out: dict[str, teacher.HeldOut] | None = None,
) -> dict[str, float]:
    """Teacher-forced scores on held-out batches.

    Returns:
        ``validation_nll`` (nats a token), ``token_accuracy``, and ``exact_match``: the
        share of rows that greedy decoding reproduces. With a teacher also
        ``validation_divergence`` and ``validation_alpha``, on these same texts, and
        ``alpha_greedy`` and ``alpha_sampled`` on the teacher's own, `held_out`.
    """
    target = None if master is None else master.target
    sums = [step.eval_step(model, batch, target) for batch in data]
    total = jax.tree.map(lambda *leaves: float(sum(leaves)), *sums)
    scores = {
        "validation_nll": total.nll / total.tokens,
        "token_accuracy": total.correct / total.tokens,
        "exact_match": total.exact / total.rows,
    }
    if master is not None:
        apart = [
            step.eval_distill_step(model, master.target, batch, master.divergence)
            for batch in data
        ]
        far = jax.tree.map(lambda *leaves: float(sum(leaves)), *apart)
        scores["validation_divergence"] = far.loss / far.tokens
        scores["validation_alpha"] = far.alpha / far.tokens
        scores |= master.alphas(model, held_out or {})
    return scores


def decode_scores(
    config: ml_collections.ConfigDict,
    model: t5.T5,
    data: train_data.Data,
    target: t5.T5 | None = None,
) -> dict[str, float]:
    """Scores of greedy decodes of the first held-out rows, as `evaluate` asks.

    Args:
        config: see `configs/repair_target.py`.
        model: the model in training.
        data: has the held-out rows.
        target: whose encoder a draft without one reads.

    Returns:
        ``decoded_NAME`` of each of ``config.evaluate.scores``: see
        `specjax.metrics.text`.
    """
    own, shape = config.evaluate, model.config
    sources = data.sources[: own.rows]
    dead = tokenizer.dead_from(
        data.pieces, shape.vocab_size, shape.pad_id, shape.eos_id, "model"
    )
    greedy = Sampling(temperature=None, num_tokens=dead)
    keys = build.row_keys(config.seed, len(sources))
    parts = list(
        batches.inference_batches(
            sources, own.batch_size, batches.source_lengths(config.data.buckets)
        )
    )
    whole = shared_encoder.whole(model, target)
    outputs = baseline.decode_all(whole, parts, keys, greedy, own.max_length)
    written = baseline.tokens_by_row(parts, outputs, len(sources))
    scores = text.text_scores(
        [data.pieces.decode(tokens) for tokens in written],
        data.references[: own.rows],
        own.scores,
    )
    return {f"{train_settings.DECODED}{name}": own for name, own in scores.items()}


def export(
    config: ml_collections.ConfigDict,
    model: t5.T5,
    workdir: pathlib.Path,
    number: int,
) -> None:
    """Writes `workdir/export`: a Hugging Face directory, with a card.

    Args:
        config: of the run.
        model: its weights.
        workdir: of the run.
        number: of the step that they are of.
    """
    target = workdir / "export"
    target.mkdir(parents=True, exist_ok=True)
    for name in tokenizer.FILES:
        path = pathlib.Path(config.data.folder) / name
        if path.is_file():
            shutil.copy(path, target)
    t5_weights.save_t5(model, target, dtype=train_settings.STORED[config.export.dtype])
    train_card.write_card(workdir, model, number)


def export_saved(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> int:
    """Exports the last or the best checkpoint of `workdir`; returns its step.

    Args:
        config: ``config.export.which`` says which of them.
        workdir: of the run.

    Raises:
        errors.InputError: there is no such checkpoint, or a setting is wrong.
    """
    train_settings.check(config)
    folder, number = workdir / "checkpoints", None
    best = train_settings.best(config)
    if config.export.which == "best" and best is not None:
        number = checkpoints.best_step(folder, best)
        if number is None:
            raise errors.InputError(
                f"no checkpoint in {folder} was saved with {best.metric}: take another "
                "config.best, or config.export.which=last"
            )
    restored = checkpoints.restore(
        folder,
        train_state.template(config),
        step=number,
        check=lambda saved: train_state.check_same_run(
            config, saved, workdir, lambda line: None
        ),
    )
    if restored is None:
        raise errors.InputError(f"no checkpoint in {folder}")
    own = train_data.fingerprint_tokenizer(pathlib.Path(config.data.folder))
    train_state.check_same_files(restored.config, {"tokenizer": own}, workdir)
    export(config, restored.state.model, workdir, restored.step)
    return restored.step


def _fingerprints(
    data: train_data.Data, master: teacher.Teacher | None
) -> dict[str, str]:
    if master is None:
        return data.fingerprints
    return data.fingerprints | {"target of distill": master.fingerprint}


def _show_cut_references(
    config: ml_collections.ConfigDict,
    data: train_data.Data,
    show: Callable[[str], None],
) -> None:
    """Decodes that must end before their references do cannot be right."""
    references = data.references[: config.evaluate.rows]
    # The start token takes one place.
    room = config.evaluate.max_length - 1
    cut = sum(len(data.pieces.encode(text)) > room for text in references)
    if cut and (config.decode_every or config.distill.target):
        show(
            f"config.evaluate.max_length = {config.evaluate.max_length} leaves {room} "
            f"tokens, and {cut} of the {len(references)} held-out references are longer"
        )


def _flops(shape: Any, target: t5.T5 | None, batch: batches.Batch, writer: str) -> int:
    rows, source = batch.inputs.shape
    sizes = (rows, source, batch.targets.shape[1])
    work = flops.train_flops(shape, *sizes)
    if target is not None:
        # A text that a model writes in the step costs one pass more, token by token.
        passes = [target.config] + [target.config] * (writer == "target")
        passes += [shape] * (writer == "draft")
        work += sum(flops.forward_flops(own, *sizes) for own in passes)
    return work


def check_finite(number: int, metrics: dict[str, jax.Array]) -> None:
    """Nothing that is not a number may take the place of a good checkpoint.

    Args:
        number: of the step.
        metrics: what the step returned.

    Raises:
        errors.InputError: its loss or its gradient is not finite.
    """
    for name in ("loss", "grad_norm"):
        if not np.isfinite(metrics[name]):
            raise errors.InputError(
                f"{name} is {float(metrics[name])} at step {number}: lower "
                "config.optimizer.learning_rate and start again from the last "
                "checkpoint"
            )


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    if config.get("distill", {}).get("target"):
        raise errors.InputError(
            "config.distill.target is set: python -m experiments.distill trains a "
            "draft against a target"
        )
    run(config, workdir, values)


def run(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Trains, or exports a checkpoint."""
    # A checkpoint that cannot be read is a line for the log, not a stack.
    warnings.showwarning = lambda message, *_: print(
        f"warning: {message}", file=sys.stderr
    )
    if values.export_only:
        number = export_saved(config, workdir)
        print(f"exported step {number} to {workdir / 'export'}")
    else:
        train(config, workdir)


def define(values: flags.FlagValues) -> None:
    """Flags of the command's own."""
    flags.DEFINE_bool(
        "export_only",
        False,
        "Export a checkpoint (--config.export.which) without training.",
        flag_values=values,
    )


if __name__ == "__main__":
    command.run(main, define=define)
