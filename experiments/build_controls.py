"""From settings to what edits the logits, and to what outputs begin and end with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import ml_collections
import numpy as np

from specjax import controls, errors
from specjax.data import spellings
from specjax.data import tokenizer as tokenizers

# Penalties, and the value at which each changes nothing.
_IDLE = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


@dataclasses.dataclass(frozen=True)
class Ends:
    """What every output begins with, and what ends one beside the end of sequence.

    Attributes:
        prefix: ids, the start token first.
        stop: sequences of ids.
    """

    prefix: tuple[int, ...] = (0,)
    stop: tuple[tuple[int, ...], ...] = ()

    def settings(self, rows: int) -> dict[str, Any]:
        """Both, as the loops take them; what is not set is left out."""
        found = {}
        if len(self.prefix) > 1:
            prefix = jnp.array(self.prefix, jnp.int32)[None]
            found["prefix"] = jnp.broadcast_to(prefix, (rows, len(self.prefix)))
        if self.stop:
            found["stop"] = _padded(self.stop)
        return found

    def stops(self, tokens: Sequence[int]) -> bool:
        """Whether new tokens end in a stop sequence."""
        return any(tuple(tokens[-len(own) :]) == own for own in self.stop)


def build_ends(
    config: ml_collections.ConfigDict, tokenizer: tokenizers.Tokenizer
) -> Ends:
    """What ``config.decoder_prefix`` and ``config.stop`` ask for.

    Raises:
        InputError: a text that the models never write, or a prefix that leaves no room.
    """
    texts = [text.strip() for own in config.stop for text in str(own).split(",")]
    stop: list[tuple[int, ...]] = []
    try:
        if texts:
            rows = spellings.stop_sequences(tokenizer, texts).tolist()
            stop = [tuple(index for index in row if index >= 0) for row in rows]
    except errors.InputError as error:
        raise errors.InputError(f"config.stop: {error}") from error
    try:
        ids, _ = spellings.decoder_prefixes(tokenizer, [config.decoder_prefix])
    except errors.InputError as error:
        raise errors.InputError(f"config.decoder_prefix: {error}") from error
    if ids.shape[1] >= config.max_length:
        raise errors.InputError(
            f"config.decoder_prefix has {ids.shape[1]} tokens, the start token "
            f"included, and config.max_length is {config.max_length}, which counts "
            "them: leave room for one more"
        )
    return Ends(tuple(ids[0].tolist()), tuple(stop))


def build_controls(
    config: ml_collections.ConfigDict, tokenizer: tokenizers.Tokenizer
) -> tuple[controls.Control, ...]:
    """The controls that are set, in order: bans last, so that no penalty lifts one.

    Raises:
        InputError: a setting means nothing, changes nothing, or names a token that
            there is not.
    """
    own = config.controls
    for name, idle in _IDLE.items():
        value = own[name]
        if value is not None and value == idle:
            raise errors.InputError(
                f"config.controls.{name} is {value:g}, which changes nothing: leave it "
                "out"
            )
    found: list[Any] = []
    if own.repetition_penalty is not None:
        if not 0 < own.repetition_penalty < np.inf:
            raise errors.InputError(
                f"config.controls.repetition_penalty is {own.repetition_penalty}: "
                "above 0 (above 1 against repeating)"
            )
        found.append(controls.RepetitionPenalty(own.repetition_penalty))
    taken = {
        name: own[f"{name}_penalty"]
        for name in ("frequency", "presence")
        if own[f"{name}_penalty"] is not None
    }
    for name, value in taken.items():
        if not np.isfinite(value):
            raise errors.InputError(
                f"config.controls.{name}_penalty is {value}: a finite number"
            )
    if taken:
        found.append(controls.CountPenalty(**taken))
    if own.no_repeat_ngram is not None:
        if not 1 <= own.no_repeat_ngram < config.max_length:
            raise errors.InputError(
                f"config.controls.no_repeat_ngram is {own.no_repeat_ngram}: tokens of "
                f"an n-gram, from 1 to below config.max_length ({config.max_length})"
            )
        found.append(controls.NoRepeatNgram(own.no_repeat_ngram))
    banned = _banned(own, tokenizer)
    if banned:
        found.append(controls.BannedSequences(_padded(banned)))
    if own.min_length is not None:
        if not 3 <= own.min_length <= config.max_length:
            raise errors.InputError(
                f"config.controls.min_length is {own.min_length}: decoder tokens, "
                "start token and EOS included, from 3 (every text has 2) to "
                f"config.max_length ({config.max_length})"
            )
        found.append(controls.MinLength(own.min_length, tokenizer.eos_id))
    return tuple(found)


def _banned(
    own: ml_collections.ConfigDict, tokenizer: tokenizers.Tokenizer
) -> list[list[int]]:
    """The sequences of ids that are ruled out."""
    sequences = []
    for index in own.banned_ids:
        if not errors.is_whole(index) or not 0 <= index < tokenizer.vocab_size:
            raise errors.InputError(
                f"config.controls.banned_ids has {index!r}: ids of the tokenizer, 0 to "
                f"{tokenizer.vocab_size - 1}"
            )
        sequences.append([index])
    for entry in own.banned_words:
        for word in str(entry).split(","):
            ids = tokenizer.encode(word.strip())[:-1]  # without EOS
            if not ids or tokenizer.unk_id in ids:
                raise errors.InputError(
                    f"config.controls.banned_words has {word!r}, which the tokenizer "
                    "cannot spell: the models never write it"
                )
            sequences.append(ids)
    return sequences


def _padded(sequences: Sequence[Sequence[int]]) -> Any:
    width = max(map(len, sequences))
    rows = [[*own, *[-1] * (width - len(own))] for own in sequences]
    return jnp.array(rows, jnp.int32)
