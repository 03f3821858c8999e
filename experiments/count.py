"""Counts the targets of a file of pairs into a drafter that needs no training.

    python -m experiments.count --config=configs/count.py \
        --config.target.checkpoint=TARGET --config.drafter=bigram \
        --input=DATA/train.jsonl --workdir=DIR

Writes DIR/export, a folder for ``config.draft.checkpoint``, and DIR/manifest.json. A
target that is not finished (`experiments.generate`) has no end of sequence.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags

from configs import count
from experiments import build, command, input_lines
from specjax import errors
from specjax.data import pairs
from specjax.data import tokenizer as tokenizers
from specjax.drafters import files, tables
from specjax.drafters.base import StoredDrafter
from specjax.drafters.suffix import SuffixDrafter
from specjax.models import t5_weights
from specjax.models.t5_config import T5Config

Rows = list[list[int]]
Make = Callable[[T5Config, Rows, dict[str, Any]], StoredDrafter]


def _unigram(
    shape: T5Config, rows: Rows, settings: dict[str, Any]
) -> tables.UnigramDrafter:
    del settings  # it has none
    return tables.count_tables(rows, shape.vocab_size).unigram


def _bigram(
    shape: T5Config, rows: Rows, settings: dict[str, Any]
) -> tables.BigramDrafter:
    return tables.count_tables(rows, shape.vocab_size, **settings)


def _suffix(shape: T5Config, rows: Rows, settings: dict[str, Any]) -> SuffixDrafter:
    made = SuffixDrafter.create(shape, settings, jax.random.key(0))
    # With their start tokens, the latest texts that fill the table: others would leave.
    sizes = np.cumsum([1 + len(row) for row in reversed(rows)])
    rows = rows[-1 - int(np.searchsorted(sizes, made.settings()["capacity"])) :]
    tokens = np.zeros((len(rows), 1 + max(map(len, rows))), np.int32)
    for text, row in zip(tokens, rows, strict=True):  # after the start token
        text[1 : 1 + len(row)] = row
    length = [1 + len(row) for row in rows]
    return made.learn(jnp.asarray(tokens), jnp.array(length, jnp.int32))


MAKES: Mapping[str, Make] = {"unigram": _unigram, "bigram": _bigram, "suffix": _suffix}


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    build.check_settings(config, count.get_config())
    build.check_limit(config)
    settings = own_settings(config)
    make = build.named(MAKES, config.drafter, "drafter")
    folder = build.checkpoint_folder(config.target.checkpoint, "target.checkpoint")
    path = input_lines.input_file(values.input or config.input)
    shape = T5Config.from_json(folder / t5_weights.CONFIG_FILE)
    tokenizer = tokenizers.load_tokenizer(folder)
    tokenizers.dead_from(tokenizer, shape.vocab_size, shape.pad_id, shape.eos_id)
    found = pairs.load_pairs(path, empty_targets=True)[: config.limit or None]
    rows = [
        tokenizer.encode(pair.target)[: None if pair.finished else -1] for pair in found
    ]
    try:
        drafter = make(shape, rows, settings)
    except errors.InputError as error:
        raise errors.InputError(f"config.{config.drafter}: {error}") from error
    counted = {"texts": len(rows), "tokens": sum(map(len, rows))}
    files.save_drafter(
        drafter,
        workdir / "export",
        t5_weights.fingerprint(folder),
        about={"input": path.name, **counted},
    )
    command.write_json(
        workdir / "manifest.json",
        command.manifest(config, input=str(path), settings=drafter.settings()),
    )
    print(
        f"{workdir / 'export'}: {config.drafter} of {counted['tokens']} tokens in "
        f"{counted['texts']} texts"
    )


def own_settings(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """What is set of the drafter that is made.

    Raises:
        InputError: a setting of another one is set.
    """
    given = {
        name: {key: own for key, own in config[name].items() if own is not None}
        for name in MAKES
        if name in config
    }
    settings = given.pop(config.drafter, {})
    for name, others in given.items():
        if others:
            raise errors.InputError(
                f"config.{name} is set and config.drafter is {config.drafter!r}, which "
                "does not read it: leave it out"
            )
    return settings


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("input", None, "File of pairs.", flag_values=values)


if __name__ == "__main__":
    command.run(main, define=_define)
