"""The state of a training run: as it starts, and as an earlier run has left it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from typing import Any

import jax
import ml_collections
from jax.sharding import Mesh

from configs import repair_target
from experiments import train_data, train_settings
from specjax import checkpoints, errors, sharding
from specjax.models import t5, t5_config, t5_weights
from specjax.training import alignment, draft_init, init, optimizer, step

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
    "mesh",
    "export",
)
# Of the optimizer's settings, those that say what it keeps.
_OF_THE_STATE = ("optimizer.name", "optimizer.momentum")
# Rows of a file have the seed's keys from 0 on; a run has the last.
RUN = 2**32 - 1


def initial_state(
    config: ml_collections.ConfigDict,
    examples: Sequence[train_data.Example],
    target: t5.T5 | None = None,
    mesh: Mesh | None = None,
) -> step.TrainState:
    """The state before the first step, as ``config.init`` says.

    Args:
        config: see `configs/repair_target.py`.
        examples: the training examples, which "dictionary" reads.
        target: whose layers "target" takes.
        mesh: that it goes to.

    Raises:
        errors.InputError: the model in the directory ``config.init``, or the layers of
            the target, have not the shape ``config.model``.
    """
    seed = jax.random.fold_in(jax.random.key(config.seed), RUN)
    model_key, run_key, dictionary_key = jax.random.split(seed, 3)
    shape = train_settings.model_config(config)
    if config.init == "mimetic":
        model = init.mimetic_init(_random_model(shape, model_key))
    elif config.init == "dictionary":
        model = init.dictionary_init(
            _random_model(shape, model_key),
            alignment.align(examples, shape.vocab_size),
            dictionary_key,
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
            model = t5_weights.load_t5(train_settings.init_folder(config))
        found = dataclasses.replace(model.config, dropout_rate=shape.dropout_rate)
        if found != shape:
            raise errors.InputError(
                f"config.init={config.init} gives {found}, config.model asks for "
                f"{shape}"
            )
        model.config = shape
    made = step.init_state(model, train_settings.optimizer_config(config), run_key)
    return _placed(made, mesh)


# One program: made operation by operation, each shape would compile for itself.
_random_model = jax.jit(t5.T5, static_argnums=0)


def _placed(state: step.TrainState, mesh: Mesh | None) -> step.TrainState:
    if mesh is None:
        return state
    sharding.check_heads(state.model.config.num_heads, mesh.shape, "model")
    return sharding.place(state, mesh, sharding.TRAINING)


def template(
    config: ml_collections.ConfigDict, mesh: Mesh | None = None
) -> step.TrainState:
    """A state of the run's structure, for a checkpoint to fill."""
    shape = train_settings.model_config(config)
    model = _random_model(shape, jax.random.key(0))
    made = step.init_state(
        model, train_settings.optimizer_config(config), jax.random.key(0)
    )
    return _placed(made, mesh)


def restore(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    show: Callable[[str], None],
    mesh: Mesh | None = None,
) -> checkpoints.Restored | None:
    """The newest checkpoint of a run, on its devices; None: there is none yet."""
    restored = checkpoints.restore(
        workdir / "checkpoints",
        template(config, mesh),
        check=lambda saved: check_same_run(config, saved, workdir, show),
    )
    if restored is not None:
        show(f"resumed at step {restored.step} of {config.optimizer.steps}")
    return restored


def check_same_run(
    config: ml_collections.ConfigDict,
    settings: dict[str, Any],
    workdir: pathlib.Path,
    show: Callable[[str], None],
) -> None:
    """Refuses settings that make another run, and shows those of the optimizer.

    Args:
        config: the settings now.
        settings: those saved beside the run's checkpoint.
        workdir: of the run.
        show: prints a line.

    Raises:
        errors.InputError: naming the first setting that differs.
    """
    # What a run from before a setting was made did, is what the setting is as shipped.
    default = flat(repair_target.get_config().to_dict()) | {
        f"{section}.{field.name}": field.default
        for section, record in (
            ("model", t5_config.T5Config),
            ("optimizer", optimizer.OptimizerConfig),
        )
        for field in dataclasses.fields(record)
    }
    saved, now = flat(settings), flat(config.to_dict())
    for name in sorted(now.keys() | saved.keys()):
        old, new = (own.get(name, default.get(name)) for own in (saved, now))
        section = name.partition(".")[0]
        if old == new or section in (*_FREE_SETTINGS, "fingerprints"):
            continue
        if section != "optimizer" or name in _OF_THE_STATE:
            raise errors.InputError(
                f"{workdir} holds a run with config.{name} = {old}, not {new}: resume "
                "with the same settings or take another --workdir"
            )
        show(f"config.{name} is now {new}, was {old}")


def flat(settings: dict[str, Any], path: str = "") -> dict[str, Any]:
    """Settings by their whole names, as they come back from JSON."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{path}{name}.")
        else:
            found[path + name] = json.loads(json.dumps(value))  # tuples: lists
    return found


def check_same_files(
    saved: dict[str, Any], fingerprints: dict[str, str], workdir: pathlib.Path
) -> None:
    """Refuses files that have changed under their name since a run was begun.

    Args:
        saved: the settings beside the run's checkpoint.
        fingerprints: of what the files hold now, by what that is.
        workdir: of the run.

    Raises:
        errors.InputError: naming what is another.
    """
    before = saved.get("fingerprints", {})
    for name, own in fingerprints.items():
        if before.get(name, own) != own:
            kind = "other" if name.endswith("s") else "another"
            raise errors.InputError(
                f"{workdir} holds a run with {kind} {name}: the files have changed "
                f"since; put the old {name} back or take another --workdir"
            )


@contextlib.contextmanager
def saver(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    fingerprints: dict[str, str],
    best: checkpoints.Best | None = None,
) -> Iterator[Callable[[int, step.TrainState, dict[str, float]], None]]:
    """A function that saves while the training goes on, one checkpoint at a time.

    A save that fails does not end the run. It is said when the next is due, which is
    the next attempt; the earlier checkpoints stay.

    Args:
        config: of the run; saved beside each checkpoint.
        workdir: of the run.
        fingerprints: of what the run reads; saved too.
        best: by which metric one more checkpoint stays; None: none does.

    Yields:
        ``save(step, state, scores)``.
    """
    folder, pending = workdir / "checkpoints", list[tuple[int, futures.Future[None]]]()
    settings = config.to_dict() | {"fingerprints": fingerprints}

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
            best=best,
        )
        pending.append((number, writing))

    try:
        yield save
    finally:
        settle()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:200]
