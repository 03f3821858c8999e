"""Verification rules side by side: as tables, and what they say in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

Row = Mapping[str, Any]

# A difference of fewer standard errors may be chance.
DECIDED = 2.0


def decode_table(rows: Sequence[Row]) -> Table:
    """What each rule gained on the same texts.

    Args:
        rows: one per run, rule and draft, as ``decodes`` of ``metrics.json``.
    """
    from rich.table import Table

    table = Table(
        title="tokens per target call of the same texts, by rule and draft",
        caption="+-: standard error over lines and draws; before the cut: without the "
        "end of the text; speedup: from tokens and passes, the rule's own time and the "
        "encoders left out\n(lossy): does not keep the target's law",
        caption_justify="left",
    )
    for title in ("run", "rule", "draft"):
        table.add_column(title)
    for title in (
        "nodes",
        "draft passes",
        "block efficiency",
        "+-",
        "before the cut",
        "predicted speedup",
    ):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["run"],
            row["rule"] + ("" if row["lossless"] else " (lossy)"),
            row["draft"],
            str(row["nodes"]),
            str(row["draft_passes"]),
            f"{row['block_efficiency']:.3f}",
            f"{row['standard_error']:.3f}",
            f"{row['tokens_per_round']:.3f}",
            f"{row['predicted_speedup']:.2f}x",
        )
    return table


def cost_table(costs: Row, title: str) -> Table:
    """What each rule itself takes.

    Args:
        costs: ``rule_costs`` of ``metrics.json``.
        title: of the step that stands beside them.
    """
    from rich.table import Table

    step, call = costs["step_seconds"] * 1e3, costs["call_seconds"] * 1e6
    table = Table(
        title=f"a rule's own time, beside {step:.1f} ms of {title}",
        caption=f"beyond {call:.0f} us of the call; compile: the first call beyond the "
        "median, less where a compile cache knows it",
        caption_justify="left",
    )
    table.add_column("rule, draft")
    for name in ("us", "quartiles", "% of a step", "compile, s"):
        table.add_column(name, justify="right")
    for name, own in costs["rules"].items():
        low, high = own["first_quartile"] * 1e6, own["third_quartile"] * 1e6
        table.add_row(
            name,
            f"{own['seconds'] * 1e6:.0f}",
            f"{low:.0f}-{high:.0f}",
            f"{own['of_step'] * 100:.1f}",
            f"{own['compile_seconds']:.1f}",
        )
    return table


def verdict(comparison: Row) -> str:
    """What is to be said of a rule that should be at least as good as another.

    Args:
        comparison: of ``comparisons`` of ``metrics.json``.
    """
    gain, error = comparison["difference"], comparison["standard_error"]
    share = gain / comparison["than_tokens"]
    said = (
        f"{comparison['rule']} ({comparison['draft']}) against {comparison['than']} "
        f"({comparison['than_draft']}): {gain:+.3f} tokens per call ({share:+.1%}), "
        f"standard error {error:.3f}"
    )
    if comparison["one_rule"]:
        return f"{said}: ONE RULE on these drafts, so this is chance"
    if not abs(gain) >= DECIDED * error > 0:
        return f"{said}: NOT DECIDED, more config.seeds would tell"
    if gain < 0:
        return f"{said}: LOSES by {-gain / error:.1f} standard errors"
    return f"{said}: more, by {gain / error:.1f} standard errors"
