"""Trains a T5 on pairs of texts; resumes where it was stopped; exports what it has."""

import contextlib
import dataclasses
import json
import pathlib
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags

from experiments import command, train_settings
from specjax import checkpoints, errors
from specjax.data import batches, pairs, tokenizer
from specjax.models import t5, t5_weights
from specjax.training import alignment, distill, init, step

# What a resumed run may change without becoming another run.
_FREE_SETTINGS = ("log_every", "evaluate_every", "checkpoint_every", "keep", "export")


Example = tuple[list[int], list[int]]


@dataclasses.dataclass(frozen=True)
class Data:
    """Training examples as ids, and padded validation batches."""

    train: list[Example]
    validation: list[step.Batch]


def initial_state(
    config: ml_collections.ConfigDict, examples: Sequence[Example]
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
            evaluation), `checkpoints/`, `metrics.json` and, at the end, `export/`.
        show: prints a line.

    Returns:
        The last state.

    Raises:
        errors.InputError: a setting or a file is wrong, or `workdir` holds another run.
    """
    train_settings.check(config)
    settings, optimizer = config.to_dict(), train_settings.optimizer_config(config)
    target, divergence = train_settings.load_target(config)
    workdir.mkdir(parents=True, exist_ok=True)
    restored = _restore(config, workdir, show)
    data = _load_data(config, show)
    state = initial_state(config, data.train) if restored is None else restored
    command.write_json(workdir / "manifest.json", command.manifest(config))
    metrics_path = workdir / "train.jsonl"
    _drop_after(metrics_path, int(state.step))
    evaluation: dict[str, float] = {}

    recent: list[dict[str, jax.Array]] = []
    since, aside = time.monotonic(), 0.0  # seconds that no step took
    with _progress(optimizer.steps, int(state.step)) as advance:
        stream = batches.training_batches(
            data.train,
            config.data.tokens_per_batch,
            config.data.buckets,
            config.seed,
            batches.Position(int(state.epoch), int(state.index)),
        )
        for batch, position in stream:
            if int(state.step) >= optimizer.steps:
                break
            state, metrics = step.train_step(
                state,
                _to_device(batch),
                config=optimizer,
                label_smoothing=config.label_smoothing,
                target=target,
                divergence=divergence,
            )
            state = state.replace(
                epoch=jnp.array(position.epoch, jnp.int32),
                index=jnp.array(position.index, jnp.int32),
            )
            recent.append(metrics)
            number = int(state.step)
            last = number == optimizer.steps
            if number % config.log_every == 0 or last:
                line = _averages(number, recent, time.monotonic() - since - aside)
                _append(metrics_path, line)
                advance(number, line)
                _check_finite(number, metrics)
                recent, since, aside = [], time.monotonic(), 0.0
            paused = time.monotonic()
            if number % config.evaluate_every == 0 or last:
                evaluation = {"step": number} | evaluate(
                    state.model, data.validation, target, divergence
                )
                _append(metrics_path, evaluation)
                advance(number, evaluation)
            if number % config.checkpoint_every == 0 or last:
                _check_finite(number, metrics)
                checkpoints.save(
                    workdir / "checkpoints", number, state, settings, keep=config.keep
                )
            aside += time.monotonic() - paused
    if evaluation:
        command.write_json(workdir / "metrics.json", evaluation)
    export(config, state.model, workdir)
    show(f"exported step {int(state.step)} to {workdir / 'export'}")
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


def export_newest(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> int:
    """Exports the newest checkpoint of `workdir`; returns its step.

    Raises:
        errors.InputError: there is no checkpoint, or a setting is wrong.
    """
    train_settings.check(config)
    restored = checkpoints.restore(workdir / "checkpoints", _template(config))
    if restored is None:
        raise errors.InputError(f"no checkpoint in {workdir / 'checkpoints'}")
    export(config, restored.state.model, workdir)
    return restored.step


def _load_data(config: ml_collections.ConfigDict, show: Callable[[str], None]) -> Data:
    folder = pathlib.Path(config.data.folder)
    pieces = tokenizer.load_tokenizer(folder)
    if pieces.vocab_size > config.model.vocab_size:
        raise errors.InputError(
            f"config.model.vocab_size is {config.model.vocab_size}, the tokenizer in "
            f"{folder} has {pieces.vocab_size} ids"
        )
    shape = train_settings.model_config(config)
    for name in ("pad_id", "eos_id"):
        if getattr(shape, name) != getattr(pieces, name):
            raise errors.InputError(
                f"config.model.{name} is {getattr(shape, name)}, and the tokenizer in "
                f"{folder} has {getattr(pieces, name)}: they must agree"
            )

    limit = config.data.max_tokens

    def read(path: pathlib.Path) -> list[Example]:
        # A model may have written nothing: so a draft must learn to do.
        found = pairs.load_pairs(path, empty_targets=True)
        empty = sum(not pair.target.strip() for pair in found)
        if empty:
            show(f"{path}: {empty} of {len(found)} examples have an empty target")
        examples = [
            (
                pieces.encode(pair.source),
                pieces.encode(pair.target)[: None if pair.finished else -1],
            )
            for pair in found
        ]
        short = [ids for ids in examples if max(map(len, ids)) <= limit]
        if len(short) < len(examples):
            show(
                f"{path}: {len(examples) - len(short)} of {len(examples)} examples "
                f"are longer than config.data.max_tokens = {limit} and stay out"
            )
        return short

    rows = read(folder / "validation.jsonl")[: config.data.validation_rows]
    plan = batches.plan_batches(rows, config.data.tokens_per_batch, config.data.buckets)
    validation = batches.epoch_batches(rows, plan, seed=0, epoch=0)
    return Data(
        train=read(pathlib.Path(config.data.train or folder / "train.jsonl")),
        validation=[_to_device(batch) for batch in validation],
    )


def _to_device(batch: batches.Batch) -> step.Batch:
    return step.Batch(
        inputs=jnp.asarray(batch.inputs),
        inputs_mask=jnp.asarray(batch.input_mask),
        targets=jnp.asarray(batch.targets),
        targets_mask=jnp.asarray(batch.target_mask),
    )


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
) -> step.TrainState | None:
    restored = checkpoints.restore(workdir / "checkpoints", _template(config))
    if restored is None:
        return None
    # By way of JSON: tuples come back as lists.
    now = json.loads(json.dumps(config.to_dict()))
    for name in sorted(now.keys() | restored.config.keys()):
        old, new = restored.config.get(name), now.get(name)
        if old == new or name in _FREE_SETTINGS:
            continue
        if name != "optimizer":
            raise errors.InputError(
                f"{workdir} holds a run with config.{name} = {old}, not {new}: resume "
                "with the same settings or take another --workdir"
            )
        for key, value in sorted(config.optimizer.items()):
            before = restored.config["optimizer"].get(key)
            if before != value:
                show(f"config.optimizer.{key} is now {value}, was {before}")
    show(f"resumed at step {restored.step} of {config.optimizer.steps}")
    return restored.state


def _check_finite(number: int, metrics: dict[str, jax.Array]) -> None:
    """Nothing that is not a number may take the place of a good checkpoint."""
    for name in ("loss", "grad_norm"):
        if not np.isfinite(metrics[name]):
            raise errors.InputError(
                f"{name} is {float(metrics[name])} at step {number}: lower "
                "config.optimizer.learning_rate and start again from the last "
                "checkpoint"
            )


def _averages(
    number: int, recent: Sequence[dict[str, jax.Array]], seconds: float
) -> dict[str, float]:
    means: dict[str, float] = {
        name: float(np.mean([metrics[name] for metrics in recent]))
        for name in ("loss", "nll", "grad_norm", "alpha")
        if name in recent[0]
    }
    tokens = float(sum(metrics["tokens"] for metrics in recent))
    return {
        "step": number,
        **means,
        "learning_rate": float(recent[-1]["learning_rate"]),
        "tokens_per_second": tokens / seconds,
        "seconds_per_step": seconds / len(recent),
    }


def _append(path: pathlib.Path, line: dict[str, float]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _drop_after(path: pathlib.Path, number: int) -> None:
    """Drops lines of steps that a killed run took after its last checkpoint."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            if json.loads(line)["step"] <= number:
                kept.append(line + "\n")
    path.write_text("".join(kept), encoding="utf-8")


def _describe(line: dict[str, float]) -> str:
    shown = (f"{name} {value:.4g}" for name, value in line.items() if name != "step")
    return f"step {line['step']}: " + "  ".join(shown)


@contextlib.contextmanager
def _progress(
    total: int, done: int
) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """A progress bar on a terminal, a line per report elsewhere."""
    if not sys.stdout.isatty():
        yield lambda number, line: print(_describe(line), flush=True)
        return
    from rich import progress

    with progress.Progress(
        *progress.Progress.get_default_columns(),
        progress.TimeElapsedColumn(),
        progress.MofNCompleteColumn(),
    ) as bar:
        task = bar.add_task("training", total=total, completed=done)

        def advance(number: int, line: dict[str, float]) -> None:
            bar.update(task, completed=number)
            if "validation_nll" in line or number % 100 == 0:
                bar.console.print(_describe(line))

        yield advance


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Trains, or exports the newest checkpoint."""
    # A checkpoint that cannot be read is a line for the log, not a stack.
    warnings.showwarning = lambda message, *_: print(
        f"warning: {message}", file=sys.stderr
    )
    if values.export_only:
        number = export_newest(config, workdir)
        print(f"exported step {number} to {workdir / 'export'}")
    else:
        train(config, workdir)


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_bool(
        "export_only",
        False,
        "Export the newest checkpoint without training.",
        flag_values=values,
    )


if __name__ == "__main__":
    command.run(main, define=_define)
