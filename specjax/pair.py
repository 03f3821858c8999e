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

from specjax import zoo
from specjax.data import batches
from specjax.data import tokenizer as tokenizers
from specjax.decoding import (
    DecodeOutput,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters.base import Drafter
from specjax.drafters.model import ModelDrafter
from specjax.errors import InputError
from specjax.models.t5 import T5
from specjax.models.t5_weights import load_t5
from specjax.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was written for some texts.

    Attributes:
        texts: one per source.
        output: tokens, lengths and counts.
    """

    texts: list[str]
    output: DecodeOutput


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
        seed: int = 0,
        sampling: Sampling = Sampling(temperature=None),  # noqa: B008 (frozen)
        pad_to_multiple: int = 32,
        **options: Any,
    ) -> Generation:
        """Decodes texts in one batch, speculatively where there is a drafter.

        Args:
            sources: texts.
            seed: row i draws with key i of ``split(key(seed))``.
            sampling: greedy unless told otherwise.
            pad_to_multiple: source tokens are padded to a multiple of it, so that
                texts of like lengths share a program. A source may be of any length;
                what a model was trained on is the caller's to know.
            **options: of `speculative_generate` or `autoregressive_generate`.

        Raises:
            InputError: no source, one without text, a text in place of a list of
                texts, or options that mean nothing.
        """
        if isinstance(sources, str):
            raise InputError("sources is one text: give a list, such as [text]")
        if not sources:
            raise InputError("there is no source to decode: give one text or more")
        for number, source in enumerate(sources):
            if not source.strip():
                raise InputError(f"sources[{number}] is empty: nothing to decode")
        rows = [self.tokenizer.encode(source) for source in sources]
        width = -(-max(map(len, rows)) // pad_to_multiple) * pad_to_multiple
        inputs, mask = batches.pad_to_bucket(rows, width)
        arguments = (
            jnp.asarray(inputs),
            jnp.asarray(mask),
            jax.random.split(jax.random.key(seed, impl="threefry2x32"), len(rows)),
        )
        options = {"eos_id": self.tokenizer.eos_id, **options}
        known = [n for n in (sampling.num_tokens, self.num_tokens) if n is not None]
        options["sampling"] = sampling.replace(num_tokens=min(known, default=None))
        if self.drafter is None:
            output = autoregressive_generate(self.target, *arguments, **options)
        else:
            output = speculative_generate(
                self.target, self.drafter, *arguments, **options
            )
        given = options.get("prefix_length", np.ones(len(rows), int))
        if "prefix" in options and "prefix_length" not in options:
            given = np.full(len(rows), options["prefix"].shape[1])
        texts = [
            self.tokenizer.decode(np.asarray(tokens)[start:end].tolist())
            for tokens, start, end in zip(
                output.tokens, np.asarray(given), np.asarray(output.length), strict=True
            )
        ]
        return Generation(texts=texts, output=output)


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
