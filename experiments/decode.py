"""Decodes a file's lines with a target alone and with a draft in front of it.

    python -m experiments.decode --config=configs/demo.py --workdir=DIR [--input=FILE]

Shows every output in colour (which tokens were drafted and stood), then speed,
acceptance and costs. Writes DIR/manifest.json, DIR/metrics.json, DIR/decode.html, the
same in colour with the probabilities of what was drafted, and DIR/decodes.jsonl, where
`"finished": false` is an output that ``config.max_length`` cut, and tokens and text are
what follows ``config.decoder_prefix``. With ``config.samples`` each line counts as so
many rows.
Exit code 1: outputs that must be the same both ways (greedy ones, and samples that
share the target's noise) differ by more than rounding explains. A lossy verifier's may,
and it is named as lossy wherever its results stand.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import ml_collections
import numpy as np
from absl import flags
from jax.sharding import Mesh

from configs import demo
from experiments import (
    baseline,
    build,
    build_controls,
    build_mesh,
    build_tree,
    command,
    input_lines,
    picking,
    side_by_side,
)
from specjax import errors, metrics, tree_picker
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.report import decodes, pages, table, trace
from specjax.sampling import Sampling
from specjax.verify import Verifier

WRITTEN = ("metrics.json", "decodes.jsonl", "decode.html")  # beside manifest.json


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> int:
    """Runs the command; returns the exit code."""
    build.check_settings(config, demo.get_config())
    build.positive(config, "batch_size", "repeats", "samples")
    build.check_max_length(config)
    with build_mesh.entered(config, "batch_size") as mesh:
        return _decode(config, workdir, values, mesh)


def _decode(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    values: flags.FlagValues,
    mesh: Mesh | None,
) -> int:
    from rich.console import Console

    buckets = build.buckets(config)
    path = input_lines.input_file(values.input or config.input)
    lines = input_lines.read_lines(path)
    verifier = build.build_verifier(config)
    picks = config.tree == build_tree.AUTO
    siblings = build_tree.siblings_to_pick(config, verifier) if picks else ""
    tree = build_tree.build_tree(config, verifier)
    gamma = build.parse_gamma(config.gamma, tree.depth if tree else None)
    pair = build.build_pair(config, mesh=mesh)
    modes = build_modes(config, pair.tokenizer, pair.num_tokens, gamma)
    ends = build_controls.build_ends(config, pair.tokenizer)
    rows = [pair.tokenizer.encode(config.task_prefix + line) for line in lines]
    input_lines.check_lengths(rows, buckets, path)
    lines = [line for line in lines for _ in range(config.samples)]
    rows = [row for row in rows for _ in range(config.samples)]
    parts = list(batches.inference_batches(rows, config.batch_size, buckets))
    keys = build.row_keys(config.seed, len(rows))
    # Costs are those of the bucket that holds the most lines.
    usual = max(parts, key=lambda part: _lines_like(part, parts))

    console = Console()
    if picks:
        with console.status("picking a tree: acceptance by rank, costs of passes"):
            picked = pick_tree(
                config, pair, parts, usual, keys, verifier, siblings, modes[-1]
            )
        tree = build_tree.Tree(picked.parents, siblings)
        modes = [dataclasses.replace(mode, gamma=tree.depth) for mode in modes]
        console.print(
            f"picked the tree {','.join(map(str, tree.parents))}: predicted "
            f"{picked.expected_tokens:.2f} tokens per target call, "
            f"{picked.predicted_speedup:.2f}x"
        )
    if tree is not None:
        pair = build_tree.with_tree(pair, tree)
    about = {
        "verifier": config.verifier,
        "verifier_settings": build.verifier_settings(config),
        "lossless": verifier.lossless,
        "tree": dataclasses.asdict(tree) if tree else None,
    }
    setup = side_by_side.Setup(pair, verifier, config.max_length, about, ends)
    workdir.mkdir(parents=True, exist_ok=True)
    # What an earlier run has written must not stand beside this one's settings.
    for name in (*WRITTEN, "decodes.jsonl.partial"):
        (workdir / name).unlink(missing_ok=True)
    tallies = {mode.name: side_by_side.Tally() for mode in modes}
    costs: dict[str, dict[int, metrics.Costs]] = {}
    with console.status("timing a draft step, a target step and a verifying pass"):
        for i, mode in enumerate(modes):
            if gamma is None:
                modes[i], costs[mode.name] = side_by_side.resolve_gamma(
                    setup, usual, keys, mode, tallies[mode.name]
                )
            else:
                own = side_by_side.measure_costs(
                    setup, usual, keys, mode, tallies[mode.name]
                )
                costs[mode.name] = {mode.gamma: own}
    command.write_json(
        workdir / "manifest.json",
        command.manifest(
            config,
            input=str(path),
            **about,
            gamma={mode.name: mode.gamma for mode in modes},
            weights=build.fingerprints(config),
            num_tokens=pair.num_tokens,
            dead_rows=pair.target.vocab_size - pair.tokenizer.vocab_size,
            sampling={mode.name: _numbers(mode.sampling) for mode in modes},
            draft_sampling={
                mode.name: _numbers(mode.draft_sampling or mode.sampling)
                for mode in modes
            },
        ),
    )
    records = side_by_side.decode_all(
        setup, parts, keys, modes, config, lines, workdir, tallies
    )
    _show(console, records, pair, setup, parts, keys, modes[0], workdir)

    results = {
        mode.name: side_by_side.summarize(
            setup, mode, tallies[mode.name], costs[mode.name][mode.gamma or 1]
        )
        for mode in modes
    }
    # The greedy run, or the only one, at the top; the sampled one under its name.
    content = dict(results[modes[0].name])
    content |= {name: result for name, result in results.items() if name != "greedy"}
    command.write_json(workdir / "metrics.json", content)
    console.print(table.summary_table(results))
    if not verifier.lossless:
        name = table.rule_name(about)
        console.print(f"[bold red]{name}: what it writes does not follow the target")
    for mode in modes:
        result = results[mode.name]
        warning = table.verdict(mode.name, result, mode.gamma)
        if warning:
            console.print(f"[bold red]{warning}")
    if pair.num_tokens is not None:
        console.print(
            f"ids from {pair.num_tokens} on are padding of the vocabulary and ruled out"
        )
    made = [name for name in WRITTEN if (workdir / name).is_file()]
    print(f"written: {workdir}/manifest.json, {', '.join(made)}")
    return _exit_code(results, baseline.TIES[config.dtype], console)


def pick_tree(
    config: ml_collections.ConfigDict,
    pair: build.Pair,
    parts: list[batches.InferenceBatch],
    usual: batches.InferenceBatch,
    keys: jax.Array,
    verifier: Verifier,
    siblings: str,
    mode: side_by_side.Mode,
) -> tree_picker.Picked:
    """The tree of ``config.tree=auto``: for one mode, on the lines of one bucket."""
    return picking.pick_for_pair(
        pair.target,
        pair.drafting_model,
        [part for part in parts if part.inputs.shape == usual.inputs.shape],
        keys,
        verifier=verifier,
        siblings=siblings,
        sampling=mode.sampling,
        draft_sampling=mode.draft_sampling,
        max_length=config.max_length,
        # The root too must fit into the buffer.
        nodes=min(build_tree.nodes_to_pick(config), config.max_length - 1),
    )


def build_modes(
    config: ml_collections.ConfigDict,
    tokenizer: tokenizers.Tokenizer,
    num_tokens: int | None,
    gamma: int | None,
) -> list[side_by_side.Mode]:
    """The runs asked for, in order.

    Raises:
        InputError: an unknown or missing run, or sampling or controls that mean
            nothing.
    """
    greedy = Sampling(temperature=None, num_tokens=num_tokens)
    sampled = build.build_sampling(config.sampling, "sampling", num_tokens)
    draft = build.build_draft_sampling(config, num_tokens)
    known = {
        "greedy": side_by_side.Mode("greedy", greedy, None, gamma or 1),
        "sampled": side_by_side.Mode("sampled", sampled, draft, gamma or 1),
    }
    names = build.names(config, "runs", known)
    own = config.sampling
    if "sampled" not in names and (
        own.temperature not in (None, 1.0) or own.top_k or own.top_p
    ):
        raise errors.InputError(
            "config.sampling is set and config.runs has no sampled run: greedy tokens "
            "are not drawn; leave it out or add sampled"
        )
    if config.sampling.temperature == 0 and len(set(names)) > 1:
        raise errors.InputError(
            "config.sampling.temperature is 0, which is the greedy run once more: "
            "--config.runs=greedy leaves the sampled one out"
        )
    if draft is not None and "sampled" not in names:
        raise errors.InputError(
            "config.draft_sampling is set and config.runs has no sampled run: greedy "
            "drafts draw nothing; leave it out or add sampled"
        )
    if config.siblings and "sampled" not in names:
        raise errors.InputError(
            "config.siblings is set and config.runs has no sampled run: the children "
            "of a greedy draft are its most probable tokens; leave it out"
        )
    if config.samples > 1 and "greedy" in names:
        raise errors.InputError(
            f"config.samples is {config.samples} and config.runs has the greedy run, "
            "whose samples are all alike: --config.runs=sampled leaves it out"
        )
    edits = build_controls.build_controls(config, tokenizer)
    for name, mode in known.items():
        if mode.draft_sampling is not None:
            draft = mode.draft_sampling.replace(controls=edits)
            mode = dataclasses.replace(mode, draft_sampling=draft)
        sampling = mode.sampling.replace(controls=edits)
        known[name] = dataclasses.replace(mode, sampling=sampling)
    return [mode for name, mode in known.items() if name in names]


def _lines_like(
    part: batches.InferenceBatch, parts: list[batches.InferenceBatch]
) -> int:
    width = part.inputs.shape[1]
    return sum(int(p.valid.sum()) for p in parts if p.inputs.shape[1] == width)


def _numbers(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": "greedy" if sampling.greedy else sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
    }


def _show(
    console: Any,
    records: list[dict[str, Any]],
    pair: build.Pair,
    setup: side_by_side.Setup,
    parts: list[batches.InferenceBatch],
    keys: jax.Array,
    mode: side_by_side.Mode,
    workdir: pathlib.Path,
) -> None:
    """Prints each line's decode in colour; it is decoded once more, with a trace.

    The same goes to `decode.html`, with the probabilities of what was drafted.
    """
    from rich.padding import Padding
    from rich.text import Text

    marks = console.color_system is None  # a file, a pipe, a terminal without colours
    shown: dict[int, tuple[decodes.Shown, ...]] = {}
    if mode.gamma:
        for part in parts:
            output = setup.speculative(part, keys, mode, True)
            for slot in np.flatnonzero(part.valid):
                shown[int(part.rows[slot])] = decodes.shown(
                    output, int(slot), pair.tokenizer.decode_pieces
                )
        console.print(trace.legend(marks=marks))
    for record in records:
        row = record["row"]
        console.print(Text(f"{row + 1:>3}  {record['input']}", "dim"))
        text = Text(record["text"])
        if row in shown:
            own = shown[row]
            text = trace.coloured(own, [token.text for token in own], marks=marks)
        console.print(Padding(text, (0, 0, 0, 5)))
    if shown:
        lines = [record["input"] for record in records]
        pages.write_decodes(
            decodes.Decoded([shown[record["row"]] for record in records], lines),
            workdir / "decode.html",
            f"Decodes, {mode.name}",
            [f"gamma {mode.gamma}"],
        )


def _exit_code(results: dict[str, dict[str, Any]], tie: float, console: Any) -> int:
    code = 0
    for name, result in results.items():
        gaps = [mismatch["top2_gap"] for mismatch in result["mismatches"]]
        apart = [gap for gap in gaps if not gap <= tie]  # NaN is no tie
        if apart and not result["lossless"]:
            console.print(
                f"{len(apart)} {name} outputs are not the target's own, by design: "
                f"the verifier {result['verifier']!r} is lossy"
            )
        elif apart:
            console.print(
                f"[bold red]{name} outputs differ where the two tokens score "
                f"{max(apart):.2g} apart: more than rounding explains"
            )
            code = 1
    return code


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "input", None, "Text file, one input per line.", flag_values=values
    )


if __name__ == "__main__":
    command.run(main, define=_define)
