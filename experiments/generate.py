"""Decodes the sources of a file of pairs with a target, for a draft to learn from.

    python -m experiments.generate --config=configs/repair_generate.py \
        --config.target.checkpoint=TARGET --input=DATA/train.jsonl --workdir=DIR

Writes DIR/generated.jsonl, with the target's output in place of the file's, in order
and in chunks: a run that was stopped goes on after the last whole chunk. An output that
was cut at ``config.max_length`` has `"finished": false`, and trains no end of sequence.
With ``config.drafter`` the target decodes speculatively; ``config.mesh`` spreads both
over devices, and ``config.distributed`` over processes, of which the first writes.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import ml_collections
from absl import flags
from jax.sharding import Mesh

from configs import repair_generate
from experiments import baseline, build, build_mesh, command, input_lines
from specjax import errors
from specjax.data import batches, pairs
from specjax.decoding import DecodeOutput
from specjax.models import t5_weights
from specjax.sampling import Sampling


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    build.check_settings(config, repair_generate.get_config())
    build.positive(config, "batch_size", "chunk")
    build.check_max_length(config)
    build.check_limit(config)
    if config.drafter:
        build.parse_gamma(config.gamma)
    with build_mesh.entered(config, "batch_size") as mesh:
        _generate(config, workdir, values, mesh)


def _generate(
    config: ml_collections.ConfigDict,
    workdir: pathlib.Path,
    values: flags.FlagValues,
    mesh: Mesh | None,
) -> None:
    from rich import progress

    buckets = build.buckets(config)
    given = input_lines.input_file(values.input or config.input)
    sources = [pair.source for pair in pairs.load_pairs(given)]
    sources = sources[: config.limit or None]
    target, decode = build_decode(config, mesh)
    tokenizer = target.tokenizer
    sampling = build_sampling(config, target.num_tokens)
    rows = [tokenizer.encode(source) for source in sources]
    input_lines.check_lengths(rows, buckets, given)
    keys = build.row_keys(config.seed, len(rows))

    path = workdir / "generated.jsonl"

    def begin() -> int:
        workdir.mkdir(parents=True, exist_ok=True)
        start, whole = lines_written(path, sources)
        manifest = command.manifest(config, input=str(given), weights=weights(config))
        if start:
            check_same_run(workdir / "manifest.json", manifest)
        if path.exists():
            os.truncate(path, whole)
        command.write_json(workdir / "manifest.json", manifest)
        return start

    start = build_mesh.first_says(begin)
    writes = build_mesh.is_first()
    columns = (progress.BarColumn(), progress.MofNCompleteColumn())
    with (
        open(path if writes else os.devnull, "a", encoding="utf-8") as file,
        progress.Progress(
            *columns, progress.TimeRemainingColumn(), disable=not writes
        ) as bar,
    ):
        task = bar.add_task("", total=len(rows), completed=start)
        for first in range(start, len(rows), config.chunk):
            chosen = slice(first, first + config.chunk)
            parts = list(
                batches.inference_batches(rows[chosen], config.batch_size, buckets)
            )
            own_keys = keys[chosen]
            outputs = [decode(part, own_keys, sampling) for part in parts]
            written = baseline.tokens_by_row(parts, outputs, len(rows[chosen]))
            for source, output in zip(sources[chosen], written, strict=True):
                ended = baseline.finished(output, tokenizer.eos_id)
                text = tokenizer.decode(output)
                # Cut within a character: its first bytes are no text.
                text = text if ended else text.rstrip("\ufffd")
                pair = pairs.Pair(source, text, ended)
                file.write(pairs.to_json(pair) + "\n")
            file.flush()
            bar.advance(task, len(written))
    if writes:
        print(f"written: {path}, {len(rows)} lines")


Decode = Callable[[batches.InferenceBatch, jax.Array, Sampling], DecodeOutput]


def build_decode(
    config: ml_collections.ConfigDict, mesh: Mesh | None
) -> tuple[build.Target, Decode]:
    """The target, and how a batch is decoded: alone, or with what drafts for it.

    Raises:
        InputError: as `build.build_pair`; settings of a draft where none drafts.
    """
    if not config.drafter:
        if config.draft.checkpoint:
            raise errors.InputError(
                f"config.draft.checkpoint is {config.draft.checkpoint!r} and "
                "config.drafter is empty: name what drafts, such as model"
            )
        target = build.load_target(config, mesh)

        def alone(part: Any, keys: jax.Array, sampling: Sampling) -> DecodeOutput:
            return baseline.decode(
                target.model, part, keys, sampling, config.max_length
            )

        return target, alone
    verifier = build.named(build.VERIFIERS, config.verifier, "verifier")
    target = build.load_target(config, mesh)
    pair = build.build_pair(config, target, mesh)

    def drafted(part: Any, keys: jax.Array, sampling: Sampling) -> DecodeOutput:
        return baseline.speculate(
            pair.target,
            pair.drafter,
            part,
            keys,
            verifier=verifier,
            sampling=sampling,
            gamma=config.gamma,
            max_length=config.max_length,
        )

    return target, drafted


def weights(config: ml_collections.ConfigDict) -> dict[str, str]:
    """Fingerprints of what is read, by role."""
    if config.drafter:
        return build.fingerprints(config)
    folder = build.checkpoint_folder(config.target.checkpoint, "target.checkpoint")
    return {"target": t5_weights.fingerprint(folder)}


def build_sampling(
    config: ml_collections.ConfigDict, num_tokens: int | None
) -> Sampling:
    """Greedy where no temperature is set.

    Raises:
        InputError: a number means nothing, or greedy with top-k or top-p.
    """
    settings = config.sampling
    if settings.temperature is not None:
        return build.build_sampling(settings, "sampling", num_tokens)
    if settings.top_k is not None or settings.top_p is not None:
        raise errors.InputError(
            "config.sampling has top_k or top_p but no temperature: without one "
            "decoding is greedy, and they change nothing"
        )
    return Sampling(temperature=None, num_tokens=num_tokens)


def lines_written(path: pathlib.Path, sources: list[str]) -> tuple[int, int]:
    """How many whole lines an earlier run left, and how many bytes they are.

    Raises:
        InputError: the lines there are not of these sources.
    """
    if not path.exists():
        return 0, 0
    whole = path.read_bytes()
    whole = whole[: whole.rfind(b"\n") + 1]
    lines = whole.decode("utf-8", "replace").split("\n")[:-1]
    for number, (line, source) in enumerate(zip(lines, sources, strict=False), start=1):
        if _source(line) != source:
            raise errors.InputError(
                f"{path}, line {number} is of another input: use another --workdir"
            )
    if len(lines) > len(sources):
        raise errors.InputError(
            f"{path} has {len(lines)} lines and the input {len(sources)}: use another "
            "--workdir"
        )
    return len(lines), len(whole)


def check_same_run(path: pathlib.Path, manifest: dict[str, Any]) -> None:
    """Refuses to go on with another model, or with another way of drawing tokens.

    Raises:
        InputError: a setting that changes the output differs from the first run's.
    """
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        before, weights = whole["config"], whole["effective"]["weights"]
    except (OSError, ValueError, KeyError) as error:
        raise errors.InputError(
            f"{path} cannot be read, so it is not known how the lines beside it were "
            "made: use another --workdir"
        ) from error
    # By way of JSON: tuples come back as lists.
    now = json.loads(json.dumps(manifest["config"]))
    names = ("target", "sampling", "max_length", "dtype", "seed", "drafter")
    drafting = ("draft", "gamma", "verifier") if now["drafter"] else ()
    for name in (*names, *drafting):
        if before.get(name) != now[name]:
            raise errors.InputError(
                f"{path.parent} holds lines made with config.{name} = "
                f"{before.get(name)}, not {now[name]}: use another --workdir"
            )
    if weights != manifest["effective"]["weights"]:
        raise errors.InputError(
            f"{path.parent} holds lines made with other weights or another tokenizer "
            f"in {now['target']['checkpoint']}, or of what drafts for it, which have "
            "changed since: use another --workdir"
        )


def _source(line: str) -> str | None:
    try:
        return json.loads(line)["source"]
    except (ValueError, KeyError, TypeError):
        return None


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "input", None, "File of pairs; only the sources are read.", flag_values=values
    )


if __name__ == "__main__":
    command.run(main, define=_define)
