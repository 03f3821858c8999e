"""Times of one drafter in front of one target, and what they predict."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import baseline, side_by_side
from specjax import metrics, theory
from specjax.data import batches
from specjax.decoding import speculative_generate
from specjax.drafters.ngram import NgramDrafter
from specjax.models.t5 import T5
from specjax.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed: lines, one at a time, in one way of drawing.

    Attributes:
        target: at the cost in question.
        parts: batches of one line.
        keys: one per line.
        sampling: of target and draft.
        max_length: decoder tokens.
        gamma: the most that is drafted.
        seconds: least length of the timing of a part.
        repeats: of it.
        rounds: timed decodes of each line.
    """

    target: T5
    parts: Sequence[batches.InferenceBatch]
    keys: jax.Array
    sampling: Sampling
    max_length: int
    gamma: int
    seconds: float
    repeats: int
    rounds: int

    def arguments(self) -> tuple[jax.Array, ...]:
        """A source of the most frequent length, as the timers take it."""
        lengths = [part.inputs.shape[1] for part in self.parts]
        part = self.parts[lengths.index(statistics.mode(lengths))]
        keys = baseline.batch_keys(self.keys, part)
        return jnp.asarray(part.inputs), jnp.asarray(part.mask), keys

    def settings(self) -> dict[str, Any]:
        """Of the timers."""
        return dict(
            sampling=self.sampling,
            max_length=self.max_length,
            seconds=self.seconds,
            repeats=self.repeats,
        )


def target_costs(work: Work) -> dict[str, Any]:
    """What a step of the target takes, its encoder, and passes that verify.

    Returns:
        ``step`` and ``encode`` in seconds; ``verify``, in steps, at some draft lengths
        ``gammas``. The verdict is counted with the pass.
    """
    gammas = sorted({1, min(3, work.gamma), work.gamma})
    found = [
        metrics.measure_costs(
            work.target,
            NgramDrafter(),  # costs nothing much, and its part is not read
            *work.arguments(),
            gamma=gamma,
            **work.settings(),
        )
        for gamma in gammas
    ]
    return {
        "step": statistics.median(costs.step.median for costs in found),
        "encode": statistics.median(costs.encode.median for costs in found),
        "gammas": gammas,
        "verify": [costs.verify_ratio for costs in found],
    }


def draft_seconds(work: Work, drafter: Any) -> dict[str, Any]:
    """Seconds of drafting a block, at a short and at the greatest draft length."""
    gammas = sorted({min(2, work.gamma), work.gamma})
    taken = [
        metrics.time_draft(
            work.target, drafter, *work.arguments(), gamma=gamma, **work.settings()
        ).median
        for gamma in gammas
    ]
    return {"gammas": gammas, "seconds": taken}


def predict(
    survival: Sequence[float], target: dict[str, Any], draft: dict[str, Any]
) -> list[dict[str, float]]:
    """What each draft length would give: ``gamma``, ``c``, ``v`` and ``predicted``.

    Between measured lengths costs are taken to grow evenly.

    Args:
        survival: by depth.
        target: from `target_costs`.
        draft: from `draft_seconds`.
    """
    rows = []
    for gamma in range(1, len(survival) + 1):
        v = float(np.interp(gamma, target["gammas"], target["verify"]))
        seconds = _line(gamma, draft["gammas"], draft["seconds"])
        c = seconds / gamma / target["step"]
        whole = theory.speedup_from_survival(survival[:gamma], c, v)
        rows.append({"gamma": gamma, "c": c, "v": v, "predicted": whole})
    return rows


def _line(at: float, places: Sequence[float], values: Sequence[float]) -> float:
    """The value on the lines between measured ones; before the first, on that line's
    own, and never below half the first."""
    if len(places) == 1 or at >= places[0]:
        return float(np.interp(at, places, values))
    slope = (values[1] - values[0]) / (places[1] - places[0])
    return max(values[0] + slope * (at - places[0]), values[0] / 2)


def run(
    setup: side_by_side.Setup, work: Work, best: dict[str, float], costs: dict[str, Any]
) -> dict[str, Any]:
    """Decodes all lines both ways, in turn, and takes medians.

    Args:
        setup: of the method.
        work: the lines.
        best: its draft length and what that costs, from `predict`.
        costs: from `target_costs`.

    Returns:
        ``speedup`` per token; ``predicted_whole``, from the passes that were counted
        and the encoders; tokens of either way; and how many lines have ``mismatches``
        where both must write the same.
    """
    gamma = int(best["gamma"])
    mode = side_by_side.Mode("", work.sampling, None, gamma)
    tally, warm = side_by_side.Tally(), set[int]()
    for part in work.parts:
        shape = part.inputs.shape[1]
        timed = side_by_side.time_batch(
            setup, part, work.keys, mode, work.rounds, shape not in warm
        )
        warm.add(shape)
        side_by_side.add_batch(tally, setup, part, work.keys, mode, timed)
    merged = metrics.merge(tally.stats)
    tokens, count = int(np.sum(merged.emitted)), len(work.parts)
    whole = theory.speedup_from_counts(
        tally.plain_passes,
        tally.speculative_passes,
        gamma,
        best["c"],
        best["v"],
        count * costs["encode"] / costs["step"],
        count * set_up_seconds(setup, work, gamma, costs) / costs["step"],
    )
    # Per token: sampled outputs of the two ways differ in length.
    plain_speed = tally.plain_tokens / tally.plain_seconds
    speed = tokens / tally.speculative_seconds
    return {
        "speedup": speed / plain_speed,
        "predicted_whole": whole * tokens / tally.plain_tokens,
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain_speed,
        "tokens_per_call": metrics.block_efficiency(merged),
        "drafted_per_call": metrics.draft_length(merged),
        "lines": count,
        "mismatches": len(tally.mismatches),
    }


def set_up_seconds(
    setup: side_by_side.Setup, work: Work, gamma: int, costs: dict[str, Any]
) -> float:
    """Seconds of the drafter's own encoder and memory, before its first draft."""
    inputs, mask, keys = work.arguments()

    def start() -> Any:
        return speculative_generate(
            work.target,
            setup.pair.drafter,
            inputs,
            mask,
            keys,
            verifier=setup.verifier,
            sampling=work.sampling,
            gamma=gamma,
            max_length=work.max_length,
            budget=0,
            eos_id=work.target.config.eos_id,
        )

    taken = metrics.time_call(start, repeats=work.repeats).median
    return max(taken - costs["encode"], 0.0)
