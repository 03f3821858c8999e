"""Trains a T5 on pairs of texts; resumes where it was stopped; exports what it has."""

import contextlib
import dataclasses
import pathlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags

from configs import repair_target
from experiments import baseline, build, command, train_data, train_log, train_settings
from specjax import checkpoints, errors
from specjax.data import batches, tokenizer
from specjax.metrics import text
from specjax.models import shared_encoder, t5, t5_weights
from specjax.sampling import Sampling
from specjax.training import alignment, distill, flops, init, step

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
    config: ml_collections.ConfigDict, examples: Sequence[train_data.Example]
) -> step.TrainState:
    """The state before the first step, as ``config.init`` says.

    Args:
        config: see `configs/repair_target.py`.
        examples: the training examples, which "dictionary" reads.

    Raises:
        errors.InputError: the model in the directory ``config.init`` has not the shape
            ``config.model``.
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
        model = t5_weights.load_t5(config.init)
        stored = dataclasses.replace(model.config, dropout_rate=shape.dropout_rate)
        if stored != shape:
            raise errors.InputError(
                f"config.init: the model in {config.init} is {stored}, config.model "
                f"asks for {shape}"
            )
        model.config = shape
    return step.init_state(model, train_settings.optimizer_config(config), run_key)


# One program: made operation by operation, each shape would compile for itself.
_random_model = jax.jit(t5.T5, static_argnums=0)


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
            (the last evaluation) and, at the end, `export/`.
        show: prints a line.

    Returns:
        The last state.

    Raises:
        errors.InputError: a setting or a file is wrong, or `workdir` holds another run.
    """
    train_settings.check(config)
    optimizer = train_settings.optimizer_config(config)
    shape, compute = train_settings.model_config(config), config.compute_dtype
    target, divergence = train_settings.load_target(config)
    workdir.mkdir(parents=True, exist_ok=True)
    restored = _restore(config, workdir, show)
    data = train_data.load_data(config, show)
    if restored is None:
        state = initial_state(config, data.train)
    else:
        _check_same_data(restored.config, data, workdir)
        checkpoints.set_aside(workdir / "checkpoints", restored.skipped)
        state = restored.state
    number = first = int(state.step)
    peak = flops.matmul_peak(compute or jnp.float32) if config.measure_peak else None
    manifest = command.manifest(
        config,
        first_step=first,
        train_rows=len(data.train),
        validation_rows=len(data.sources),
        too_long=data.dropped,
        matmul_flops_per_second=peak,
    )
    command.write_json(workdir / "manifest.json", manifest)
    stream = batches.training_batches(
        data.train,
        config.data.tokens_per_batch,
        config.data.buckets,
        config.seed,
        batches.Position(int(state.epoch), int(state.index)),
        multiple_of=config.accumulate,
    )
    log_file = train_log.open_log(
        workdir, optimizer.steps, first, tensorboard=config.tensorboard
    )
    evaluation: dict[str, float] = {}
    recent: list[dict[str, jax.Array]] = []
    # Operations of the recent steps, their start, and seconds that no step took.
    work, since, aside = 0, time.monotonic(), 0.0
    with log_file as log, _saver(config, workdir, data) as save:
        for batch, position in stream:
            if number >= optimizer.steps:
                break
            state, metrics = step.train_step(
                state,
                train_data.to_device(batch),
                config=optimizer,
                label_smoothing=config.label_smoothing,
                z_loss=config.z_loss,
                accumulate=config.accumulate,
                compute_dtype=train_settings.COMPUTE[compute],
                target=target,
                divergence=divergence,
            )
            state = state.replace(
                epoch=jnp.array(position.epoch, jnp.int32),
                index=jnp.array(position.index, jnp.int32),
            )
            number += 1
            recent.append(metrics)
            work += _flops(shape, target, batch)
            last = number == optimizer.steps
            if number % config.log_every == 0 or last:
                jax.block_until_ready(metrics)
                seconds = time.monotonic() - since - aside
                log(train_log.averages(number, recent, seconds, work, peak))
                _check_finite(number, metrics)
                recent, work, since, aside = [], 0, time.monotonic(), 0.0
            scoring = number % config.evaluate_every == 0 or last
            decoding = config.decode_every and (
                number % config.decode_every == 0 or last
            )
            if not (scoring or decoding or number % config.checkpoint_every == 0):
                continue
            jax.block_until_ready(metrics)
            paused = time.monotonic()
            _check_finite(number, metrics)
            scores: dict[str, float] = {}
            if scoring:
                scores |= evaluate(state.model, data.validation, target, divergence)
            if decoding:
                scores |= decode_scores(config, state.model, data, target)
            if scores:
                evaluation = {"step": number} | scores
                log(evaluation)
            save(number, state, scores)
            aside += time.monotonic() - paused
    if evaluation:
        command.write_json(workdir / "metrics.json", evaluation)
    if config.export.which == "last":
        export(config, state.model, workdir)
    else:
        number = export_saved(config, workdir)
    show(f"exported step {number} to {workdir / 'export'}")
    return state


def evaluate(
    model: t5.T5,
    data: Sequence[step.Batch],
    target: t5.T5 | None = None,
    divergence: distill.Divergence | None = None,
) -> dict[str, float]:
    """Teacher-forced scores on held-out batches.

    Returns:
        ``validation_nll`` (nats a token), ``token_accuracy``, and ``exact_match``: the
        share of rows that greedy decoding reproduces. With a target also
        ``validation_divergence`` and ``validation_alpha``, on these same texts.
    """
    sums = [step.eval_step(model, batch) for batch in data]
    total = jax.tree.map(lambda *leaves: float(sum(leaves)), *sums)
    scores = {
        "validation_nll": total.nll / total.tokens,
        "token_accuracy": total.correct / total.tokens,
        "exact_match": total.exact / total.rows,
    }
    if target is not None and divergence is not None:
        apart = [
            step.eval_distill_step(model, target, batch, divergence) for batch in data
        ]
        far = jax.tree.map(lambda *leaves: float(sum(leaves)), *apart)
        scores["validation_divergence"] = far.loss / far.tokens
        scores["validation_alpha"] = far.alpha / far.tokens
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
        batches.inference_batches(sources, own.batch_size, config.data.buckets)
    )
    whole = shared_encoder.whole(model, target)
    outputs = [
        baseline.decode(whole, part, keys, greedy, own.max_length) for part in parts
    ]
    written = baseline.tokens_by_row(parts, outputs, len(sources))
    scores = text.text_scores(
        [data.pieces.decode(tokens) for tokens in written],
        data.references[: own.rows],
        own.scores,
    )
    return {f"{train_settings.DECODED}{name}": own for name, own in scores.items()}


def export(
    config: ml_collections.ConfigDict, model: t5.T5, workdir: pathlib.Path
) -> None:
    """Writes `workdir/export`: a Hugging Face directory of the model and tokenizer."""
    target = workdir / "export"
    target.mkdir(parents=True, exist_ok=True)
    for name in tokenizer.FILES:
        path = pathlib.Path(config.data.folder) / name
        if path.is_file():
            shutil.copy(path, target)
    t5_weights.save_t5(model, target, dtype=train_settings.STORED[config.export.dtype])


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
    restored = checkpoints.restore(folder, _template(config), step=number)
    if restored is None:
        raise errors.InputError(f"no checkpoint in {folder}")
    export(config, restored.state.model, workdir)
    return restored.step


@contextlib.contextmanager
def _saver(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, data: train_data.Data
) -> Iterator[Callable[[int, step.TrainState, dict[str, float]], None]]:
    """A function that saves while the training goes on, one checkpoint at a time.

    A save that fails does not end the run. It is said when the next is due, which is
    the next attempt; the earlier checkpoints stay.
    """
    folder, pending = workdir / "checkpoints", list[tuple[int, futures.Future[None]]]()
    settings = config.to_dict() | {"fingerprints": data.fingerprints}

    def settle() -> None:
        while pending:
            number, writing = pending.pop()
            error = writing.exception()
            if error is not None:
                warnings.warn(
                    f"checkpoint {number} was not written ({_first_line(error)}); the "
                    f"run goes on, and those of steps {checkpoints.steps(folder)} stay",
                    stacklevel=2,
                )

    def save(number: int, state: step.TrainState, scores: dict[str, float]) -> None:
        settle()
        writing = checkpoints.save_in_background(
            folder,
            number,
            state,
            settings,
            scores,
            keep=config.keep,
            best=train_settings.best(config),
        )
        pending.append((number, writing))

    try:
        yield save
    finally:
        settle()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]


def _template(config: ml_collections.ConfigDict) -> step.TrainState:
    """A state of the run's structure, for a checkpoint to fill."""
    shape = train_settings.model_config(config)
    model = _random_model(shape, jax.random.key(0))
    return step.init_state(
        model, train_settings.optimizer_config(config), jax.random.key(0)
    )


def _restore(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    show: Callable[[str], None],
) -> checkpoints.Restored | None:
    restored = checkpoints.restore(workdir / "checkpoints", _template(config))
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


def _check_same_data(
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


def _flops(shape: Any, target: t5.T5 | None, batch: batches.Batch) -> int:
    rows, source = batch.inputs.shape
    sizes = (rows, source, batch.targets.shape[1])
    taught = 0 if target is None else flops.forward_flops(target.config, *sizes)
    return flops.train_flops(shape, *sizes) + taught


def _check_finite(number: int, metrics: dict[str, jax.Array]) -> None:
    """Nothing that is not a number may take the place of a good checkpoint."""
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


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool(
        "export_only",
        False,
        "Export a checkpoint (--config.export.which) without training.",
        flag_values=values,
    )


if __name__ == "__main__":
    command.run(main, define=_define)
