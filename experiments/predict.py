"""What speculation would give, before it is run: speedup by draft length.

    python -m experiments.predict --config=configs/predict.py --workdir=DIR \
        [--input=FILE]

The target writes texts; one pass of each model over them tells how often a draft would
have stood (alpha, and by depth), and steps, drafts, verifying passes and encoders are
timed. From these: the paper's formula, and the speedup of whole decodes by token
verification of chains, for every draft length up to ``config.max_gamma``.
Writes DIR/manifest.json, DIR/metrics.json, DIR/predict.md and DIR/predict.csv.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import ml_collections
from absl import flags

from configs import predict as predict_config
from experiments import (
    acceptance,
    build,
    build_drafter,
    command,
    input_lines,
    method_costs,
)
from specjax import errors, metrics, theory
from specjax.data import batches
from specjax.drafters.base import Drafter
from specjax.report import predict as report
from specjax.sampling import Sampling

# Draft lengths at which passes are timed, with the greatest; between them costs are
# taken to grow evenly.
_TIMED = (1, 3, 7)

Row = dict[str, Any]


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    from rich.console import Console

    temperatures = check(config)
    buckets = build.buckets(config)
    path = input_lines.input_file(values.input or config.input)
    lines = input_lines.read_lines(path)
    pair = build.build_pair(config)
    ways = [Way.of(config, own, pair.num_tokens) for own in temperatures]
    sources = [pair.tokenizer.encode(config.task_prefix + line) for line in lines]
    input_lines.check_lengths(sources, buckets, path)
    longest = longest_gamma(pair.drafter, config.max_gamma)
    keys = build.row_keys(config.seed, len(sources) * config.draws)

    workdir.mkdir(parents=True, exist_ok=True)
    # What an earlier run has written must not stand beside this one's settings.
    for name in ("metrics.json", "predict.md", "predict.csv"):
        (workdir / name).unlink(missing_ok=True)
    manifest = command.manifest(
        config,
        input=str(path),
        max_gamma=longest,
        weights=build.fingerprints(config),
        num_tokens=pair.num_tokens,
    )
    command.write_json(workdir / "manifest.json", manifest)
    console = Console()
    found: list[Row] = []
    costs: dict[bool, Row] = {}  # they depend on no temperature, but for greedy
    with console.status("") as status:
        for way in ways:
            greedy = way.sampling.greedy
            draws = range(1 if greedy else config.draws)
            rows = [row for row in sources for _ in draws]
            parts = list(batches.inference_batches(rows, config.batch_size, buckets))
            if greedy not in costs:
                costs[greedy] = measure(
                    config, pair, way, parts, keys, longest, status.update
                )
                # Dozens of large programs would use up a process's memory maps.
                jax.clear_caches()
            status.update(f"{way.name}: what the target writes, and what would stand")
            accepted = acceptance.accept(
                pair,
                parts,
                keys,
                sampling=way.sampling,
                draft_sampling=way.draft_sampling,
                max_length=config.max_length,
                longest=longest,
            )
            found.append(predict(way, accepted, costs[greedy]))
    notes = report.notes(config.drafter, config.max_gamma, longest, found)
    if config.batch_size > 1:
        notes.append(
            "a batch ends with its slowest row, of which the mean is taken: the chance "
            "that another is slower still is left out"
        )
    content = {"drafter": config.drafter, "max_gamma": longest, "notes": notes}
    command.write_json(workdir / "metrics.json", content | {"temperatures": found})
    (workdir / "predict.md").write_text(report.markdown(found, notes), encoding="utf-8")
    report.write_csv(found, workdir / "predict.csv")
    console.print(report.table(found))
    for line in [*(one["verdict"] for one in found), *notes]:
        console.print(line, highlight=False, soft_wrap=True)
    print(f"written: {workdir}/{{manifest,metrics}}.json, predict.md, predict.csv")


def check(config: ml_collections.ConfigDict) -> list[float]:
    """The temperatures that are asked for.

    Raises:
        errors.InputError: a setting is missing, not known, or means nothing.
    """
    build.check_settings(config, predict_config.get_config())
    build.positive(config, "max_gamma", "draws", "batch_size")
    build.positive(config.timing, "repeats", path="timing.")
    if not config.timing.seconds > 0:
        raise errors.InputError(
            f"config.timing.seconds is {config.timing.seconds}: above 0"
        )
    build.check_max_length(config)
    build.named(build_drafter.DRAFTERS, config.drafter, "drafter")
    rule = config.draft.length.rule
    if rule is not None:
        raise errors.InputError(
            f"config.draft.length.rule is {rule!r}: a rule decides how long drafts "
            "are, and lengths are what is predicted here; leave it out"
        )
    given, wanted = config.temperatures, "numbers from 0 (greedy) on, such as 0,0.7,1"
    if not given:
        raise errors.InputError(f"config.temperatures is {given!r}: {wanted}")
    for value in given:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise errors.InputError(f"config.temperatures has {value!r}: {wanted}")
    if len(set(given)) < len(given):
        raise errors.InputError(f"config.temperatures is {given}: each only once")
    for name in ("sampling", "draft_sampling"):
        if not any(given) and any(own is not None for own in config[name].values()):
            raise errors.InputError(
                f"config.{name} is set and config.temperatures has 0 alone: greedy "
                "tokens are not drawn; leave it out or add a temperature"
            )
    return [float(value) for value in given]


@dataclasses.dataclass(frozen=True)
class Way:
    """One way of drawing tokens.

    Attributes:
        temperature: 0: greedy.
        sampling: of the target.
        draft_sampling: of the draft; None: the target's.
    """

    temperature: float
    sampling: Sampling
    draft_sampling: Sampling | None

    @classmethod
    def of(
        cls, config: ml_collections.ConfigDict, temperature: float, ids: int | None
    ) -> Way:
        """The way of a temperature; `ids` have a meaning.

        Raises:
            errors.InputError: sampling that means nothing.
        """
        own = {"temperature": temperature} | config.sampling.to_dict()
        settings = ml_collections.ConfigDict(
            {
                "drafter": config.drafter,
                "sampling": own,
                "draft_sampling": config.draft_sampling.to_dict(),
            }
        )
        sampling = build.build_sampling(settings.sampling, "sampling", ids)
        draft = build.build_draft_sampling(settings, ids)
        if temperature == 0:
            return cls(0.0, Sampling(temperature=None, num_tokens=ids), None)
        return cls(temperature, sampling, draft)

    @property
    def name(self) -> str:
        """As tables show it."""
        return f"T = {self.temperature:g}" if self.temperature else "greedy"

    @property
    def flags(self) -> str:
        """Of `experiments.decode`."""
        if not self.temperature:
            return "--config.runs=greedy"
        own = f"--config.sampling.temperature={self.temperature:g}"
        return f"--config.runs=sampled {own}"


def longest_gamma(drafter: Drafter, most: int) -> int:
    """The longest block that a drafter can draft, up to `most`."""
    for gamma in range(most, 1, -1):
        try:
            drafter.nodes(gamma)
        except errors.InputError:
            continue  # of so many heads or sentinels it has fewer
        return gamma
    return 1


def measure(
    config: ml_collections.ConfigDict,
    pair: build.Pair,
    way: Way,
    parts: Sequence[batches.InferenceBatch],
    keys: jax.Array,
    longest: int,
    show: Callable[[str], None],
) -> Row:
    """Times of all parts, compile time apart; `show` tells what is under way.

    Returns:
        ``step`` in seconds; in steps: ``encode``, ``draft_encode``, and at the draft
        lengths ``gammas`` the passes that ``verify`` and the ``draft`` of a block.
    """
    work = method_costs.Work(
        target=pair.target,
        parts=parts,
        keys=keys,
        sampling=way.sampling,
        max_length=config.max_length,
        gamma=longest,
        seconds=config.timing.seconds,
        repeats=config.timing.repeats,
        rounds=0,  # nothing is decoded
    )
    found = []
    for gamma in sorted({min(gamma, longest) for gamma in (*_TIMED, longest)}):
        show(f"{way.name}: timing a step, drafts of {gamma}, their pass and encoders")
        found.append(
            metrics.measure_costs(
                pair.target,
                pair.drafter,
                *work.arguments(),
                draft_sampling=way.draft_sampling,
                gamma=gamma,
                **work.settings(),
            )
        )
    return {
        "step": statistics.median(own.step.median for own in found),
        "encode": statistics.median(own.encode_ratio for own in found),
        "draft_encode": statistics.median(own.draft_encode_ratio for own in found),
        "gammas": [own.gamma for own in found],
        "verify": [own.verify_ratio for own in found],
        "draft": [own.cost_ratio * own.gamma for own in found],
    }


def predict(way: Way, accepted: acceptance.Acceptance, costs: Row) -> Row:
    """All numbers of one way: a choice per draft length, 0 first, and the best.

    Returns:
        of each of ``choices``: ``gamma``, ``c``, ``v``, ``tokens_per_call``;
        ``formula``, the paper's; ``loop``, from survival, c and v; ``predicted``, of
        whole decodes of these texts, last rounds that are cut and encoders included.
    """
    gammas, step, tokens = costs["gammas"], costs["step"], accepted.tokens
    draft = [blocks * step for blocks in costs["draft"]]
    choices: list[Row] = [
        {"gamma": 0, "c": None, "v": None, "tokens_per_call": 1.0}
        | {"formula": 1.0, "loop": 1.0, "predicted": 1.0}
    ]
    for own in method_costs.predict(
        accepted.survival, costs, {"gammas": gammas, "seconds": draft}
    ):
        gamma, c, v = int(own["gamma"]), own["c"], own["v"]
        calls = accepted.calls(gamma)
        # A batch goes on until its slowest row ends.
        whole = theory.speedup_from_counts(
            sum(map(max, tokens)),
            sum(map(max, calls)),
            gamma,
            c,
            v,
            len(calls) * costs["encode"],
            len(calls) * costs["draft_encode"],
        )
        choices.append(
            {
                "gamma": gamma,
                "c": c,
                "v": v,
                "tokens_per_call": sum(map(sum, tokens)) / sum(map(sum, calls)),
                "formula": float(theory.walltime_factor(accepted.alpha, gamma, c)),
                "loop": own["predicted"],
                "predicted": whole,
            }
        )
    best = max(choices, key=lambda choice: choice["predicted"])  # the first of equals
    found: Row = {
        "temperature": way.temperature,
        "name": way.name,
        "alpha": accepted.alpha,
        "survival": accepted.survival,
        "counted": accepted.kept is None,
        "texts": sum(map(len, tokens)),
        "tokens": sum(map(sum, tokens)),
        "costs": costs,
        "best": best["gamma"],
        "choices": choices,
    }
    return found | {"verdict": report.verdict(found, way.flags)}


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "input", None, "Text file, one input per line.", flag_values=values
    )


if __name__ == "__main__":
    command.run(main, define=_define)
