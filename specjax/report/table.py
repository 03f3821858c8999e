"""The measured figures of a run as a table and as a plain verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Metrics = Mapping[str, Any]
# Nearer to 1 than this, a run of a few seconds tells nothing.
LOSS = 0.98


def summary_table(runs: Mapping[str, Metrics]) -> Table:
    """One column per run (greedy, sampled), one line per figure.

    Args:
        runs: the run's name -> its part of ``metrics.json``.
    """
    from rich.table import Table

    table = Table(
        title="plain and speculative decoding of the same inputs"
        + "".join(f"\n{line}" for line in _setting(next(iter(runs.values())))),
        caption="from the counts: passes counted; c, v and the encoders timed\n"
        "from alpha: Leviathan et al.'s formula, with v = 1, no encoder, and tokens "
        "that stand or fall alike; of lossless chains alone",
        caption_justify="left",
    )
    table.add_column("")
    for name in runs:
        table.add_column(name, justify="right")
    for label, read in _LINES:
        table.add_row(label, *(read(metrics) for metrics in runs.values()))
    return table


def verdict(name: str, metrics: Metrics, gamma: int) -> str | None:
    """A warning where speculation loses or was not tried, else None.

    Args:
        name: of the run.
        metrics: its part of ``metrics.json``.
        gamma: draft length in use; 0: plain decoding was chosen.
    """
    if gamma == 0:
        return (
            f"{name}: gamma=auto chose plain decoding: no draft length pays here "
            "(acceptance too low for what drafting and verifying cost)"
        )
    speedup = metrics["speedup"]
    if speedup < LOSS:
        predicted = metrics["predicted_speedup"]
        hint = f"its counts and costs predict {predicted:.2f}x"
        if predicted < 1 and metrics["tree"]:
            hint += "; a smaller tree may pay, or a chain with --config.gamma=auto"
        elif predicted < 1:
            hint += "; --config.gamma=auto looks for a draft length that pays"
        else:
            hint += ": a busy machine?"
        return (
            f"{name}: speculation LOSES here: {speedup:.2f}x at gamma={gamma}; {hint}"
        )
    return None


def rule_name(metrics: Metrics) -> str:
    """The verifier and its settings, called lossy where it is.

    Args:
        metrics: of a run; its `verifier`, `verifier_settings` and `lossless` are read.
    """
    settings = ", ".join(f"{k}={v:g}" for k, v in metrics["verifier_settings"].items())
    name = metrics["verifier"] + (f" ({settings})" if settings else "")
    return name if metrics["lossless"] else f"LOSSY {name}"


def _setting(metrics: Metrics) -> list[str]:
    lines = [f"verifier: {rule_name(metrics)}"]
    if metrics["tree"]:
        nodes = len(metrics["tree"]["parents"]) - 1
        lines.append(
            f"drafts: a tree of {nodes} nodes, {metrics['gamma']} deep, siblings "
            f"{metrics['tree']['siblings']}; drafted and c are by level"
        )
    return lines


def _number(*path: str, form: str = "{:.2f}") -> Any:
    def read(metrics: Metrics) -> str:
        value: Any = metrics
        for name in path:
            value = value[name]
        return "-" if value is None else form.format(value)

    return read


def _drafted(metrics: Metrics) -> str:
    counts = metrics["speculative"]
    return f"{counts['drafted'] / counts['target_calls']:.2f}"


def _identical(metrics: Metrics) -> str:
    if metrics["identical"] is None:
        return "- (random)"
    if metrics["identical"]:
        return "yes"
    count = len(metrics["mismatches"])
    return f"NO: {count} differ" if metrics["lossless"] else f"lossy: {count} differ"


_LINES = (
    ("tokens identical", _identical),
    ("plain, tokens/s", _number("autoregressive", "tokens_per_second", form="{:.0f}")),
    (
        "speculative, tokens/s",
        _number("speculative", "tokens_per_second", form="{:.0f}"),
    ),
    ("speedup, measured", _number("speedup", form="{:.2f}x")),
    (
        "speedup, predicted from the counts",
        _number("predicted_speedup", form="{:.2f}x"),
    ),
    (
        "speedup, predicted from alpha",
        _number("formula_speedup", form="{:.2f}x"),
    ),
    ("gamma, deepest draft", _number("gamma", form="{}")),
    ("drafted per target call, mean", _drafted),
    ("alpha, mean of sum min(p, q)", _number("alpha", form="{:.3f}")),
    ("accepted / drafted", _number("acceptance_rate", form="{:.3f}")),
    ("block efficiency, tokens per target call", _number("block_efficiency")),
    ("c, draft step / target step", _number("cost_ratio", form="{:.3f}")),
    ("v, verifying pass / target step", _number("verify_ratio")),
    ("encoder / target step", _number("encode_ratio")),
    ("outputs cut at max_length", _number("speculative", "cut", form="{}")),
    ("compile, seconds", _number("compile_seconds", form="{:.1f}")),
)
