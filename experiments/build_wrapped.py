"""Drafters that are made of a draft model: with a cheaper head, or drafted for."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from specjax import zoo
from specjax.data import tokenizer as tokenizers
from specjax.drafters import trimmed
from specjax.drafters.cascade import CascadeDrafter
from specjax.errors import InputError
from specjax.models import t5_weights
from specjax.models.t5 import T5
from specjax.pair import dead_from

if TYPE_CHECKING:  # that module's table names what is made here
    from experiments.build_drafter import Kind, Parts

_TRIMMED, _CASCADE = "config.draft.trimmed", "config.draft.cascade"


def trim_model(parts: Parts) -> T5:
    """The draft model with its head cut as ``config.draft.trimmed`` says.

    Raises:
        InputError: not one way to cut is set, or what is set means nothing.
    """
    own = parts.own("trimmed")
    assert parts.model is not None and parts.folder is not None  # `Kind.reads`
    ways = [name for name in ("size", "rank", "tokens") if name in own]
    if len(ways) != 1:
        raise InputError(
            f"{_TRIMMED} has {' and '.join(ways) or 'neither size, rank nor tokens'}: "
            "set one of size (frequent tokens, with texts to count), rank, and tokens "
            "(a file of ids)"
        )
    if ("size" in own) != ("texts" in own):
        raise InputError(
            f"{_TRIMMED}.size and {_TRIMMED}.texts go together: the tokens that the "
            "texts hold most often are kept"
        )
    try:
        if "rank" in own:
            return trimmed.low_rank_head(parts.model, own["rank"])
        tokenizer = tokenizers.load_tokenizer(parts.folder)
        if "tokens" in own:
            kept = _read_ids(own["tokens"], tokenizer.eos_id)
        else:
            size = range(tokenizer.vocab_size)
            keep = trimmed.always_kept(
                [tokenizer.piece(index) for index in size], tokenizer.eos_id
            )
            rows = map(tokenizer.encode, _read_lines(own["texts"], "texts"))
            kept = trimmed.frequent_tokens(rows, keep, own["size"], len(size)).tolist()
        return trimmed.trim_head(parts.model, kept)
    except InputError as error:
        raise InputError(f"{_TRIMMED}: {error}") from error


def _read_lines(name: str, setting: str) -> list[str]:
    try:
        lines = pathlib.Path(name).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{setting} is {name!r}, which is no text: {error}") from error
    if not lines:
        raise InputError(f"{setting} is {name!r}, which is empty")
    return lines


def _read_ids(name: str, eos_id: int) -> list[int]:
    ids = []
    for number, line in enumerate(_read_lines(name, "tokens"), start=1):
        if not line.strip().isdecimal():
            raise InputError(f"{name}, line {number} is {line!r}: one id a line")
        ids.append(int(line))
    if eos_id not in ids:
        raise InputError(
            f"{name} lacks id {eos_id}, the end of a text: such a draft never ends"
        )
    return ids


def build_cascade(parts: Parts, kinds: Mapping[str, Kind]) -> CascadeDrafter:
    """The draft model with the drafter of ``config.draft.cascade`` in front of it.

    Args:
        parts: of the cascade.
        kinds: the table of all drafters.

    Raises:
        InputError: the inner drafter is none that can be one, or its model is wrong.
    """
    own = dict(parts.own("cascade"))
    name, checkpoint = own.pop("drafter", "ngram"), own.pop("checkpoint", None)
    known = [
        each
        for each, kind in kinds.items()
        if (kind.reads in ("", "model") or kind.optional) and each != "cascade"
    ]
    if name not in known:
        raise InputError(
            f"{_CASCADE}.drafter is {name!r}: it must be one of {', '.join(known)}"
        )
    reads = kinds[name].reads == "model"
    if reads != (checkpoint is not None):
        raise InputError(
            f"{_CASCADE}.drafter is {name!r}, which reads "
            + ("a model: name its folder in" if reads else "none: leave out")
            + f" {_CASCADE}.checkpoint"
        )
    assert parts.model is not None  # `Kind.reads`
    inner: dict[str, Any] = dict(target=parts.model, folder=None, model=None)
    if checkpoint is not None:
        folder = zoo.locate(checkpoint).expanduser().absolute()
        if not folder.is_dir():
            raise InputError(f"{_CASCADE}.checkpoint is {checkpoint!r}: no such folder")
        inner |= dict(folder=folder, model=_inner_model(parts, folder))
    gamma = {f"{key}_inner": value for key, value in own.items()}
    drafter = kinds[name].make(dataclasses.replace(parts, **inner))
    return CascadeDrafter(parts.model, drafter, **gamma)


def _inner_model(parts: Parts, folder: pathlib.Path) -> T5:
    assert parts.folder is not None  # `Kind.reads`
    tokenizer = tokenizers.load_tokenizer(folder)
    tokenizers.check_same_tokenizer(tokenizers.load_tokenizer(parts.folder), tokenizer)
    model = t5_weights.load_t5(folder, parts.target.dtype)
    dead_from(tokenizer, model, "inner draft")
    return model
