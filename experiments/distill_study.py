"""Trains one draft over divergence x texts and compares what it came to.

    python -m experiments.distill_study --config=configs/distill_study.py \
        --config.train.data.folder=DATA --workdir=DIR

Every run starts from the same weights and sees the same sources in the same order; the
divergence and the writer of the texts alone differ. The run "sequence" on "truth" is
plain cross entropy on the training file. Alpha is that of the paper, on texts that the
target wrote of held-out sources; block efficiency is counted while decoding these.
Writes DIR/RUN/ (as `experiments.distill`), DIR/manifest.json, DIR/metrics.json,
DIR/study.md and DIR/study.png (with the extra `plots`).
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import ml_collections
from absl import flags

from configs import distill_study
from experiments import (
    build,
    command,
    side_by_side,
    teacher,
    train,
    train_data,
    train_settings,
    train_state,
)
from specjax import errors, metrics
from specjax.drafters.model import ModelDrafter
from specjax.models import shared_encoder, t5, t5_weights
from specjax.report import plots, study
from specjax.training import distill, texts
from specjax.verify import token_verify

WRITERS: dict[str, dict[str, float]] = {
    "truth": dict(truth=1.0, target=0.0, draft=0.0),
    "target": dict(truth=0.0, target=1.0, draft=0.0),
    "draft": dict(truth=0.0, target=0.0, draft=1.0),
    "mixed": dict(truth=1 / 3, target=1 / 3, draft=1 / 3),
}


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    from rich.console import Console

    del values
    known = distill_study.get_config()
    known.train = config.get("train", {})  # which checks its own
    build.check_settings(config, known)
    build.positive(config, "gamma")
    divergences = build.names(config, "divergences", distill.NAMES)
    writers = build.names(config, "writers", WRITERS)
    if not config.train.distill.target:
        raise errors.InputError("config.train.distill.target is empty: name the target")
    cells = [(divergence, writer) for writer in writers for divergence in divergences]
    check_all_is_read(config, divergences, writers)
    runs = {cell: run_config(config, *cell) for cell in cells}
    for own in runs.values():
        train_settings.check(own)
    plots.check_plots()
    folders = {cell: workdir / "-".join(cell) for cell in cells}
    files = fingerprints(config.train)  # the same for all: read once
    settings = {
        cell: settings_of(own, config.gamma) | files for cell, own in runs.items()
    }
    done = {cell: finished(folders[cell], settings[cell]) for cell in cells}
    workdir.mkdir(parents=True, exist_ok=True)
    command.write_json(workdir / "manifest.json", command.manifest(config))
    console = Console()
    rows: list[dict[str, Any]] = []
    judge: Judge | None = None
    for number, (cell, own) in enumerate(runs.items(), start=1):
        console.print(f"[bold]{number} of {len(runs)}: {' on '.join(cell)}")
        row = done[cell]
        if row is None:
            # What it holds is the same for all runs.
            judge = Judge.of(own) if judge is None else judge
            row = run(cell, own, config.gamma, folders[cell], judge)
            content = row | {"settings": settings[cell]}
            command.write_json(folders[cell] / "study.json", content)
        rows.append(row)
        command.write_json(workdir / "metrics.json", rows)
    (workdir / "study.md").write_text(study.markdown(rows), encoding="utf-8")
    study.plot(rows, workdir / "study.png")
    console.print(study.table(rows))
    print(f"written: {workdir}/study.md, study.png, metrics.json")


def run_config(
    config: ml_collections.ConfigDict, divergence: str, writer: str
) -> ml_collections.ConfigDict:
    """The settings of one run: those that it would not read are as they come."""
    own = config.train.copy_and_resolve_references()
    with own.unlocked():
        own.distill.name = divergence
        own.distill.texts.update(WRITERS[writer])
        for name in distill.unread(divergence):
            own.distill[name] = getattr(distill.Divergence(), name)
        if writer == "truth":
            own.distill.texts.temperature = texts.Mixture.temperature
    return own


def check_all_is_read(
    config: ml_collections.ConfigDict, divergences: list[str], writers: list[str]
) -> None:
    """Refuses a setting of the runs that the study sets itself, or that none reads.

    Args:
        config: the settings.
        divergences: of the study.
        writers: of the study.

    Raises:
        InputError: naming the setting.
    """
    unread = set.intersection(*(set(distill.unread(name)) for name in divergences))
    given, default = config.train.distill, distill.Divergence()
    wanted = {name: (getattr(default, name), "divergences") for name in unread}
    wanted["name"] = (default.name, "divergences")
    mixture = texts.Mixture()
    wanted |= {
        f"texts.{name}": (getattr(mixture, name), "writers") for name in texts.WRITERS
    }
    if set(writers) == {"truth"}:
        wanted["texts.temperature"] = (mixture.temperature, "writers")
    for name, (value, setting) in sorted(wanted.items()):
        own = given
        for part in name.split("."):
            own = own[part]
        if own != value:
            raise errors.InputError(
                f"config.train.distill.{name} is {own}, which none of the runs reads: "
                f"leave it at {value}; config.{setting} says what they do"
            )


def finished(folder: pathlib.Path, now: dict[str, Any]) -> dict[str, Any] | None:
    """What an earlier call has measured of a run; None: it is not done.

    Args:
        folder: of the run.
        now: what its result depends on.

    Raises:
        InputError: it was measured under other settings, or on other files.
    """
    path = folder / "study.json"
    if not path.is_file():
        return None
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before = result.pop("settings", {})
    for name in sorted(now.keys() | before.keys()):
        if now.get(name) != before.get(name):
            raise errors.InputError(
                f"{folder} was measured with {name} = {before.get(name)}, not "
                f"{now.get(name)}: take another --workdir"
            )
    return result


def settings_of(config: ml_collections.ConfigDict, gamma: int) -> dict[str, Any]:
    """Settings that a run's result depends on, by whole names, as JSON has them."""
    flat = train_state.flat(config.to_dict())
    settings = {f"config.train.{name}": value for name, value in flat.items()}
    return settings | {"config.gamma": gamma}


def fingerprints(config: ml_collections.ConfigDict) -> dict[str, str]:
    """What the files behind the runs' settings hold."""
    folder = build.checkpoint_folder(config.distill.target, "train.distill.target")
    return {
        "the target's fingerprint": t5_weights.fingerprint(folder),
        "the data's fingerprint": train_data.fingerprint_files(config),
    }


@dataclasses.dataclass(frozen=True)
class Judge:
    """A target, and what it writes of the held-out sources."""

    master: teacher.Teacher
    data: train_data.Data
    held_out: dict[str, teacher.HeldOut]

    @classmethod
    def of(cls, config: ml_collections.ConfigDict) -> Judge:
        """The judge of runs with these settings."""
        master = teacher.load_teacher(config)
        assert master is not None  # checked at the door
        data = train_data.load_data(config, lambda line: None)
        return cls(master, data, master.held_out(config, data))


def run(
    cell: tuple[str, str],
    config: ml_collections.ConfigDict,
    gamma: int,
    folder: pathlib.Path,
    judge: Judge,
) -> dict[str, Any]:
    """Trains one draft and measures what it exports.

    Args:
        cell: its divergence and its writer.
        config: its settings.
        gamma: of the block efficiency.
        folder: of the run.
        judge: of the exported draft.

    Returns:
        Its divergence, its writer, ``alpha_greedy``, ``alpha_sampled`` and the block
        efficiencies ``tokens_per_call_greedy`` and ``tokens_per_call_sampled``.
    """
    train.train(config, folder)
    draft = t5_weights.load_t5(folder / "export")
    divergence, writer = cell
    return {
        "divergence": divergence,
        "writer": writer,
        "steps": config.optimizer.steps,
        **judge.master.alphas(draft, judge.held_out),
        **block_efficiencies(config, gamma, draft, judge),
    }


def block_efficiencies(
    config: ml_collections.ConfigDict, gamma: int, draft: t5.T5, judge: Judge
) -> dict[str, float]:
    """Tokens per target call of held-out sources, greedy and sampled."""
    master, data = judge.master, judge.data
    pair = build.Pair(
        target=master.target,
        drafter=ModelDrafter(draft),
        draft_model=shared_encoder.whole(draft, master.target),
        tokenizer=data.pieces,
        num_tokens=master.num_tokens,
    )
    setup = side_by_side.Setup(pair, token_verify, config.evaluate.max_length)
    rows = len(data.sources[: config.evaluate.rows])
    keys = build.row_keys(config.seed, rows)
    result = {}
    for name, own in judge.held_out.items():
        mode = side_by_side.Mode(name, own.sampling, None, gamma)
        stats = [setup.speculative(part, keys, mode).stats for part in own.parts]
        result[f"tokens_per_call_{name}"] = metrics.block_efficiency(
            metrics.merge(stats)
        )
    return result


if __name__ == "__main__":
    command.run(main)
