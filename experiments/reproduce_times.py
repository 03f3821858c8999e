"""Times of a reproduction: a target at some cost, alone and behind each of its drafts.

All ways of a task, temperature and target are run in turn, line by line, so that a slow
moment of the machine hits them all, and one baseline serves all drafts.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import baseline, build, side_by_side
from experiments.reproduce_laws import sampling_of
from experiments.reproduce_tasks import Task
from specjax import errors, metrics, roofline, theory
from specjax.decoding import DecodeOutput
from specjax.models.recomputed import RecomputedCross
from specjax.report import decode_plots, decodes
from specjax.verify import token_verify

Row = dict[str, Any]
_PLAIN, _RECOMPUTED = "plain", "recomputed"


@dataclasses.dataclass(frozen=True)
class Group:
    """What shares a baseline.

    Attributes:
        task: the lines.
        temperature: 0 or 1.
        target: of ``config.target_cost``.
        loaded: that target, at its cost.
    """

    task: Task
    temperature: int
    target: str
    loaded: build.Target

    @property
    def parts(self) -> list[Any]:
        """One line each."""
        lines = self.task.config.target_cost[self.target].lines
        return self.task.parts(self.task.rows[:lines], 1)

    @property
    def keys(self) -> jax.Array:
        """One per line."""
        return build.row_keys(self.task.config.seed, len(self.task.rows))


@dataclasses.dataclass(frozen=True)
class Way:
    """A draft that is ready to be timed.

    Attributes:
        setup: its models.
        mode: how it draws.
        costs: of its parts.
    """

    setup: side_by_side.Setup
    mode: side_by_side.Mode
    costs: metrics.Costs


def choose_gamma(task: Task, pair: build.Pair, survival: Sequence[float]) -> int:
    """The draft length of ``config.gammas`` that would be the fastest.

    Before anything is timed: c is taken from the bytes that decoders read, and the
    growth of the verifying pass from the settings.

    Args:
        task: has the settings.
        pair: models at their costs.
        survival: by depth.
    """
    model = pair.draft_model
    assert model is not None  # the drafts here are models
    read = roofline.decoder_parameters(model.config)
    c = read / roofline.decoder_parameters(pair.target.config)
    growth = task.config.verify_growth

    def speed(gamma: int) -> float:
        return theory.speedup_from_survival(survival[:gamma], c, 1 + growth * gamma)

    return max(task.config.gammas, key=speed)


def prepare(group: Group, pair: build.Pair, gamma: int) -> Way:
    """Times the parts of a draft and its target; their programs are compiled by then.

    Args:
        group: has the lines.
        pair: the models at their costs.
        gamma: draft length.
    """
    config = group.task.config
    sampling = sampling_of(group.temperature, group.loaded.num_tokens)
    setup = side_by_side.Setup(pair, token_verify, config.max_length)
    part = group.parts[0]
    costs = metrics.measure_costs(
        pair.target,
        pair.drafter,
        jnp.asarray(part.inputs),
        jnp.asarray(part.mask),
        baseline.batch_keys(group.keys, part),
        sampling=sampling,
        gamma=gamma,
        max_length=config.max_length,
        seconds=config.timing.seconds,
        repeats=config.timing.repeats,
    )
    return Way(setup, side_by_side.Mode("", sampling, None, gamma), costs)


def run(
    group: Group,
    drafts: Mapping[str, Callable[[build.Pair], int]],
    show: Callable[[str], None],
) -> dict[str, Row | Exception]:
    """Times a group; a draft that fails leaves the others.

    Args:
        group: what is timed.
        drafts: of ``config.draft_cost``, and what chooses the draft length of each.
        show: tells what is under way.

    Returns:
        a row per draft, or what it failed with, and the baseline's under "".
    """
    found: dict[str, Row | Exception] = {}
    ways: dict[str, Way] = {}
    for name, gamma in drafts.items():
        show(f"{group.target}, {name}: compiling, and timing the parts")
        try:
            own = group.task.decode_config(group.target, name)
            pair = build.build_pair(own, group.loaded)
            way = prepare(group, pair, gamma(pair))
            _one_line(group, way)
            ways[name] = way
        except errors.InputError:
            raise
        except Exception as error:
            found[name] = error
    show(f"{group.target}: decoding with and without drafts, in turn")
    timed = _decode(group, ways)
    plain = timed.pop(_PLAIN)
    found[""] = _baseline(group, plain, timed.pop(_RECOMPUTED, None))
    for name, own in timed.items():
        found[name] = _row(group, ways[name], plain, own)
    return found


def _one_line(group: Group, way: Way) -> None:
    """Decodes one line, so that what cannot fails before the others are timed."""
    part = group.parts[0]
    jax.block_until_ready(way.setup.speculative(part, group.keys, way.mode))


Timed = list[tuple[DecodeOutput, float]]  # output and seconds of each line


def _decode(group: Group, ways: Mapping[str, Way]) -> dict[str, Timed]:
    own, config = group.task.config.target_cost[group.target], group.task.config
    model = group.loaded.model
    sampling = sampling_of(group.temperature, group.loaded.num_tokens)
    keys, parts = group.keys, group.parts  # before anything is timed
    calls: dict[str, Callable[[Any], DecodeOutput]] = {}

    def alone(model: Any) -> Callable[[Any], DecodeOutput]:
        return lambda part: baseline.decode(
            model, part, keys, sampling, config.max_length
        )

    def drafted(way: Way) -> Callable[[Any], DecodeOutput]:
        return lambda part: way.setup.speculative(part, keys, way.mode)

    calls[_PLAIN] = alone(model)
    if own.recompute:
        calls[_RECOMPUTED] = alone(RecomputedCross(model))
    calls |= {name: drafted(way) for name, way in ways.items()}
    made: dict[str, Timed] = {name: [] for name in calls}
    for call in calls.values():
        jax.block_until_ready(call(parts[0]))
    for part in parts:
        rounds: dict[str, list[float]] = {name: [] for name in calls}
        outputs = {}
        for _ in range(own.repeats):
            for name, call in calls.items():
                start = time.perf_counter()
                outputs[name] = jax.block_until_ready(call(part))
                rounds[name].append(time.perf_counter() - start)
        for name, taken in rounds.items():
            made[name].append((outputs[name], float(np.median(taken))))
    return made


def _tokens(timed: Timed) -> int:
    return sum(int(np.sum(output.stats.emitted)) for output, _ in timed)


def _seconds(timed: Timed) -> float:
    return sum(seconds for _, seconds in timed)


def _mismatches(group: Group, plain: Timed, other: Timed) -> list[Row]:
    sampling = sampling_of(group.temperature, group.loaded.num_tokens)
    found: list[Row] = []
    for part, (first, _), (second, _) in zip(group.parts, plain, other, strict=True):
        found += baseline.differences(
            group.loaded.model, part, group.keys, first, second, sampling
        )
    return found


def _baseline(group: Group, plain: Timed, recomputed: Timed | None) -> Row:
    tokens, seconds = _tokens(plain), _seconds(plain)
    row: Row = {
        "lines": len(plain),
        "tokens": tokens,
        "seconds": seconds,
        "source_tokens": group.task.bucket,
        "slower_if_recomputed": None,
    }
    if recomputed is not None:
        # Drawn with the same keys: the same tokens, but for rounding.
        share = (_seconds(recomputed) / _tokens(recomputed)) / (seconds / tokens)
        row["slower_if_recomputed"] = share
        row["recomputed_mismatches"] = _mismatches(group, plain, recomputed)
    return row


def _row(group: Group, way: Way, plain: Timed, timed: Timed) -> Row:
    """The figures of one draft; those of the parts in target steps."""
    costs, gamma = way.costs, way.mode.gamma
    stats = metrics.merge([output.stats for output, _ in timed])
    tokens, calls = _tokens(timed), int(np.sum(stats.target_calls))
    accepted = int(np.sum(stats.accepted))
    plain_tokens, count = _tokens(plain), len(timed)
    encode, start = count * costs.encode_ratio, count * costs.draft_encode_ratio
    c, v = costs.cost_ratio, costs.verify_ratio
    # Of as many tokens: sampled texts of the two ways differ in length.
    whole = theory.speedup_from_counts(
        plain_tokens, calls, gamma, c, v, encode, start
    ) * (tokens / plain_tokens)
    loop = theory.speedup_from_counts(tokens, calls, gamma, c, v)
    return {
        "gamma": gamma,
        "lines": count,
        "plain_tokens": plain_tokens,
        "plain_seconds": _seconds(plain),
        "tokens": tokens,
        "seconds": _seconds(timed),
        "calls": calls,
        "drafted": int(np.sum(stats.drafted)),
        "accepted": accepted,
        "speedup": (_seconds(plain) / plain_tokens) / (_seconds(timed) / tokens),
        "counted": whole,
        "counted_survival": metrics.survival(stats),
        "tokens_per_call": tokens / calls,
        "step_seconds": costs.step.median,
        "c": c,
        "v": v,
        "encode": costs.encode_ratio,
        "draft_encode": costs.draft_encode_ratio,
        # What whole rounds would have brought, and the loop without encoders.
        "lost_to_cut": 1 - tokens / (calls + accepted),
        "lost_to_encoders": 1 - whole / loop,
        "greedy": group.temperature == 0,
        "mismatches": [] if group.temperature else _mismatches(group, plain, timed),
    }


def traced(task: Task, pair: build.Pair, gamma: int) -> Row:
    """Figure 1: the longest line's greedy decode.

    Args:
        task: the lines.
        pair: as it is; at another cost it writes the same.
        gamma: draft length.

    Returns:
        ``tokens``: each as a `report.decodes.Shown`; ``calls``; and ``gamma``.
    """
    config = task.config
    # Parts of one line each, in the order of the lines, since all are of one bucket.
    longest = max(range(len(task.rows)), key=lambda at: len(task.rows[at]))
    part = task.parts(task.rows, 1)[longest]
    output = baseline.speculate(
        pair.target,
        pair.drafter,
        part,
        build.row_keys(config.seed, len(task.rows)),
        verifier=token_verify,
        sampling=sampling_of(0, pair.num_tokens),
        gamma=gamma,
        max_length=config.max_length,
        trace=True,
    )
    slot = int(np.flatnonzero(part.valid)[0])
    shown = decodes.shown(output, slot, pair.tokenizer.decode_pieces)
    return {
        "gamma": gamma,
        "calls": int(output.stats.target_calls[slot]),
        "tokens": [list(dataclasses.astuple(own)) for own in shown],
    }


def lanes(group: Group, pair: build.Pair, drawn: Sequence[Row]) -> Row:
    """Figure 5: measured parts of one greedy decode, plainly and at draft lengths.

    Args:
        group: the target at its cost.
        pair: the same with its draft.
        drawn: from `traced`, one per draft length.

    Returns:
        ``lanes`` of `report.figures.timeline`, in seconds.
    """
    made: list[Row] = []
    for one in drawn:
        costs = prepare(group, pair, one["gamma"]).costs
        made.append(
            decode_plots.speculative_lane(f"gamma {one['gamma']}", costs, one["calls"])
        )
    alone = decode_plots.plain_lane("target alone", costs, len(drawn[-1]["tokens"]))
    return {"lanes": [*made, alone]}
