"""What was written for some texts: the record, made of a batch, joined of several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.beam import BeamOutput
from specjax.data.tokenizer import Tokenizer
from specjax.decode_state import DecodeOutput, Stats
from specjax.errors import InputError
from specjax.metrics.scores import token_log_probs
from specjax.models.base import EncoderDecoder
from specjax.pair_rows import Part


@dataclasses.dataclass(frozen=True)
class Generation:
    """What was written for some texts, a row per source, or per sample of each.

    Attributes:
        texts: of each row, what follows the prefix.
        tokens: the same as ids, end of sequence included.
        output: of the loop: buffers, lengths and counts; of beam search all beams, of
            which `texts` has the best.
        log_probs: where asked for, of each row's `tokens`, each after those before it:
            under the law that was sampled from (controls, temperature, top-k, top-p),
            with a temperature of 1 where it was greedy. See
            `metrics.scores.token_log_probs`, which computes them.
        complete: false where Ctrl-C left out the last rows.
    """

    texts: list[str]
    # Arrays would fill pages of a notebook.
    tokens: list[list[int]] = dataclasses.field(repr=False)
    output: DecodeOutput | BeamOutput = dataclasses.field(repr=False)
    log_probs: list[np.ndarray] | None = dataclasses.field(default=None, repr=False)
    complete: bool = True

    @property
    def text(self) -> str:
        """The text of a call that wrote one.

        Raises:
            InputError: there are several.
        """
        if len(self.texts) != 1:
            raise InputError(f"there are {len(self.texts)} texts: take one of texts")
        return self.texts[0]

    @property
    def stats(self) -> Stats | None:
        """What the decode did, per row; None of beam search."""
        return self.output.stats if isinstance(self.output, DecodeOutput) else None


def generation(
    target: EncoderDecoder,
    tokenizer: Tokenizer,
    part: Part,
    output: DecodeOutput | BeamOutput,
    log_probs: bool,
) -> Generation:
    """What was written for a batch, rows that fill it left out.

    Args:
        target: that wrote, and scores.
        tokenizer: of its ids.
        part: the batch.
        output: of it.
        log_probs: whether to score.
    """
    tokens, length = output.tokens, output.length
    if isinstance(output, BeamOutput):
        tokens, length = tokens[:, 0], length[:, 0]
    first = np.asarray(part.settings["prefix_length"])
    places = list(zip(first, np.asarray(length), strict=True))[: part.count]

    def new(values: Array, back: int) -> list[np.ndarray]:
        rows = zip(np.asarray(values), places, strict=False)
        return [own[start - back : end - back] for own, (start, end) in rows]

    scores = None
    if log_probs:
        sampling = part.settings["sampling"]
        found = token_log_probs(
            target, part.inputs, part.mask, tokens, sampling=sampling
        )
        scores = new(found, 1)  # column t is of the token at t + 1
    written = [own.tolist() for own in new(tokens, 0)]
    if part.count < len(part.inputs):
        output = jax.tree.map(lambda x: x[: part.count], output)
    return Generation(
        texts=[tokenizer.decode(own) for own in written],
        tokens=written,
        output=output,
        log_probs=scores,
    )


def joined(parts: Sequence[Generation], complete: bool = True) -> Generation:
    """The rows of several batches as one.

    Args:
        parts: of one call, in order.
        complete: of the whole.
    """
    if len(parts) == 1:
        return dataclasses.replace(parts[0], complete=complete)
    scores = [part.log_probs for part in parts]
    return Generation(
        texts=[text for part in parts for text in part.texts],
        tokens=[own for part in parts for own in part.tokens],
        output=jax.tree.map(
            lambda *xs: jnp.concatenate(xs), *(part.output for part in parts)
        ),
        log_probs=None
        if scores[0] is None
        else [own for part in scores for own in part or ()],
        complete=complete,
    )
