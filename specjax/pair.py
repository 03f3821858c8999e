"""Text in, text out: a target, a drafter and a tokenizer that belong together.

A convenience at the outer edge. Whatever it does can be done with the functions that it
calls, and nothing else in specjax imports it.

>>> import specjax
>>> pair = specjax.load("ende")
>>> made = pair.generate(["This package contains the documentation."], max_length=32)
>>> made.text
'Dieses Paket enthält die Dokumentation.'
>>> int(made.stats.target_calls[0]) < len(made.tokens[0])  # several tokens a call
True
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from specjax import pair_rows, streaming, zoo
from specjax.beam import BeamOutput, beam_generate
from specjax.data import tokenizer as tokenizers
from specjax.decoding import (
    DecodeOutput,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters.base import Drafter
from specjax.drafters.model import ModelDrafter
from specjax.errors import InputError, is_whole
from specjax.generation import Generation, generation, joined
from specjax.models.t5 import T5
from specjax.models.t5_weights import load_t5
from specjax.pair_rows import Part, Rows
from specjax.sampling import Sampling

_GREEDY = Sampling(temperature=None)


@dataclasses.dataclass(frozen=True, repr=False)
class Pair:
    """Models and tokenizer, loaded.

    `generate` serves every task; a name such as "translate" would be wrong for most.

    Attributes:
        target: its law is what the output follows.
        drafter: proposes tokens; None: the target decodes alone.
        tokenizer: of both models.
        num_tokens: ids from here on are padding of the vocabulary; None: none are.
        task_prefix: put before every source.
        max_source: most tokens of a source, task prefix and end of sequence included;
            None: any number, and what the models were trained on is yours to know.
    """

    target: T5
    drafter: Drafter | None
    tokenizer: tokenizers.Tokenizer
    num_tokens: int | None
    task_prefix: str = ""
    max_source: int | None = None

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
        batch_size: int | None = None,
        progress: bool = False,
        **settings: Any,
    ) -> Generation:
        """Decodes texts, speculatively where there is a drafter.

        Ctrl-C after the first of several batches ends the call with what is done, a
        warning, and a `complete` that is false.

        Args:
            sources: texts.
            batch_size: rows that are decoded at once; None: all.
            progress: show a bar, a step per batch.
            **settings: of `generate_batches`: seed, samples, sampling, beams,
                max_length, budget, prefix, stop, log_probs, and those of the loops,
                such as gamma and verifier.

        Raises:
            InputError: as `generate_batches`.
        """
        batches = self.generate_batches(sources, batch_size=batch_size, **settings)
        parts: list[Generation] = []
        rows = len(sources) * settings.get("samples", 1)
        try:
            with _bar(rows, progress) as advance:
                for part in batches:
                    parts.append(part)
                    advance(len(part.texts))
        except KeyboardInterrupt:
            if not parts:
                raise
            made = joined(parts, complete=False)
            warnings.warn(
                f"Ctrl-C: the first {len(made.texts)} of {rows} texts are kept",
                stacklevel=2,
            )
            return made
        return joined(parts)

    def generate_batches(
        self,
        sources: Sequence[str],
        *,
        batch_size: int | None,
        seed: int | Sequence[int] = 0,
        samples: int = 1,
        sampling: Sampling = _GREEDY,
        beams: int | None = None,
        max_length: int = 128,
        budget: int | Array | None = None,
        prefix: str | Sequence[str] | Array | None = None,
        prefix_length: Array | None = None,
        stop: str | Sequence[str] | Array | None = None,
        log_probs: bool = False,
        pad_to_multiple: int = 32,
        **options: Any,
    ) -> Iterator[Generation]:
        """The same, batch by batch, each handed over as soon as it is done.

        Joined they are what one batch of all rows gives: a row depends on its own key,
        source and settings alone.

        Args:
            sources: texts, decoded in this order. All is checked before the first.
            batch_size: rows of a batch; None: all.
            seed: row i draws with key i of ``split(key(seed))``; or a seed per row,
                which then draws as a batch of its own would.
            samples: texts per source. Each is a row: what may be set by row (seeds,
                numbers of `sampling`, ``budget``) is for ``samples * len(sources)``.
            sampling: greedy unless told otherwise; its controls edit the law by what
                was written.
            beams: beam search with so many texts, by the target alone; None: none.
            max_length: decoder tokens, start token, prefix and end included.
            budget: new tokens, one number or one per row.
            prefix: what every output begins with, or one text per row, or tokens as
                `speculative_generate` takes them. `texts` hold what follows it.
            prefix_length: of tokens as prefix.
            stop: a text or texts that end an output, which keeps them, or tokens as
                `speculative_generate` takes them.
            log_probs: also score the tokens, by one more pass of the target.
            pad_to_multiple: source tokens are padded to a multiple of it, so that
                texts of like lengths share a program.
            **options: of `speculative_generate`, `autoregressive_generate` or
                `beam_generate`.

        Raises:
            InputError: no source, one without text or longer than `max_source`, a text
                in place of a list of texts, settings that mean nothing, or beams beside
                a drafter.
        """
        if isinstance(sources, str):
            raise InputError("sources is one text: give a list, such as [text]")
        if batch_size is not None and (not is_whole(batch_size) or batch_size < 1):
            raise InputError(f"batch_size is {batch_size}: rows, a whole number from 1")
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
        rows = self._rows(
            sources,
            samples,
            seed=seed,
            sampling=sampling,
            max_length=max_length,
            budget=budget,
            prefix=prefix,
            prefix_length=prefix_length,
            stop=stop,
            options=options,
        )
        if beams is not None and "stop" in rows.settings:
            raise InputError(
                "stop is set and so is beams: the texts of a beam search end at the "
                "end of sequence alone; leave one out"
            )
        return (
            generation(
                self.target,
                self.tokenizer,
                part,
                self._decode(part, beams, options),
                log_probs,
            )
            for part in pair_rows.parts(rows, batch_size, pad_to_multiple)
        )

    def stream(
        self,
        text: str,
        *,
        seed: int = 0,
        sampling: Sampling = _GREEDY,
        max_length: int = 128,
        budget: int | None = None,
        prefix: str | Array | None = None,
        stop: str | Sequence[str] | Array | None = None,
        pad_to_multiple: int = 32,
        **options: Any,
    ) -> Iterator[str]:
        """The text that `generate` writes for one source, as target calls write it.

        A piece holds whole characters; a call that completes none yields nothing.
        Without a drafter each token is a call. Where two tokens score alike up to
        rounding the text may differ, since each call is a program of its own.

        Args:
            text: the source.
            seed: as of `generate_batches`, like all that follows.
            sampling: greedy unless told otherwise.
            max_length: decoder tokens.
            budget: new tokens.
            prefix: what the output begins with; the pieces follow it.
            stop: texts that end the output.
            pad_to_multiple: of source tokens.
            **options: of `speculative_generate`, such as gamma and verifier.

        Raises:
            InputError: as `generate_batches`, at once.
        """
        if not isinstance(text, str):
            raise InputError("stream takes one text, not a list of them")
        rows = self._rows(
            [text],
            seed=seed,
            sampling=sampling,
            max_length=max_length,
            budget=budget,
            prefix=prefix,
            prefix_length=None,
            stop=stop,
            options=options,
        )
        (part,) = pair_rows.parts(rows, None, pad_to_multiple)
        arguments = {"inputs": part.inputs, "mask": part.mask} | part.settings | options
        if self.drafter is None:
            calls = streaming.autoregressive_stream(self.target, **arguments)
        else:
            calls = streaming.speculative_stream(self.target, self.drafter, **arguments)
        return streaming.pieces(self.tokenizer, (call[0] for call in calls))

    def _rows(
        self,
        sources: Sequence[str],
        samples: int = 1,
        *,
        sampling: Sampling,
        options: dict[str, Any],
        **settings: Any,
    ) -> Rows:
        """Those of `options` that need a look before the loops are taken out of it."""
        ids = pair_rows.encoded(
            self.tokenizer, sources, self.task_prefix, self.max_source
        )
        known = [n for n in (sampling.num_tokens, self.num_tokens) if n is not None]
        return pair_rows.make_rows(
            self.target,
            self.tokenizer,
            [own for own in ids for _ in range(samples)],
            sampling=sampling.replace(num_tokens=min(known, default=None)),
            eos_id=options.pop("eos_id", self.tokenizer.eos_id),
            draft_sampling=options.pop("draft_sampling", None),
            **settings,
        )

    def _decode(
        self, part: Part, beams: int | None, options: dict[str, Any]
    ) -> DecodeOutput | BeamOutput:
        arguments = {"inputs": part.inputs, "mask": part.mask} | part.settings | options
        if beams is not None:
            del arguments["keys"]  # nothing is drawn
            return beam_generate(self.target, beams=beams, **arguments)
        if self.drafter is None:
            return autoregressive_generate(self.target, **arguments)
        return speculative_generate(self.target, self.drafter, **arguments)


@contextlib.contextmanager
def _bar(rows: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """What is told of each batch's rows, and shows them where wanted."""
    if not shown:
        yield lambda count: None
        return
    from rich import progress

    with progress.Progress(
        progress.TextColumn("decoding"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    ) as bar:
        task = bar.add_task("", total=rows)
        yield lambda count: bar.advance(task, count)


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
        target: a task that ships ("repair", "synopsis", "ende"), with its target,
            draft, prefix and longest source; or a folder in Hugging Face's T5 layout,
            or "zoo/..." for a model that ships.
        draft: a folder or "zoo/..."; None: the task's own, or else none, so that the
            target decodes alone. Another drafter goes in with ``dataclasses.replace``.
        dtype: of parameters and activations.

    Raises:
        InputError: a folder is no whole model, or the two have different tokenizers.
    """
    task = zoo.TASKS.get(target) if isinstance(target, str) else None
    folder = zoo.locate(target if task is None else task.target).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"there is no folder {folder}, and no task of this name ships here: there "
            f"are {', '.join(zoo.TASKS)}"
        )
    model, tokenizer, num_tokens = load_model(folder, dtype)
    if task is not None and draft is None:
        draft = task.draft
    drafter = None
    if draft is not None:
        own = zoo.locate(draft).expanduser()
        draft_model, other, _ = load_model(own, dtype, "draft")
        tokenizers.check_same_tokenizer(tokenizer, other)
        drafter = ModelDrafter(draft_model)
    pair = Pair(model, drafter, tokenizer, num_tokens)
    if task is None:
        return pair
    return dataclasses.replace(
        pair, task_prefix=task.prefix, max_source=task.max_source
    )
