"""A model's card: what it is, how it was trained and what it came to, in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]

_SHAPE = (
    "d_model",
    "d_kv",
    "num_heads",
    "d_ff",
    "num_encoder_layers",
    "num_decoder_layers",
    "vocab_size",
)


def markdown(
    title: str,
    shape: Settings,
    parameters: int,
    optimizer: Settings,
    manifest: Settings,
    lines: Sequence[Mapping[str, int | float]],
    step: int,
    picture: str | None = None,
) -> str:
    """The card of a trained model.

    Args:
        title: its heading.
        shape: of the model: the fields of `T5Config`.
        parameters: how many the model has.
        optimizer: the fields of `OptimizerConfig`.
        manifest: the run's `manifest.json`.
        lines: of the run's `train.jsonl`.
        step: whose weights they are.
        picture: file of the curves beside the card; None: there is none.
    """
    config, effective = manifest["config"], manifest["effective"]
    scores = [own for own in lines if "loss" not in own and own["step"] <= step]
    recipe = _recipe(shape, optimizer, config, effective, step)
    parts = [f"# {title}", _shape(shape, parameters), recipe]
    parts.append(_starts(effective).rstrip())
    if scores:
        parts.append(_scores(scores[-1]))
    if picture:
        parts.append(f"![loss and learning rate by step]({picture})")
    parts.append(_origin(manifest))
    return "\n\n".join(filter(None, parts)) + "\n"


def drafter_markdown(
    title: str,
    kind: str,
    settings: Settings,
    parameters: int,
    optimizer: Settings,
    manifest: Settings,
    lines: Sequence[Mapping[str, int | float]],
    step: int,
    minutes: float,
) -> str:
    """The card of a trained drafter.

    Args:
        title: its heading.
        kind: of drafter.
        settings: that shape it.
        parameters: how many of its own it has.
        optimizer: the fields of `OptimizerConfig`.
        manifest: the run's `manifest.json`.
        lines: of the run's `train.jsonl`.
        step: whose weights they are.
        minutes: that the steps took.
    """
    config, effective = manifest["config"], manifest["effective"]
    shape = ", ".join(f"{name} {own}" for name, own in settings.items())
    loss, data = config["loss"], config["data"]
    parts = [
        f"# {title}",
        f"**Drafter**: {kind} of {parameters:,} parameters ({shape}), for the target "
        f"{config['target']} alone.",
        f"**Recipe**: {step:,} steps of {data['tokens_per_batch']:,} positions, blocks "
        f"of {config['gamma']}, {minutes:.1f} minutes, {optimizer['name']}, peak "
        f"learning rate {optimizer['learning_rate']:g}, schedule "
        f"{optimizer['schedule']}; loss {loss['name']}, slots weighed by "
        f"{loss['weights']}; {effective['train_rows']:,} training texts"
        + (f"; started from {config['init']}" if config["init"] else "")
        + ".",
        _starts(effective).rstrip(),
    ]
    scores = [own for own in lines if "loss" not in own and own["step"] <= step]
    if scores:
        parts.append(_scores(scores[-1]))
    parts.append(_origin(manifest))
    return "\n\n".join(filter(None, parts)) + "\n"


def _shape(shape: Settings, parameters: int) -> str:
    kept = ", ".join(f"{name} {shape[name]}" for name in _SHAPE)
    return f"**Model**: T5 of {parameters:,} parameters: {kept}."


def _recipe(
    shape: Settings, own: Settings, config: Settings, effective: Settings, step: int
) -> str:
    data = config["data"]
    text = (
        f"**Recipe**: {step:,} steps of {data['tokens_per_batch']:,} positions "
        f"(padding included, the mean of both sides), {own['name']}, peak "
        f"learning rate {own['learning_rate']:g}, schedule {own['schedule']}, dropout "
        f"{shape['dropout_rate']:g}, started from "
        f"{config['init']}; {effective['train_rows']:,} training pairs"
    )
    dropped = sum(effective["too_long"].values())
    if dropped:
        text += f" ({dropped:,} longer ones left out)"
    distill = config["distill"]
    if distill["target"]:
        shares = ", ".join(
            f"{name} {distill['texts'][name]:g}"
            for name in ("truth", "target", "draft")
            if distill["texts"][name]
        )
        text += (
            f". Distilled from {distill['target']} by {distill['name']} on texts of: "
            f"{shares}"
        )
    return f"{text}."


def _starts(effective: Settings) -> str:
    """Of a run that was gone on with, and perhaps otherwise than it began."""
    starts = effective.get("starts", ())
    if len(starts) < 2:
        return ""
    lines = "".join(
        f"- from step {own['step']:,}: `{own['command']}`\n" for own in starts
    )
    return f"The settings above are those of the last of several starts:\n\n{lines}"


def _scores(line: Mapping[str, int | float]) -> str:
    rows = "".join(
        f"| {name} | {line[name]:.4g} |\n" for name in line if name != "step"
    )
    head = (
        f"**Held out**, at step {line['step']:,}:\n\n| metric | value |\n|---|---:|\n"
    )
    return (head + rows).rstrip("\n")


def _origin(manifest: Settings) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in manifest["versions"].items())
    return f"Made by `{manifest['command']}` with {versions}."
