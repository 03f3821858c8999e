"""Decoding the same batches with and without a draft: outputs, seconds, counts."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from experiments import baseline, build, build_controls, build_length
from specjax import metrics, theory
from specjax.data import batches
from specjax.decoding import DecodeOutput, Stats
from specjax.sampling import Sampling
from specjax.verify import Verifier

_AUTO_GAMMAS = (1, 2, 3, 5, 7)


@dataclasses.dataclass(frozen=True)
class Mode:
    """One way of drawing tokens.

    Attributes:
        name: "greedy" or "sampled".
        sampling: of the target.
        draft_sampling: of the draft; None: the target's.
        gamma: tokens drafted per target call; 0: plain decoding.
    """

    name: str
    sampling: Sampling
    draft_sampling: Sampling | None
    gamma: int


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all modes share.

    Attributes:
        pair: the models.
        verifier: decides which drafted tokens stand.
        max_length: decoder tokens, start token included.
        about: how the rule and the tree are named in what is written: `verifier`,
            `verifier_settings`, `lossless` and `tree`.
        ends: what outputs begin with and stop at.
    """

    pair: build.Pair
    verifier: Verifier
    max_length: int
    about: dict[str, Any] = dataclasses.field(default_factory=dict)
    ends: build_controls.Ends = build_controls.Ends()

    def one_text(self, mode: Mode) -> bool:
        """Whether both ways write the same tokens, but for lossy rules and rounding.

        They do greedily, and where target and draft share the noise of each position.
        """
        return mode.sampling.greedy or self.verifier.noise == "position"

    def plain(self, batch: batches.InferenceBatch, keys: jax.Array, mode: Mode) -> Any:
        """Decodes a batch with the target alone."""
        return baseline.decode(
            self.pair.target,
            batch,
            keys,
            mode.sampling,
            self.max_length,
            **self.ends.settings(len(batch.rows)),
        )

    def speculative(
        self,
        batch: batches.InferenceBatch,
        keys: jax.Array,
        mode: Mode,
        with_trace: bool = False,
    ) -> DecodeOutput:
        """Decodes a batch with the draft in front; plainly where gamma is 0."""
        if mode.gamma == 0:
            return self.plain(batch, keys, mode)
        return baseline.speculate(
            self.pair.target,
            self.pair.drafter,
            batch,
            keys,
            verifier=self.verifier,
            sampling=mode.sampling,
            draft_sampling=mode.draft_sampling,
            gamma=mode.gamma,
            max_length=self.max_length,
            trace=with_trace,
            **self.ends.settings(len(batch.rows)),
        )

    def written(self, output: DecodeOutput, slot: int) -> tuple[list[int], bool]:
        """A row's new tokens, and whether it ended by itself."""
        tokens = baseline.new_tokens(output, slot, len(self.ends.prefix))
        eos_id = self.pair.target.config.eos_id
        return tokens, baseline.finished(tokens, eos_id) or self.ends.stops(tokens)


@dataclasses.dataclass
class Tally:
    """What one mode's batches add up to."""

    plain_seconds: float = 0.0
    plain_tokens: int = 0
    # Outputs that did not end by themselves.
    plain_cut: int = 0
    speculative_cut: int = 0
    # Passes of the loops: a batch goes on until its slowest row ends.
    plain_passes: int = 0
    speculative_passes: int = 0
    speculative_seconds: float = 0.0
    compile_seconds: float = 0.0
    agreements: list[metrics.Agreement] = dataclasses.field(default_factory=list)
    stats: list[Stats] = dataclasses.field(default_factory=list)
    mismatches: list[dict[str, Any]] = dataclasses.field(default_factory=list)


def measure_costs(
    setup: Setup,
    batch: batches.InferenceBatch,
    keys: jax.Array,
    mode: Mode,
    tally: Tally,
) -> metrics.Costs:
    """Times of drafting, verifying and encoding for one mode's gamma.

    The timing runs the decoding loops' own programs, so what compiling them takes is
    told apart and tallied here.
    """

    def plain() -> DecodeOutput:
        return setup.plain(batch, keys, mode)

    def fast() -> DecodeOutput:
        return setup.speculative(batch, keys, mode)

    for decode in (plain, fast):
        tally.compile_seconds += max(_timed(decode)[1] - _timed(decode)[1], 0.0)
    return metrics.measure_costs(
        setup.pair.target,
        build_length.without_rule(setup.pair.drafter),  # c is of whole blocks
        jnp.asarray(batch.inputs),
        jnp.asarray(batch.mask),
        baseline.batch_keys(keys, batch),
        verifier=setup.verifier,
        sampling=mode.sampling,
        draft_sampling=mode.draft_sampling,
        gamma=mode.gamma,
        max_length=setup.max_length,
    )


def resolve_gamma(
    setup: Setup,
    batch: batches.InferenceBatch,
    keys: jax.Array,
    mode: Mode,
    tally: Tally,
) -> tuple[Mode, dict[int, metrics.Costs]]:
    """Chooses gamma by measured survival and costs; 0 where plain decoding is best.

    Both are measured at every gamma in question: block verification's survival at a
    depth is not the same for every gamma.
    """

    def at(gamma: int) -> Mode:
        return dataclasses.replace(mode, gamma=gamma)

    costs, speedups = {}, {0: 1.0}
    for gamma in _AUTO_GAMMAS:
        costs[gamma] = measure_costs(setup, batch, keys, at(gamma), tally)
        stats = setup.speculative(batch, keys, at(gamma)).stats
        speedups[gamma] = theory.speedup_from_survival(
            metrics.survival(stats), costs[gamma].cost_ratio, costs[gamma].verify_ratio
        )
    return at(max(speedups, key=speedups.__getitem__)), costs


def decode_all(
    setup: Setup,
    parts: list[batches.InferenceBatch],
    keys: jax.Array,
    modes: list[Mode],
    config: ml_collections.ConfigDict,
    lines: list[str],
    workdir: pathlib.Path,
    tallies: dict[str, Tally],
) -> list[dict[str, Any]]:
    """Decodes every batch in every mode, both ways, and writes its lines at once.

    Until all is done the lines stand in ``decodes.jsonl.partial``, in order of length.

    Returns:
        The content of ``decodes.jsonl``, in order of the input.
    """
    from rich import progress

    warm: set[tuple[str, int]] = set()
    records: list[dict[str, Any]] = []
    path = workdir / "decodes.jsonl"
    partial = workdir / "decodes.jsonl.partial"
    with (
        open(partial, "w", encoding="utf-8") as file,
        progress.Progress(
            progress.TextColumn("decoding"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            transient=True,
        ) as bar,
    ):
        task = bar.add_task("", total=len(lines))
        for part in parts:
            made: dict[int, dict[str, Any]] = {}
            for mode in modes:
                shape = (mode.name, part.inputs.shape[1])
                plain, fast = decode_batch(
                    setup,
                    part,
                    keys,
                    mode,
                    config.repeats,
                    tallies[mode.name],
                    shape not in warm,
                )
                warm.add(shape)
                for slot, row in enumerate(part.rows):
                    if part.valid[slot]:
                        record = made.setdefault(int(row), {"input": lines[row]})
                        part_record = _record(setup, mode, plain, fast, slot)
                        if mode is modes[0]:
                            record |= part_record
                        if mode.name != "greedy":
                            record[mode.name] = part_record
            for row in sorted(made):
                records.append({"row": row} | made[row])
                file.write(json.dumps(records[-1], ensure_ascii=False) + "\n")
            file.flush()
            bar.advance(task, int(np.sum(part.valid)))
    records.sort(key=lambda record: record["row"])
    ordered = workdir / "decodes.jsonl.ordered"
    with open(ordered, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(r, ensure_ascii=False) + "\n" for r in records)
    ordered.replace(path)
    partial.unlink()
    return records


@dataclasses.dataclass(frozen=True)
class Timed:
    """One batch decoded both ways.

    Attributes:
        outputs: of the target alone, and with the draft.
        seconds: the medians of both.
        compile_seconds: what the first calls took beyond.
    """

    outputs: tuple[DecodeOutput, DecodeOutput]
    seconds: tuple[float, float]
    compile_seconds: float


def time_batch(
    setup: Setup,
    part: batches.InferenceBatch,
    keys: jax.Array,
    mode: Mode,
    repeats: int,
    is_new_shape: bool,
) -> Timed:
    """Decodes one batch both ways, in turn, so that a slow moment hits both."""
    ways = (
        lambda: setup.plain(part, keys, mode),
        lambda: setup.speculative(part, keys, mode),
    )
    first = [_timed(way)[1] for way in ways] if is_new_shape else []
    rounds = [[_timed(way) for way in ways] for _ in range(repeats)]
    plain, fast = (float(np.median([own[i][1] for own in rounds])) for i in (0, 1))
    return Timed(
        outputs=(rounds[-1][0][0], rounds[-1][1][0]),
        seconds=(plain, fast),
        compile_seconds=max(sum(first) - plain - fast, 0.0) if first else 0.0,
    )


def decode_batch(
    setup: Setup,
    part: batches.InferenceBatch,
    keys: jax.Array,
    mode: Mode,
    repeats: int,
    tally: Tally,
    is_new_shape: bool,
) -> tuple[DecodeOutput, DecodeOutput]:
    """Decodes one batch both ways and adds medians to the tally."""
    timed = time_batch(setup, part, keys, mode, repeats, is_new_shape)
    add_batch(tally, setup, part, keys, mode, timed)
    tally.agreements.append(_agreement(setup, part, mode, timed.outputs[0]))
    return timed.outputs


def add_batch(
    tally: Tally,
    setup: Setup,
    part: batches.InferenceBatch,
    keys: jax.Array,
    mode: Mode,
    timed: Timed,
) -> None:
    """Adds a batch's seconds, counts and mismatches to a tally."""
    plain_output, fast_output = timed.outputs
    tally.compile_seconds += timed.compile_seconds
    tally.plain_seconds += timed.seconds[0]
    tally.speculative_seconds += timed.seconds[1]
    tally.plain_tokens += int(np.sum(plain_output.stats.emitted))
    tally.plain_cut += _cut(setup, part, plain_output)
    tally.speculative_cut += _cut(setup, part, fast_output)
    tally.plain_passes += int(np.max(plain_output.stats.target_calls))
    tally.speculative_passes += int(np.max(fast_output.stats.target_calls))
    tally.stats.append(fast_output.stats)
    if setup.one_text(mode):
        tally.mismatches += baseline.differences(
            setup.pair.target, part, keys, plain_output, fast_output, mode.sampling
        )


def _cut(setup: Setup, part: batches.InferenceBatch, output: DecodeOutput) -> int:
    slots = np.flatnonzero(part.valid)
    return sum(not setup.written(output, int(slot))[1] for slot in slots)


def _agreement(
    setup: Setup, part: batches.InferenceBatch, mode: Mode, plain: DecodeOutput
) -> metrics.Agreement:
    """Where the draft's laws agree with the target's on the target's own output."""
    arguments = (
        jnp.asarray(part.inputs),
        jnp.asarray(part.mask),
        plain.tokens,
        plain.length,
    )
    settings: dict[str, Any] = dict(
        sampling=mode.sampling,
        draft_sampling=mode.draft_sampling,
        prefix_length=jnp.full(len(part.rows), len(setup.ends.prefix), jnp.int32),
    )
    pair = setup.pair
    if pair.draft_model is None:
        return metrics.drafter_alpha(pair.target, pair.drafter, *arguments, **settings)
    return metrics.teacher_forced_alpha(
        pair.target, pair.draft_model, *arguments, **settings
    )


def summarize(
    setup: Setup, mode: Mode, tally: Tally, costs: metrics.Costs
) -> dict[str, Any]:
    """One mode's part of ``metrics.json``."""
    stats = metrics.merge(tally.stats)
    emitted = int(np.sum(stats.emitted))
    calls = int(np.sum(stats.target_calls))
    alpha = metrics.alpha(*tally.agreements)
    speculates = mode.gamma > 0
    # Of chains, by a rule that accepts a draft with the chance alpha: rules that read
    # no law accept less, but greedily all are one.
    by_alpha = setup.verifier.needs_law or mode.sampling.greedy
    is_chain = not setup.pair.drafter.trees
    ruled = build_length.has_rule(setup.pair.drafter)
    has_formula = setup.verifier.lossless and by_alpha and is_chain and not ruled
    drafted, accepted = int(np.sum(stats.drafted)), int(np.sum(stats.accepted))
    return setup.about | {
        "gamma": mode.gamma,
        "autoregressive": {
            "tokens": tally.plain_tokens,
            "seconds": tally.plain_seconds,
            "tokens_per_second": tally.plain_tokens / tally.plain_seconds,
            "cut": tally.plain_cut,
        },
        "speculative": {
            "tokens": emitted,
            "seconds": tally.speculative_seconds,
            "tokens_per_second": emitted / tally.speculative_seconds,
            "target_calls": calls,
            "drafted": drafted,
            "accepted": accepted,
            "cut": tally.speculative_cut,
        },
        # Per token: sampled outputs of the two ways differ in length.
        "speedup": (tally.plain_seconds / tally.plain_tokens)
        / (tally.speculative_seconds / emitted),
        "predicted_speedup": _predicted_speedup(
            mode, tally, costs, emitted, drafted / calls if ruled else mode.gamma
        ),
        "formula_speedup": 1.0
        if not speculates
        else float(theory.walltime_factor(alpha, mode.gamma, costs.cost_ratio))
        if has_formula
        else None,
        "alpha": alpha,
        "acceptance_rate": metrics.acceptance_rate(stats) if drafted else None,
        "survival": metrics.survival(stats) if speculates else [],
        "block_efficiency": metrics.block_efficiency(stats),
        "cost_ratio": costs.cost_ratio,
        "verify_ratio": costs.verify_ratio,
        "encode_ratio": costs.encode_ratio,
        "compile_seconds": tally.compile_seconds,
        "identical": not tally.mismatches if setup.one_text(mode) else None,
        "mismatches": tally.mismatches,
    }


def _predicted_speedup(
    mode: Mode, tally: Tally, costs: metrics.Costs, emitted: int, passes: float
) -> float:
    """From passes counted and costs timed; per token, as the measured speedup.

    Args:
        mode: of the decodes.
        tally: their counts.
        costs: of the parts.
        emitted: tokens.
        passes: of the draft in a block; in a batch, a row's own at least.
    """
    if not mode.gamma:
        return 1.0
    count = len(tally.stats)
    whole = theory.speedup_from_counts(
        tally.plain_passes,
        tally.speculative_passes,
        passes,
        costs.cost_ratio,
        costs.verify_ratio,
        count * costs.encode_ratio,
        count * costs.draft_encode_ratio,
    )
    return whole * emitted / tally.plain_tokens


def _timed(function: Callable[[], DecodeOutput]) -> tuple[DecodeOutput, float]:
    start = time.perf_counter()
    output = jax.block_until_ready(function())
    return output, time.perf_counter() - start


def _record(
    setup: Setup, mode: Mode, plain: DecodeOutput, fast: DecodeOutput, slot: int
) -> dict[str, Any]:
    tokens, finished = setup.written(fast, slot)
    record: dict[str, Any] = {
        "tokens": tokens,
        "text": setup.pair.tokenizer.decode(tokens),
        # Else max_length cut it.
        "finished": finished,
        "target_calls": int(fast.stats.target_calls[slot]),
        "accepted": int(np.sum(np.asarray(fast.stats.accepted)[slot])),
    }
    if not setup.verifier.lossless:
        record["lossless"] = False
    if setup.one_text(mode):
        record["autoregressive_tokens"] = setup.written(plain, slot)[0]
        record["identical"] = record["autoregressive_tokens"] == tokens
    return record
