"""What `experiments.lossless` proves of a pair of models, whose laws are too large."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import ml_collections
import numpy as np

from configs import lossless
from experiments import baseline, build, input_lines
from specjax import errors
from specjax.data import batches
from specjax.decoding import DecodeOutput
from specjax.drafters.tree import chain_or_tree
from specjax.proof import grid, statistics, verdicts
from specjax.sampling import Sampling
from specjax.verify import Verifier

_OF_A_PAIR = (
    "gamma draws tokens sampling task_prefix buckets max_length batch_size dtype"
).split()

# Decodes batches: with one key per row of the file, drawn so, at most so many tokens a
# row.
Texts = Callable[
    [Sequence[batches.InferenceBatch], jax.Array, Sampling, int], list[DecodeOutput]
]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A pair with its input.

    Attributes:
        pair: the models.
        rows: token ids of each line.
        parts: the lines as batches.
        keys: one per line.
        sampling: of target and draft.
        tie: how far two scores may be apart that rounding exchanges.
        manifest: what is to be written of it.
    """

    pair: build.Pair
    rows: list[list[int]]
    parts: list[batches.InferenceBatch]
    keys: jax.Array
    sampling: Sampling
    tie: float
    manifest: dict[str, Any]


def load(config: ml_collections.ConfigDict, given: str | None) -> Loaded | None:
    """The pair that the settings name; None: none is named.

    Args:
        config: the settings.
        given: the file with the lines.

    Raises:
        InputError: half of a pair, no input or an input without a pair, or settings
            that mean nothing.
    """
    folders = {role: config[role].checkpoint for role in ("target", "draft")}
    if not any(folders.values()):
        if given:
            raise errors.InputError(
                f"--input={given} is for a pair: set config.target.checkpoint and "
                "config.draft.checkpoint, or leave it out"
            )
        _refuse_unread(config)
        return None
    build.positive(config, "batch_size", "draws", "tokens", "gamma")
    build.check_max_length(config)
    if config.tokens > config.max_length - 1:
        raise errors.InputError(
            f"config.tokens is {config.tokens}: at most config.max_length less the "
            f"start token, {config.max_length - 1}"
        )
    buckets = build.buckets(config)
    path = input_lines.input_file(given or "")
    lines = input_lines.read_lines(path)
    settings = ml_collections.ConfigDict(
        dict(
            target=config.target,
            draft=config.draft,
            drafter="model",
            dtype=config.dtype,
        )
    )
    pair = build.build_pair(settings)
    sampling = build.build_sampling(config.sampling, "sampling", pair.num_tokens)
    if sampling.temperature == 0:
        raise errors.InputError(
            "config.sampling.temperature is 0: nothing would be drawn, and greedy "
            "output is compared in any case"
        )
    rows = [pair.tokenizer.encode(config.task_prefix + line) for line in lines]
    input_lines.check_lengths(rows, buckets, path)
    return Loaded(
        pair=pair,
        rows=rows,
        parts=list(batches.inference_batches(rows, config.batch_size, buckets)),
        keys=build.row_keys(config.seed, len(rows)),
        sampling=sampling,
        tie=baseline.TIES[config.dtype],
        manifest={
            "input": str(path),
            "weights": build.fingerprints(settings),
            "num_tokens": pair.num_tokens,
        },
    )


def _refuse_unread(config: ml_collections.ConfigDict) -> None:
    """Settings of a pair mean nothing without one."""
    given, known = config.to_dict(), lossless.get_config().to_dict()
    for name in _OF_A_PAIR:
        if given[name] != known[name]:
            raise errors.InputError(
                f"config.{name} is set and there is no pair: it is not read on tables; "
                "leave it out, or set config.target.checkpoint and "
                "config.draft.checkpoint"
            )


@dataclasses.dataclass(frozen=True)
class Result:
    """What was seen of one rule.

    Attributes:
        name: of the rule and its drafts.
        sampled_p: least p-value of the lines' first tokens against plain sampling,
            corrected for their number.
        line: of the input where that was, from 1.
        compared: lines whose samples could tell anything: not all outcomes were rare.
        greedy: where greedy output leaves the target's own: `row`, `position` and
            `top2_gap`.
        coupled: the same of sampled output, with the gap of the noisy scores; None:
            the rule does not share noise.
        faults: what is wrong, in words.
    """

    name: str
    sampled_p: float
    line: int
    compared: int
    greedy: list[dict[str, Any]]
    coupled: list[dict[str, Any]] | None
    faults: list[str]


def on_pair(
    loaded: Loaded,
    rules: Mapping[str, Verifier],
    config: ml_collections.ConfigDict,
    draws: int,
) -> list[Result]:
    """Compares every rule with the target alone, greedily and by samples.

    Args:
        loaded: the pair.
        rules: lossless ones, by name.
        config: the settings.
        draws: samples of each line.
    """
    from rich import progress

    greedy = Sampling(temperature=None, num_tokens=loaded.pair.num_tokens)
    sampled = loaded.sampling
    subjects = [
        own for name, rule in rules.items() for own in verdicts.subjects(name, rule)
    ]
    with progress.Progress(
        progress.TextColumn("comparing on the pair"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=len(subjects) + 1)
        # Every line many times over, with keys that no other draw has.
        many = [row for row in loaded.rows for _ in range(draws)]
        parts = list(
            batches.inference_batches(many, config.batch_size, build.buckets(config))
        )
        own, other = jax.random.split(
            jax.random.fold_in(loaded.keys[0], len(many)), (2, len(many))
        )
        plain: Texts = functools.partial(_alone, loaded, config.max_length)
        lines, whole = (loaded.parts, loaded.keys), config.max_length
        texts, coupled_to = plain(*lines, greedy, whole), plain(*lines, sampled, whole)
        # Of samples no more is written than is compared.
        samples = _first(parts, plain(parts, own, sampled, config.tokens), len(many))
        bar.advance(task)
        found = []
        for subject in subjects:
            drafted = _drafted(loaded, subject, config)
            seen = _first(
                parts, drafted(parts, other, sampled, config.tokens), len(many)
            )
            p_values = [
                statistics.two_sample_p(samples[at : at + draws], seen[at : at + draws])
                for at in range(0, len(many), draws)
            ]
            again = drafted(*lines, greedy, whole)
            apart = _differences(loaded, texts, again, greedy)
            unlike = None
            if subject.verifier.noise == "position":
                again = drafted(*lines, sampled, whole)
                unlike = _differences(loaded, coupled_to, again, sampled)
            found.append((subject.name, p_values, apart, unlike))
            bar.advance(task)
    every = statistics.holm(
        [1.0 if p is None else p for _, p_values, _, _ in found for p in p_values]
    )
    corrected = every.reshape(len(found), len(loaded.rows))
    return [
        _result(
            name,
            own_p,
            sum(p is not None for p in p_values),
            apart,
            unlike,
            loaded.tie,
        )
        for (name, p_values, apart, unlike), own_p in zip(found, corrected, strict=True)
    ]


def _result(
    name: str,
    p_values: np.ndarray,
    compared: int,
    greedy: list[dict[str, Any]],
    coupled: list[dict[str, Any]] | None,
    tie: float,
) -> Result:
    faults, line = [], int(np.argmin(p_values)) + 1
    if not compared:
        faults.append(
            f"{name}: the samples of no line can be compared, since all but one of "
            "their outcomes are too rare: more config.draws, or fewer config.tokens"
        )
    if p_values.min() < verdicts.LEVEL:
        faults.append(
            f"{name}: what it samples of line {line} is not what the target samples "
            f"alone (corrected p = {p_values.min():.2g})"
        )
    for kind, unlike in (("greedily", greedy), ("of one noise", coupled or [])):
        for one in unlike:
            if not one["top2_gap"] <= tie:  # NaN is no tie
                faults.append(
                    f"{name}: {kind} line {one['row'] + 1} leaves the target's own at "
                    f"position {one['position']}, where the two tokens are "
                    f"{one['top2_gap']:.2g} apart: more than rounding explains"
                )
    return Result(name, float(p_values.min()), line, compared, greedy, coupled, faults)


def _alone(
    loaded: Loaded,
    max_length: int,
    parts: Sequence[batches.InferenceBatch],
    keys: jax.Array,
    sampling: Sampling,
    budget: int,
) -> list[DecodeOutput]:
    """Decodes batches with the target alone."""
    target = loaded.pair.target
    return baseline.decode_all(target, parts, keys, sampling, max_length, budget)


def _drafted(
    loaded: Loaded, subject: verdicts.Subject, config: ml_collections.ConfigDict
) -> Texts:
    """Decodes batches with a draft in front of the target."""
    way = subject.way
    drafter = chain_or_tree(loaded.pair.drafting_model, way.tree, way.siblings)
    gamma = config.gamma if way.siblings is None else grid.GAMMA

    def texts(
        parts: Sequence[batches.InferenceBatch],
        keys: jax.Array,
        sampling: Sampling,
        budget: int,
    ) -> list[DecodeOutput]:
        return [
            baseline.speculate(
                loaded.pair.target,
                drafter,
                part,
                keys,
                verifier=subject.verifier,
                sampling=sampling,
                gamma=gamma,
                max_length=config.max_length,
                budget=budget,
            )
            for part in parts
        ]

    return texts


def _first(
    parts: Sequence[batches.InferenceBatch],
    outputs: Sequence[DecodeOutput],
    rows: int,
) -> list[tuple[int, ...]]:
    """The tokens of each row."""
    return [tuple(text) for text in baseline.tokens_by_row(parts, outputs, rows)]


def _differences(
    loaded: Loaded,
    plain: Sequence[DecodeOutput],
    other: Sequence[DecodeOutput],
    sampling: Sampling,
) -> list[dict[str, Any]]:
    """Where rows first part, and the gap of the two tokens' scores."""
    found = [
        one
        for part, own, drafted in zip(loaded.parts, plain, other, strict=True)
        for one in baseline.differences(
            loaded.pair.target, part, loaded.keys, own, drafted, sampling
        )
    ]
    return sorted(found, key=lambda one: one["row"])


def result_table(results: Sequence[Result]) -> Any:
    """One line per rule."""
    from rich.table import Table

    table = Table(
        title="on the pair: against the target alone",
        caption="p: and of how many lines the samples could tell anything\n"
        "differ: rows, and the widest gap of the two tokens' scores there",
        caption_justify="left",
    )
    for name in ("rule", "samples, p", "greedy", "one noise", "verdict"):
        table.add_column(name)
    for result in results:
        table.add_row(
            result.name,
            f"{result.sampled_p:.2g} ({result.compared})",
            _apart(result.greedy),
            _apart(result.coupled),
            "[bold red]FAILS" if result.faults else "as the target",
        )
    return table


def _apart(unlike: list[dict[str, Any]] | None) -> str:
    if unlike is None:
        return "-"
    if not unlike:
        return "identical"
    widest = max(one["top2_gap"] for one in unlike)
    return f"{len(unlike)} differ (gap {widest:.1g})"
