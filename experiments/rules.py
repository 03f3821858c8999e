"""Every verification rule on one pair at equal settings: what it gains and costs.

    python -m experiments.rules --config=configs/rules.py --workdir=DIR

Each rule decodes the same lines with the same keys: chains of `config.gammas` drafts;
for rules of trees, the best trees of as many nodes, that of `config.nodes`, and the one
of greatest predicted speedup here, by acceptance that is measured on other draws. Then
each rule alone is timed beside a decoder step of `config.cost.model`.
Writes DIR/manifest.json and DIR/metrics.json.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import flags

from configs import rules as rules_config
from experiments import (
    baseline,
    build,
    build_drafter,
    command,
    input_lines,
    picking,
    rule_costs,
)
from specjax import errors, metrics, tree_picker, trees
from specjax.data import batches
from specjax.drafters.tree import chain_or_tree
from specjax.models import t5_config
from specjax.report import rules as report
from specjax.sampling import Sampling
from specjax.verify import Verifier

# Draws of each line that acceptance is measured on.
_PICK_DRAWS = 4
_ANY = "any lossless"

Costs = tuple[dict[int, float], dict[int, float]]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way of decoding the lines.

    Attributes:
        run: "sampled" or "greedy".
        rule: its name; greedily "any lossless" stands for all of these.
        verifier: the rule.
        draft: in words.
        parents: of the tree; a chain's own.
        siblings: how the tree's are drawn; None: a chain is drafted.
    """

    run: str
    rule: str
    verifier: Verifier
    draft: str
    parents: tuple[int, ...]
    siblings: str | None

    @property
    def depth(self) -> int:
        """Passes of the draft."""
        return trees.depth(self.parents)

    @property
    def program(self) -> tuple[Any, ...]:
        """What it decodes with: cases of one program are one."""
        return self.run, self.rule, self.parents, self.siblings


@dataclasses.dataclass(frozen=True)
class Counts:
    """What a case came to, by line and draw.

    Attributes:
        emitted: tokens.
        calls: of the target.
        tokens_per_round: before the cut at the end of the text.
    """

    emitted: np.ndarray
    calls: np.ndarray
    tokens_per_round: float

    @property
    def block_efficiency(self) -> float:
        """Tokens per target call."""
        return float(self.emitted.sum() / self.calls.sum())

    @property
    def influence(self) -> np.ndarray:
        """How far each line and draw moves the ratio of the sums, to first order."""
        return (self.emitted - self.block_efficiency * self.calls) / self.calls.mean()


@dataclasses.dataclass(frozen=True)
class Setup:
    """What all cases share.

    Attributes:
        pair: the models.
        rows: the lines' token ids.
        buckets: source lengths that are padded to.
        seeds: draws of each line.
        batch_size: rows of a batch.
        max_length: decoder tokens, start token included.
        seed: of all draws.
        samplings: of the target and the draft, by run.
    """

    pair: build.Pair
    rows: list[list[int]]
    buckets: tuple[int, ...]
    seeds: int
    batch_size: int
    max_length: int
    seed: int
    samplings: dict[str, Sampling]


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    from rich.console import Console

    del values
    build.check_settings(config, rules_config.get_config())
    build.positive(config, "nodes", "seeds", "batch_size")
    build.positive(config.cost, "repeats", path="cost.")
    build.check_max_length(config)
    if not config.cost.seconds > 0:
        raise errors.InputError(
            f"config.cost.seconds is {config.cost.seconds}: above 0"
        )
    shape = t5_config.T5Config.preset(config.cost.model)
    names = list(dict.fromkeys(build.all_or_names(config, "rules", build.VERIFIERS)))
    runs = ["sampled", "greedy"] if config.greedy else ["sampled"]
    gammas = read_gammas(config)
    if config.drafter not in build_drafter.MODELS:
        raise errors.InputError(
            f"config.drafter is {config.drafter!r}: trees are drafted by a model, "
            f"one of {', '.join(build_drafter.MODELS)}"
        )
    if config.sampling.temperature == 0:
        raise errors.InputError(
            "config.sampling.temperature is 0, which is the greedy run once more"
        )
    setup = make_setup(config)
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "metrics.json").unlink(missing_ok=True)
    command.write_json(
        workdir / "manifest.json",
        command.manifest(
            config,
            rules=names,
            weights=build.fingerprints(config),
            num_tokens=setup.pair.num_tokens,
        ),
    )
    console = Console()
    with console.status("timing passes of both models") as status:
        nodes = max(config.nodes, *gammas)
        part = next(batches.inference_batches(setup.rows[:1], 1, setup.buckets))
        costs = picking.pass_costs(
            setup.pair.target,
            setup.pair.drafting_model,
            part,
            nodes,
            config.max_length,
            config.cost.seconds,
        )
        cases, acceptance = make_cases(
            setup, names, runs, gammas, config.nodes, costs, status.update
        )
        done: dict[Any, Counts] = {}
        for at, case in enumerate(cases, start=1):
            status.update(f"{at} of {len(cases)}: {case.rule}, {case.draft}")
            if case.program not in done:
                done[case.program] = own = decode_case(setup, case)
                # Dozens of large programs would use up a process's memory maps.
                jax.clear_caches()
                decodes = [summarize(c, done[c.program], costs) for c in cases[:at]]
                command.write_json(workdir / "metrics.json", {"decodes": decodes})
                console.print(
                    f"{at} of {len(cases)}: {case.run}, {case.rule}, {case.draft}: "
                    f"{own.block_efficiency:.3f} tokens per call",
                    highlight=False,
                )
        status.update("timing the rules alone")
        taken = rule_costs.measure(
            cost_cases(cases),
            shape,
            seed=config.seed,
            seconds=config.cost.seconds,
            repeats=config.cost.repeats,
        )
    counts = [done[case.program] for case in cases]
    comparisons = compare(cases, counts, gammas)
    result: dict[str, Any] = {
        "decodes": [
            summarize(case, own, costs) for case, own in zip(cases, counts, strict=True)
        ],
        "comparisons": comparisons,
        "rule_costs": taken,
        "pass_costs": {"verify": costs[0], "draft": costs[1]},
        "acceptance": acceptance,
    }
    command.write_json(workdir / "metrics.json", result)
    console.print(report.decode_table(result["decodes"]))
    title = f"a step of {config.cost.model}, {shape.vocab_size} ids"
    console.print(report.cost_table(taken, title))
    for comparison in comparisons:
        console.print(report.verdict(comparison), highlight=False)
    print(f"written: {workdir}/{{manifest,metrics}}.json")


def read_gammas(config: ml_collections.ConfigDict) -> list[int]:
    """Lengths of the chains, increasing.

    Raises:
        InputError: they are no whole numbers from 1.
    """
    given = config.gammas
    if not isinstance(given, list | tuple) or not given:
        raise errors.InputError(f"config.gammas is {given!r}: numbers such as 4,7")
    for gamma in given:
        if type(gamma) is not int or gamma < 1:
            raise errors.InputError(
                f"config.gammas has {gamma!r}: whole numbers of drafts, at least 1"
            )
    return sorted(set(given))


def make_setup(config: ml_collections.ConfigDict) -> Setup:
    """Reads the lines and loads the pair.

    Raises:
        InputError: what is read means nothing.
    """
    buckets = build.buckets(config)
    path = input_lines.input_file(config.input)
    lines = input_lines.read_lines(path)
    build.row_keys(config.seed, 1)  # refuses a seed before anything is loaded
    pair = build.build_pair(config)
    rows = [pair.tokenizer.encode(config.task_prefix + line) for line in lines]
    input_lines.check_lengths(rows, buckets, path)
    return Setup(
        pair=pair,
        rows=rows,
        buckets=buckets,
        seeds=config.seeds,
        batch_size=config.batch_size,
        max_length=config.max_length,
        seed=config.seed,
        samplings={
            "sampled": build.build_sampling(
                config.sampling, "sampling", pair.num_tokens
            ),
            "greedy": Sampling(temperature=None, num_tokens=pair.num_tokens),
        },
    )


def summarize(case: Case, own: Counts, costs: Costs) -> dict[str, Any]:
    """A case's line of ``metrics.json``."""
    verify, draft = costs
    cost = tree_picker.round_cost(case.parents, draft=draft, verify=verify)
    return {
        "run": case.run,
        "rule": case.rule,
        "lossless": case.verifier.lossless,
        "draft": case.draft,
        "parents": case.parents,
        "siblings": case.siblings,
        "nodes": len(case.parents) - 1,
        "draft_passes": case.depth,
        "target_calls": int(own.calls.sum()),
        "tokens": int(own.emitted.sum()),
        "block_efficiency": own.block_efficiency,
        "standard_error": standard_error(own.influence),
        "tokens_per_round": own.tokens_per_round,
        "predicted_speedup": own.block_efficiency / cost,
    }


def draws(
    setup: Setup, run: str, picks: bool = False
) -> tuple[list[batches.InferenceBatch], jax.Array]:
    """Batches of all lines, each as often as it is drawn, and their keys.

    Args:
        setup: what all cases share.
        run: greedily every line counts once.
        picks: a few draws with keys of their own, for picking trees.
    """
    wanted = setup.seeds if run == "sampled" else 1
    count = min(wanted, _PICK_DRAWS) if picks else wanted
    rows = setup.rows * count
    keys = build.row_keys(setup.seed, len(setup.rows) * (wanted + _PICK_DRAWS))
    keys = keys[-len(rows) :] if picks else keys[: len(rows)]
    size = min(setup.batch_size, len(rows))
    return list(batches.inference_batches(rows, size, setup.buckets)), keys


def decode_case(setup: Setup, case: Case) -> Counts:
    """Decodes all lines."""
    drafter = chain_or_tree(setup.pair.drafting_model, case.parents, case.siblings)
    parts, keys = draws(setup, case.run)
    emitted, calls = np.zeros((2, len(keys)), np.int64)
    stats = []
    for part in parts:
        output = baseline.speculate(
            setup.pair.target,
            drafter,
            part,
            keys,
            verifier=case.verifier,
            sampling=setup.samplings[case.run],
            gamma=case.depth,
            max_length=setup.max_length,
        )
        stats.append(output.stats)
        rows = part.rows[part.valid]
        emitted[rows] = np.asarray(output.stats.emitted)[part.valid]
        calls[rows] = np.asarray(output.stats.target_calls)[part.valid]
    survival = metrics.survival(metrics.merge(stats))
    return Counts(emitted, calls, 1.0 + sum(survival))


def chain(length: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(-1, length))


def make_cases(
    setup: Setup,
    names: list[str],
    runs: list[str],
    gammas: list[int],
    nodes: int,
    costs: Costs,
    say: Callable[[str], Any],
) -> tuple[list[Case], dict[str, list[list[float]]]]:
    """All cases, trees picked, and the acceptance that they were picked by.

    Args:
        setup: what they share.
        names: of the rules.
        runs: "sampled", "greedy".
        gammas: lengths of the chains.
        nodes: of the greatest tree.
        costs: of passes, by tokens fed.
        say: is told what is being measured.
    """
    cases, tables = [], {}
    for run in runs:
        sampling = setup.samplings[run]
        rules = {name: build.VERIFIERS[name] for name in names}
        # On a chain the rules of trees that read laws are token or block.
        chains = {n: v for n, v in rules.items() if not (v.trees and v.needs_law)}
        branched = {n: v for n, v in rules.items() if v.trees}
        if sampling.greedy:
            lossless = [own for own in rules.values() if own.lossless]
            branched = {_ANY: lossless[0]} if lossless else {}
            chains = branched | {n: v for n, v in rules.items() if not v.lossless}
        for gamma in gammas:
            for name, own in chains.items():
                words = f"chain of {gamma}"
                cases.append(Case(run, name, own, words, chain(gamma), None))
        for name, own in branched.items():
            siblings = own.usual_siblings
            by, drawn = picking.measured_by(own, sampling, siblings)
            same = (n for n, rule in build.VERIFIERS.items() if rule is by)
            label = f"{run}, {name if by is own else next(same)}"
            if label not in tables:
                say(f"acceptance by rank: {label}")
                parts, keys = draws(setup, run, picks=True)
                tables[label] = picking.measure_acceptance(
                    setup.pair.target,
                    setup.pair.drafting_model,
                    parts,
                    keys,
                    verifier=by,
                    siblings=drawn,
                    sampling=sampling,
                    max_length=setup.max_length,
                    nodes=max(nodes, *gammas),
                )
            table = picking.for_siblings(tables[label], siblings)
            trees_by_name = {
                # No deeper than the chains: every level is compiled apart.
                f"tree of {count}": tree_picker.best_tree(
                    table, count, min(count, max(gammas))
                )
                for count in sorted({*gammas, nodes})
            }
            picked = picking.fastest(table, nodes, *costs)
            trees_by_name["fastest tree"] = picked.parents
            cases += [
                Case(run, name, own, words, parents, siblings)
                for words, parents in trees_by_name.items()
            ]
    return cases, {label: table.tolist() for label, table in tables.items()}


def cost_cases(cases: list[Case]) -> dict[str, rule_costs.Case]:
    """What to time of the rules alone: each on each sampled draft, once."""
    found: dict[tuple[Any, ...], tuple[str, rule_costs.Case]] = {}
    for case in cases:
        if case.run == "sampled" and case.program not in found:
            own = rule_costs.Case(case.verifier, case.parents, case.siblings)
            found[case.program] = (f"{case.rule}, {case.draft}", own)
    return dict(found.values())


def compare(
    cases: list[Case], counts: list[Counts], gammas: list[int]
) -> list[dict[str, Any]]:
    """The rules that should be at least as good as another, beside it.

    Block beside token on the same chains; best path and traversal beside block on a
    chain of as many nodes, else the longest; traversal beside recursive rejection on
    the same tree. Differences are paired: by line and draw.
    """
    by_name = {
        (c.rule, c.draft): at for at, c in enumerate(cases) if c.run == "sampled"
    }
    wanted = []
    for rule, draft in by_name:
        same = draft.replace("tree", "chain")
        if same not in {f"chain of {gamma}" for gamma in gammas}:
            same = f"chain of {max(gammas)}"
        if rule == "block":
            wanted.append(((rule, draft), ("token", draft)))
        if rule in ("best_path", "traversal"):
            wanted.append(((rule, draft), ("block", same)))
        if rule == "traversal":
            wanted.append(((rule, draft), ("recursive_distinct", draft)))
    found = []
    for one, other in wanted:
        if other not in by_name:
            continue
        own, than = counts[by_name[one]], counts[by_name[other]]
        difference = own.influence - than.influence
        parents = [cases[by_name[name]].parents for name in (one, other)]
        found.append(
            {
                "rule": one[0],
                "draft": one[1],
                "than": other[0],
                "than_draft": other[1],
                "difference": own.block_efficiency - than.block_efficiency,
                "than_tokens": than.block_efficiency,
                "standard_error": standard_error(difference),
                # On a chain; block and token on one draft.
                "one_rule": parents[0] == parents[1] == chain(len(parents[0]) - 1)
                and (other[0] == "block" or len(parents[0]) == 2),
            }
        )
    return found


def standard_error(values: np.ndarray) -> float:
    """Of a mean; NaN of one value."""
    if len(values) < 2:
        return float("nan")
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


if __name__ == "__main__":
    command.run(main)
