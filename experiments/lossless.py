"""Proves that verification rules are lossless, on tables of laws and on a pair.

    python -m experiments.lossless --config=configs/lossless.py --workdir=DIR [--fast]
        [--config.target.checkpoint=DIR --config.draft.checkpoint=DIR --input=FILE]

Every rule decodes with every kind of draft under every setting of sampling. Its first
tokens must follow the target's exact joint law (p-values, corrected for their number),
and as many drafts must stand as enumeration says. Greedily it must write what the
target writes alone, and no row's tokens may depend on other rows. Rules that are
knowingly lossy run beside them as controls: the same test must catch them.
Writes DIR/manifest.json and DIR/metrics.json. Exit code 1: a claim fails, or a control
was not caught.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import ml_collections
from absl import flags

from configs import lossless
from experiments import build, command, lossless_pair
from specjax import errors
from specjax.proof import grid, verdicts
from specjax.verify import Verifier


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> int:
    """Runs the command; returns the exit code."""
    from rich.console import Console

    build.check_settings(config, lossless.get_config())
    build.positive(config, "rows", "rounds")
    build.positive(config.fast, "rows", "rounds", "draws", path="fast.")
    build.row_keys(config.seed, 1)
    claims, controls = claimed(config)
    sizes = config.fast if values.fast else config
    refuse_unread(config, values.fast)
    pair = lossless_pair.load(config, values.input)

    console = Console()
    workdir.mkdir(parents=True, exist_ok=True)
    (workdir / "metrics.json").unlink(missing_ok=True)
    command.write_json(
        workdir / "manifest.json",
        command.manifest(
            config,
            fast=values.fast,
            rows=sizes.rows,
            rounds=sizes.rounds,
            claims=list(claims),
            controls=list(controls),
            level=verdicts.LEVEL,
            **(pair.manifest if pair else {}),
        ),
    )
    found = on_tables(claims | controls, sizes.rows, sizes.rounds, config.seed)
    console.print(verdict_table(found))
    faults = [
        f"{line.name}, {line.kind} drafts: {fault}"
        for line in found
        for fault in line.faults
    ]
    content: dict[str, Any] = {
        "rules": [dataclasses.asdict(line) | {"good": line.good} for line in found]
    }
    if pair:
        results = lossless_pair.on_pair(pair, claims, config, sizes.draws)
        console.print(lossless_pair.result_table(results))
        faults += [fault for result in results for fault in result.faults]
        content["pair"] = [dataclasses.asdict(result) for result in results]
    command.write_json(
        workdir / "metrics.json", content | {"faults": faults, "lossless": not faults}
    )
    for fault in faults:
        console.print(f"[bold red]{fault}", highlight=False)
    print(f"written: {workdir}/{{manifest,metrics}}.json")
    return 1 if faults else 0


def refuse_unread(config: ml_collections.ConfigDict, fast: bool) -> None:
    """Refuses a number of samples that ``--fast``, or its absence, passes over.

    Raises:
        InputError: naming it.
    """
    known, unread = lossless.get_config(), ("fast.rows", "fast.rounds", "fast.draws")
    for name in ("rows", "rounds", "draws") if fast else unread:
        section, _, last = name.rpartition(".")
        own, usual = (one[section] if section else one for one in (config, known))
        if own[last] != usual[last]:
            wanted = "leave --fast out" if fast else "add --fast"
            raise errors.InputError(
                f"config.{name} is {own[last]} and is not read here: {wanted}"
            )


def claimed(
    config: ml_collections.ConfigDict,
) -> tuple[dict[str, Verifier], dict[str, Verifier]]:
    """The rules to prove, and the lossy ones that the proof must catch.

    Raises:
        InputError: a rule that is not known, or one that is lossy by design.
    """
    controls = {name: own for name, own in build.VERIFIERS.items() if not own.lossless}
    claims = {name: own for name, own in build.VERIFIERS.items() if own.lossless}
    if config.rules:
        names = build.names(config, "rules", build.VERIFIERS)
        for name in names:
            if name in controls:
                raise errors.InputError(
                    f"config.rules has {name!r}, which is knowingly lossy: there is "
                    f"nothing to prove; it takes some of {', '.join(claims)}"
                )
        claims = {name: claims[name] for name in names}
    return claims, controls


def on_tables(
    rules: dict[str, Verifier],
    rows: int,
    rounds: int,
    seed: int,
) -> list[verdicts.Line]:
    """Proves rules on tables.

    Args:
        rules: by name.
        rows: samples of each cell and round.
        rounds: of samples.
        seed: of the samples.
    """
    from rich import progress

    pairs, cells = grid.make_pairs(), grid.cells()
    subjects = [
        own for name, rule in rules.items() for own in verdicts.subjects(name, rule)
    ]
    # A greedy target turns each lossless rule into one and the same program.
    layouts = {own.way: own for own in subjects if own.verifier.lossless}
    with (
        progress.Progress(
            progress.TextColumn("proving"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            transient=True,
        ) as bar,
        # Most of the time goes to compiling, on one core each.
        concurrent.futures.ThreadPoolExecutor(min(os.cpu_count() or 1, 4)) as pool,
    ):
        task = bar.add_task("", total=len(subjects) + len(layouts))

        def proved(subject: verdicts.Subject) -> verdicts.Proof:
            found = verdicts.prove(subject, pairs, cells, rows, rounds, seed)
            bar.advance(task)
            return found

        def greedy(subject: verdicts.Subject) -> bool:
            same = grid.greedy_identical(pairs, subject.verifier, subject.make)
            bar.advance(task)
            return same

        proofs = [pool.submit(proved, subject) for subject in subjects]
        same = {way: pool.submit(greedy, own) for way, own in layouts.items()}
        try:
            return verdicts.lines(
                [own.result() for own in proofs],
                [
                    same[own.way].result() if own.verifier.lossless else None
                    for own in subjects
                ],
            )
        except BaseException:
            pool.shutdown(cancel_futures=True)  # nobody waits for what is queued
            raise


def verdict_table(lines: Sequence[verdicts.Line]) -> Any:
    """One line per rule and kind of draft."""
    from rich import box
    from rich.table import Table

    table = Table(
        box=box.SIMPLE,
        collapse_padding=True,
        title="is the output's law the target's?",
        caption="p: least p-value of the first tokens' joint law over settings and "
        "rounds, corrected for their number\n|z|: accepted drafts against enumeration, "
        "in standard errors\n"
        "greedy: beside the target alone, once for each layout of drafts: a greedy "
        "target makes all lossless rules one\n"
        "rows: in another order, among other rows\n"
        "A lossy rule is a control: the same test must catch it.",
        caption_justify="left",
    )
    for name in ("rule", "drafts", "p", "|z|", "greedy", "rows", "verdict"):
        table.add_column(name)
    previous = ""
    for line in lines:
        if line.lossless:
            verdict = "lossless" if line.good else "[bold red]FAILS"
        else:
            verdict = "lossy, caught" if line.good else "[bold red]lossy, NOT CAUGHT"
        table.add_row(
            line.name if line.name != previous else "",
            line.kind,
            f"{line.joint_p:.1g}",
            "-" if line.z is None else f"{line.z:.1f}",
            {None: "-", True: "same", False: "[bold red]DIFFERS"}[line.greedy],
            "same" if line.independent else "[bold red]DIFFER",
            verdict,
        )
        previous = line.name
    return table


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "input", None, "Text file for the pair, one input per line.", flag_values=values
    )
    flags.DEFINE_boolean(
        "fast", False, "Fewer samples (config.fast).", flag_values=values
    )


if __name__ == "__main__":
    command.run(main, define=_define)
