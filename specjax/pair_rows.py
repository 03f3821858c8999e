"""The rows of a call on a pair: checked as a whole, then cut into batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Key

from specjax import checks
from specjax.data import batches, characters, spellings
from specjax.data.tokenizer import Tokenizer
from specjax.errors import InputError
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling, check_sampling, sampling_rows


@dataclasses.dataclass(frozen=True)
class Rows:
    """What is to be decoded.

    Attributes:
        sources: ids of each row.
        settings: of the loops; those that have a row each are of all rows.
    """

    sources: Sequence[Sequence[int]]
    settings: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Part:
    """A batch of them.

    Attributes:
        inputs: source ids, padded on the right.
        mask: which are real.
        settings: of the loops.
        count: the first so many rows are asked for; others fill the batch.
    """

    inputs: Int[Array, "B S"]
    mask: Bool[Array, "B S"]
    settings: dict[str, Any]
    count: int


def encoded(
    tokenizer: Tokenizer, sources: Sequence[str], prefix: str, most: int | None
) -> list[list[int]]:
    """The ids of sources.

    Args:
        tokenizer: of the models.
        sources: texts.
        prefix: put before each.
        most: tokens of one, all included; None: any number.

    Raises:
        InputError: there is no source, an empty one, or one that is too long.
    """
    if not sources:
        raise InputError("there is no source to decode: give one text or more")
    rows = []
    for number, source in enumerate(sources):
        if characters.is_blank(source):
            raise InputError(f"sources[{number}] is empty: nothing to decode")
        rows.append(tokenizer.encode(prefix + source))
        if most is not None and len(rows[-1]) > most:
            raise InputError(
                f"sources[{number}] has {len(rows[-1])} tokens, and these models were "
                f"trained on at most {most}: split it, or lift the limit by "
                "dataclasses.replace(pair, max_source=None)"
            )
    return rows


def make_rows(
    target: EncoderDecoder,
    tokenizer: Tokenizer,
    sources: Sequence[Sequence[int]],
    *,
    seed: int | Sequence[int],
    sampling: Sampling,
    max_length: int,
    budget: int | Array | None,
    prefix: Any,
    prefix_length: Array | None,
    stop: Any,
    eos_id: int,
    draft_sampling: Sampling | None,
) -> Rows:
    """Checks what may be set by row, and turns texts into ids.

    Args:
        target: that decodes.
        tokenizer: of its ids.
        sources: ids of each row.
        seed: one, or one per row.
        sampling: as of `speculative_generate`, like all that is not said here.
        prefix: also a text for all rows, or one per row.
        stop: also a text, or several.

    Raises:
        InputError: naming the setting that means nothing.
    """
    count = len(sources)
    starts, ends = _texts(prefix), _texts(stop)
    if starts is not None:
        if prefix_length is not None:
            raise InputError(
                "prefix_length is of tokens, and the prefix is text: leave it out"
            )
        starts = starts * count if isinstance(prefix, str) else starts
        if len(starts) != count:
            raise InputError(
                f"prefix has {len(starts)} texts: one, or one per row ({count})"
            )
        ids, length = spellings.decoder_prefixes(tokenizer, starts)
        prefix, prefix_length = jnp.asarray(ids), jnp.asarray(length)
    if ends is not None:
        stop = jnp.asarray(spellings.stop_sequences(tokenizer, ends))
    settings = checks.decode_arguments(
        target,
        jnp.zeros((count, 1), jnp.int32),  # sources have their own checks
        jnp.ones((count, 1), bool),
        _row_keys(seed, count),
        sampling,
        max_length,
        budget,
        prefix,
        prefix_length,
        eos_id,
    )
    del settings["inputs"], settings["mask"]
    settings["eos_id"] = eos_id
    if stop is not None:
        settings["stop"] = checks.check_stop(stop)
    if draft_sampling is not None:
        check_sampling(draft_sampling, "draft_sampling", count)
        settings["draft_sampling"] = draft_sampling
    return Rows(sources, settings)


def parts(rows: Rows, size: int | None, multiple: int) -> Iterator[Part]:
    """The rows in order, so many at a time; the last batch is filled up.

    Args:
        rows: all.
        size: of a batch; None: all of them.
        multiple: what the width of a batch divides by.
    """
    count = len(rows.sources)
    size = min(size or count, count)
    for start in range(0, count, size):
        # The last row again, without a budget, where there is no other.
        index = np.minimum(np.arange(start, start + size, dtype=np.int32), count - 1)
        real = min(size, count - start)
        sources = [rows.sources[row] for row in index]
        width = -(-max(map(len, sources)) // multiple) * multiple
        inputs, mask = batches.pad_to_bucket(sources, width)
        yield Part(
            inputs=jnp.asarray(inputs),
            mask=jnp.asarray(mask),
            settings=_settings(rows.settings, index, real),
            count=real,
        )


def _settings(
    settings: Mapping[str, Any], index: np.ndarray, real: int
) -> dict[str, Any]:
    own = dict(settings)
    if real == len(own["budget"]):
        return own
    rows = jnp.asarray(index)
    for name in ("keys", "budget", "prefix", "prefix_length"):
        own[name] = own[name][rows]
    for name in {"sampling", "draft_sampling"} & own.keys():
        own[name] = sampling_rows(own[name], rows)
    own["budget"] = jnp.where(jnp.arange(len(index)) < real, own["budget"], 0)
    return own


def _texts(given: Any) -> list[str] | None:
    """What was given, where it is text or texts."""
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, Sequence) and all(isinstance(own, str) for own in texts):
        return list(texts)
    return None


def _row_keys(seed: int | Sequence[int], rows: int) -> Key[Array, " B"]:
    if not isinstance(seed, Sequence | np.ndarray):
        return jax.random.split(jax.random.key(seed, impl="threefry2x32"), rows)
    if len(seed) != rows:
        raise InputError(f"seed has {len(seed)} numbers: one, or one per row ({rows})")
    return jnp.concatenate([_row_keys(int(own), 1) for own in seed])
