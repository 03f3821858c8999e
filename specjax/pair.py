"""Text in, text out: a target, a drafter and a tokenizer that belong together.

A convenience at the outer edge. Whatever it does can be done with the functions that it
calls, and nothing else in specjax imports it.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Key

from specjax import zoo
from specjax.beam import BeamOutput, beam_generate
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.decoding import (
    DecodeOutput,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters.base import Drafter
from specjax.drafters.model import ModelDrafter
from specjax.errors import InputError, is_whole
from specjax.models.t5 import T5
from specjax.models.t5_weights import load_t5
from specjax.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was written for some texts.

    Attributes:
        texts: one per row: per source, or `samples` of each source side by side.
        output: tokens, lengths and counts; of beam search all beams, of which `texts`
            has the best.
    """

    texts: list[str]
    output: DecodeOutput | BeamOutput


@dataclasses.dataclass(frozen=True, repr=False)
class Pair:
    """Models and tokenizer, loaded.

    Attributes:
        target: its law is what the output follows.
        drafter: proposes tokens; None: the target decodes alone.
        tokenizer: of both models.
        num_tokens: ids from here on are padding of the vocabulary; None: none are.
    """

    target: T5
    drafter: Drafter | None
    tokenizer: tokenizers.Tokenizer
    num_tokens: int | None

    def __repr__(self) -> str:
        # Every array of both models would fill pages of a notebook.
        drafter = None if self.drafter is None else type(self.drafter).__name__
        return (
            f"Pair(target={type(self.target).__name__} of width "
            f"{self.target.config.d_model}, drafter={drafter}, "
            f"{self.tokenizer.vocab_size} tokens)"
        )

    def generate(
        self,
        sources: Sequence[str],
        *,
        seed: int | Sequence[int] = 0,
        samples: int = 1,
        beams: int | None = None,
        sampling: Sampling = Sampling(temperature=None),  # noqa: B008 (frozen)
        pad_to_multiple: int = 32,
        **options: Any,
    ) -> Generation:
        """Decodes texts in one batch, speculatively where there is a drafter.

        Args:
            sources: texts.
            seed: row i draws with key i of ``split(key(seed))``; or a seed per row,
                which then draws as a batch of its own would.
            samples: texts per source. Each is a row: what may be set by row (seeds,
                numbers of `sampling`, ``budget``) is for ``samples * len(sources)``.
            beams: beam search with so many texts, by the target alone; None: none.
            sampling: greedy unless told otherwise.
            pad_to_multiple: source tokens are padded to a multiple of it, so that
                texts of like lengths share a program. A source may be of any length;
                what a model was trained on is the caller's to know.
            **options: of `speculative_generate`, `autoregressive_generate` or
                `beam_generate`.

        Raises:
            InputError: no source, one without text, a text in place of a list of
                texts, options that mean nothing, or beams beside a drafter.
        """
        if isinstance(sources, str):
            raise InputError("sources is one text: give a list, such as [text]")
        if not sources:
            raise InputError("there is no source to decode: give one text or more")
        for number, source in enumerate(sources):
            if not source.strip():
                raise InputError(f"sources[{number}] is empty: nothing to decode")
        if not is_whole(samples) or samples < 1:
            raise InputError(f"samples is {samples}: a whole number, at least 1")
        if samples > 1 and sampling.greedy:
            raise InputError(
                f"samples is {samples} and the sampling is greedy, whose texts of one "
                "source are all the same: give a temperature, or leave samples out"
            )
        if beams is not None and self.drafter is not None:
            raise InputError(
                f"beams is {beams} and there is a drafter: beam search ranks many "
                "texts and speculation verifies one, so that they do not combine; "
                "take the drafter out (dataclasses.replace(pair, drafter=None)), or "
                "leave beams out"
            )
        rows = [self.tokenizer.encode(source) for source in sources]
        width = -(-max(map(len, rows)) // pad_to_multiple) * pad_to_multiple
        rows = [row for row in rows for _ in range(samples)]
        padded = tuple(map(jnp.asarray, batches.pad_to_bucket(rows, width)))
        options = {"eos_id": self.tokenizer.eos_id, **options}
        known = [n for n in (sampling.num_tokens, self.num_tokens) if n is not None]
        options["sampling"] = sampling.replace(num_tokens=min(known, default=None))
        output: DecodeOutput | BeamOutput
        if beams is not None:
            output = beam_generate(self.target, *padded, beams=beams, **options)
            tokens, length = output.tokens[:, 0], output.length[:, 0]
        else:
            arguments = (*padded, _row_keys(seed, len(rows)))
            if self.drafter is None:
                output = autoregressive_generate(self.target, *arguments, **options)
            else:
                output = speculative_generate(
                    self.target, self.drafter, *arguments, **options
                )
            tokens, length = output.tokens, output.length
        given = options.get("prefix_length", np.ones(len(rows), int))
        if "prefix" in options and "prefix_length" not in options:
            given = np.full(len(rows), options["prefix"].shape[1])
        texts = [
            self.tokenizer.decode(own[start:end].tolist())
            for own, start, end in zip(
                np.asarray(tokens), np.asarray(given), np.asarray(length), strict=True
            )
        ]
        return Generation(texts=texts, output=output)


def _row_keys(seed: int | Sequence[int], rows: int) -> Key[Array, " B"]:
    if not isinstance(seed, Sequence | np.ndarray):
        return jax.random.split(jax.random.key(seed, impl="threefry2x32"), rows)
    if len(seed) != rows:
        raise InputError(f"seed has {len(seed)} numbers: one, or one per row ({rows})")
    return jnp.concatenate([_row_keys(int(own), 1) for own in seed])


def load_model(
    folder: pathlib.Path, dtype: DTypeLike = jnp.float32, role: str = "target"
) -> tuple[T5, tokenizers.Tokenizer, int | None]:
    """A model, its tokenizer, and the id from which on the model's rows are padding.

    Args:
        folder: in Hugging Face's T5 layout.
        dtype: of parameters and activations.
        role: target or draft, for messages.

    Raises:
        InputError: the folder is no whole model, or its tokenizer is not the model's.
    """
    tokenizer = tokenizers.load_tokenizer(folder)
    model = load_t5(folder, dtype)
    return model, tokenizer, dead_from(tokenizer, model, role)


def dead_from(
    tokenizer: tokenizers.Tokenizer, model: T5, role: str = "target"
) -> int | None:
    """The id from which on the model's rows are padding; see the tokenizer's own."""
    config = model.config
    return tokenizers.dead_from(
        tokenizer, model.vocab_size, config.pad_id, config.eos_id, role
    )


def load(
    target: str | pathlib.Path,
    draft: str | pathlib.Path | None = None,
    *,
    dtype: DTypeLike = jnp.float32,
) -> Pair:
    """Loads a target, and a draft model in front of it.

    Args:
        target: a folder in Hugging Face's T5 layout, or "zoo/..." for what ships.
        draft: the same; None: the target decodes alone, or put another drafter in with
            ``dataclasses.replace``.
        dtype: of parameters and activations.

    Raises:
        InputError: a folder is no whole model, or the two have different tokenizers.
    """
    model, tokenizer, num_tokens = load_model(zoo.locate(target), dtype)
    drafter = None
    if draft is not None:
        draft_model, own, _ = load_model(zoo.locate(draft), dtype, "draft")
        tokenizers.check_same_tokenizer(tokenizer, own)
        drafter = ModelDrafter(draft_model)
    return Pair(model, drafter, tokenizer, num_tokens)
