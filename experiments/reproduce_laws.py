"""The laws of a pair on texts that the target wrote: alpha, survival, lenience.

Widening keeps a model's function, so that all of this is counted on the pair as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import acceptance, baseline, build
from experiments.reproduce_tasks import Task
from specjax import theory_laws
from specjax.drafters import tables
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling, fit_vocabulary, with_arrays

COUNTED = ("unigram", "bigram")
# The target's texts of a line are judged by what is counted on those of other lines.
_FOLDS = 10


@dataclasses.dataclass(frozen=True)
class Text:
    """A text of the target, and the law of each of its tokens.

    Attributes:
        line: of the task.
        tokens: as it was written.
        laws: ``[n, V]`` of the target at temperature 1.
    """

    line: int
    tokens: list[int]
    laws: np.ndarray


@dataclasses.dataclass(frozen=True)
class Writings:
    """All texts of a task at one temperature, and how to read them.

    Attributes:
        texts: of the target.
        temperature: 0 or 1.
        model: the laws ``[n, V]`` of a draft model on each text.
    """

    texts: list[Text]
    temperature: int
    model: Callable[[build.Pair], list[np.ndarray]]


def sampling_of(temperature: int, num_tokens: int | None) -> Sampling:
    """How tokens are drawn at a temperature of the paper's."""
    return Sampling(temperature=1.0 if temperature else None, num_tokens=num_tokens)


def write(task: Task, target: build.Target, temperature: int) -> Writings:
    """Lets the target write, and keeps its laws.

    Args:
        task: the lines.
        target: at its own cost.
        temperature: 0, once per line, or 1, ``config.acceptance.draws`` times.
    """
    config = task.config
    draws = config.acceptance.draws if temperature else 1
    rows = [row for row in task.rows for _ in range(draws)]
    parts = task.parts(rows, min(config.acceptance.batch_size, len(rows)))
    keys = build.row_keys(config.seed, len(rows))
    sampling = sampling_of(temperature, target.num_tokens)
    outputs = baseline.decode_all(
        target.model, parts, keys, sampling, config.max_length
    )

    def laws(model: EncoderDecoder) -> list[np.ndarray]:
        found: list[np.ndarray] = [np.zeros(0)] * len(rows)
        for part, output in zip(parts, outputs, strict=True):
            probs = np.asarray(
                _laws(
                    model,
                    jnp.asarray(part.inputs),
                    jnp.asarray(part.mask),
                    output.tokens,
                    with_arrays(sampling_of(1, target.num_tokens)),
                    vocab_size=target.model.vocab_size,
                )
            )
            for slot in np.flatnonzero(part.valid):
                count = len(baseline.new_tokens(output, int(slot)))
                found[part.rows[slot]] = probs[slot, :count]
        return found

    def model(pair: build.Pair) -> list[np.ndarray]:
        own = acceptance.draft_model(pair)
        assert own is not None  # the drafts here are models
        return laws(own)

    written = baseline.tokens_by_row(parts, outputs, len(rows))
    texts = [
        Text(at // draws, tokens, own)
        for at, (tokens, own) in enumerate(
            zip(written, laws(target.model), strict=True)
        )
    ]
    return Writings(texts, temperature, model)


@functools.partial(jax.jit, static_argnames="vocab_size")
def _laws(
    model: EncoderDecoder,
    inputs: jax.Array,
    mask: jax.Array,
    tokens: jax.Array,
    sampling: Sampling,
    *,
    vocab_size: int,
) -> jax.Array:
    output, _ = model.decode(tokens[:, :-1], None, model.encode(inputs, mask))
    return sampling.law(fit_vocabulary(output.logits, vocab_size)).probs


def counted_laws(
    task: Task,
    target: build.Target,
    writings: Writings,
    all_texts: Sequence[Text],
    kind: str,
) -> list[np.ndarray]:
    """The laws of a unigram or a bigram on each text.

    Args:
        task: its counts, if it has any, or the folder of what was counted.
        target: at its own cost.
        writings: the texts.
        all_texts: of every temperature: what is counted otherwise, but for the texts of
            the same tenth of the lines.
        kind: of `COUNTED`.
    """
    size, ids = target.model.vocab_size, target.num_tokens
    stored = task.stored(kind)

    def counted(fold: int) -> Any:
        if stored:
            own = task.decode_config()
            own.drafter, own.draft.checkpoint = kind, stored
            return build.build_pair(own, target).drafter
        rows = task.counts
        if rows is None:
            rows = [text.tokens for text in all_texts if text.line % _FOLDS != fold]
        made = tables.count_tables(rows, size)
        return made.unigram if kind == "unigram" else made

    folds = 1 if stored or task.counts is not None else _FOLDS
    drafters = functools.cache(counted)
    found = []
    for text in writings.texts:
        last = np.asarray([0, *text.tokens[:-1]], np.int32)  # the start token first
        padded = np.zeros(task.config.max_length, np.int32)
        padded[: len(last)] = last
        probs = np.asarray(
            drafters(text.line % folds).probs(jnp.asarray(padded)), np.float64
        )[: len(last)]
        if ids is not None:
            probs[:, ids:] = 0.0  # dead rows of the vocabulary
        found.append(probs / probs.sum(-1, keepdims=True))
    return found


def judge(
    writings: Writings,
    laws: Sequence[np.ndarray],
    leniences: Sequence[float],
    depth: int,
) -> dict[str, Any]:
    """Alpha at each lenience, with its standard error, and survival by depth.

    Args:
        writings: the target's texts and laws.
        laws: of the draft, on each text.
        leniences: in (0, 1].
        depth: down to which survival goes.
    """
    alpha = {
        str(float(lenience)): _mean(
            [
                _stands(writings.temperature, text.laws, own, lenience)
                for text, own in zip(writings.texts, laws, strict=True)
            ],
            [text.line for text in writings.texts],
        )
        for lenience in leniences
    }
    kept = [
        _kept(writings.temperature, text, own)
        for text, own in zip(writings.texts, laws, strict=True)
    ]
    return {
        "alpha": alpha,
        "survival": acceptance.survival_of(kept, depth),
        "texts": len(kept),
        "tokens": sum(map(len, kept)),
    }


def _stands(
    temperature: int, p: np.ndarray, q: np.ndarray, lenience: float
) -> np.ndarray:
    """The chance of each token's draft to stand."""
    if temperature:
        found = theory_laws.lenient_acceptance(p, q, lenience)
    else:
        found = theory_laws.lenient_greedy_acceptance(p, q.argmax(-1), lenience)
    return np.asarray(found, np.float64)


def _kept(temperature: int, text: Text, q: np.ndarray) -> np.ndarray:
    """See `metrics.Agreement.kept`."""
    tokens = np.asarray(text.tokens)
    if not temperature:
        return (q.argmax(-1) == tokens).astype(np.float64)
    places = np.arange(len(tokens))
    p = np.maximum(text.laws[places, tokens], np.finfo(np.float32).tiny)
    return np.minimum(q[places, tokens] / p, 1.0)


def _mean(
    values: Sequence[np.ndarray], lines: Sequence[int]
) -> dict[str, float | None]:
    """The mean over all tokens; texts of a line are no independent samples."""
    sums, counts = np.zeros((2, max(lines) + 1))
    for own, line in zip(values, lines, strict=True):
        sums[line] += own.sum()
        counts[line] += len(own)
    mean = float(sums.sum() / counts.sum())
    used = int((counts > 0).sum())
    if used < 2:
        return {"mean": mean, "error": None}
    squares = ((sums - mean * counts) ** 2).sum() * used / (used - 1)
    return {"mean": mean, "error": float(np.sqrt(squares) / counts.sum())}


def entropy(writings: Writings) -> dict[str, float]:
    """Means of the laws' entropy and of ``sum p (log p)^2``, in nats."""
    sums, count = np.zeros(2), 0
    for text in writings.texts:
        laws = text.laws.astype(np.float64)
        logs = np.log(np.maximum(laws, np.finfo(np.float64).tiny))
        sums += -(laws * logs).sum(), (laws * logs**2).sum()
        count += len(laws)
    first, second = (sums / count).tolist()
    return {"entropy": first, "log_moment": second, "tokens": count}
