"""What was measured: agreement of two models, acceptance, and the cost of each part."""

from specjax.metrics.acceptance import (
    acceptance_rate,
    accepted_counts,
    block_efficiency,
    draft_length,
    merge,
    survival,
)
from specjax.metrics.agreement import (
    Agreement,
    alpha,
    drafter_alpha,
    mean_entropy,
    overlap,
    teacher_forced_alpha,
)
from specjax.metrics.ties import Difference, differences
from specjax.metrics.timing import (
    Costs,
    Timing,
    enough_steps,
    measure_costs,
    per_step,
    time_call,
    time_calls,
    time_draft,
    time_ratio,
)

__all__ = [
    "Agreement",
    "Costs",
    "Difference",
    "Timing",
    "acceptance_rate",
    "accepted_counts",
    "alpha",
    "block_efficiency",
    "differences",
    "draft_length",
    "drafter_alpha",
    "mean_entropy",
    "measure_costs",
    "merge",
    "overlap",
    "survival",
    "teacher_forced_alpha",
    "time_call",
    "time_calls",
    "time_draft",
    "enough_steps",
    "per_step",
    "time_ratio",
]
