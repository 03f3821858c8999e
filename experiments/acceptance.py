"""How often a draft would stand in the texts of its target, before it drafts there."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import baseline, build
from specjax import metrics, theory
from specjax.data import batches
from specjax.drafters.model import ModelDrafter
from specjax.models import shared_encoder
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling
from specjax.verify import token_verify


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """How often chains of drafts would stand, by token verification.

    Attributes:
        alpha: mean of sum min(p, q) over all prefixes; greedily, of agreement.
        survival: by depth, where rounds of the longest draft start.
        tokens: of each text, by batch and row.
        kept: the same, the chance of each token to be kept where it is drafted; None:
            the depths of a block differ, and `survival` was counted.
    """

    alpha: float
    survival: list[float]
    tokens: list[list[int]]
    kept: list[list[np.ndarray]] | None

    def calls(self, gamma: int) -> list[list[float]]:
        """Expected target calls of each text, by batch and row."""
        if self.kept is None:
            own = self.survival[:gamma]
            return [
                [theory.expected_calls(own, n) for n in rows] for rows in self.tokens
            ]
        return [
            [float(round_starts(chances, gamma).sum()) for chances in rows]
            for rows in self.kept
        ]


def accept(
    pair: build.Pair,
    parts: Sequence[batches.InferenceBatch],
    keys: jax.Array,
    *,
    sampling: Sampling,
    draft_sampling: Sampling | None,
    max_length: int,
    longest: int,
) -> Acceptance:
    """Lets the target write, and looks at its texts with the draft.

    A draft model's law at a prefix is the same at any depth of a block, so that the
    texts tell all (`metrics.Agreement.kept`). Other drafters know less of a block's
    later tokens than of its first: their depths are counted in one decode with the
    longest draft.

    Args:
        pair: the target and the drafter.
        parts: the sources.
        keys: one key per row of them.
        sampling: of the target.
        draft_sampling: of the draft; None: the target's.
        max_length: decoder tokens, start token included.
        longest: the longest draft, in tokens.
    """
    outputs = baseline.decode_all(pair.target, parts, keys, sampling, max_length)
    model = draft_model(pair)
    laws: dict[str, Any] = dict(sampling=sampling, draft_sampling=draft_sampling)
    agreements: list[metrics.Agreement] = []
    tokens: list[list[int]] = []
    kept: list[list[np.ndarray]] = []
    for part, output in zip(parts, outputs, strict=True):
        source = jnp.asarray(part.inputs), jnp.asarray(part.mask)
        text = (*source, output.tokens, output.length)
        slots = np.flatnonzero(part.valid).tolist()
        tokens.append([len(baseline.new_tokens(output, slot)) for slot in slots])
        if model is None:
            agreement = metrics.drafter_alpha(pair.target, pair.drafter, *text, **laws)
        else:
            agreement = metrics.teacher_forced_alpha(pair.target, model, *text, **laws)
            rows = np.asarray(agreement.kept, np.float64)
            kept.append([rows[s, :n] for s, n in zip(slots, tokens[-1], strict=True)])
        agreements.append(agreement)
    alpha = metrics.alpha(*agreements)
    if model is not None:
        survival = survival_of([row for rows in kept for row in rows], longest)
        return Acceptance(alpha, survival, tokens, kept)
    stats = [
        baseline.speculate(
            pair.target,
            pair.drafter,
            part,
            keys,
            verifier=token_verify,
            **laws,
            gamma=longest,
            max_length=max_length,
        ).stats
        for part in parts
    ]
    return Acceptance(alpha, metrics.survival(metrics.merge(stats)), tokens, None)


def draft_model(pair: build.Pair) -> EncoderDecoder | None:
    """The model whose law the drafts have at any depth; None: there is none."""
    if pair.draft_model is None and isinstance(pair.drafter, ModelDrafter):
        return shared_encoder.whole(pair.drafter.model, pair.target)
    return pair.draft_model


def windows(kept: np.ndarray, gamma: int) -> np.ndarray:
    """``[n, gamma]``: survival of a draft after each prefix; past the end, all stand.

    Args:
        kept: ``[n]``, from `metrics.Agreement`.
        gamma: draft length, >= 1.
    """
    padded = np.concatenate([kept, np.ones(gamma)])
    chances = np.lib.stride_tricks.sliding_window_view(padded, gamma)[: len(kept)]
    return np.cumprod(chances, axis=1)


def round_starts(kept: np.ndarray, gamma: int) -> np.ndarray:
    """The chance that a round starts at each token of a text; their sum: target calls.

    Where all chances are alike it is `theory.expected_calls`.

    Args:
        kept: ``[n]``, from `metrics.Agreement`.
        gamma: draft length, >= 1.
    """
    begins = np.zeros(len(kept) + gamma + 1)
    begins[0] = 1.0
    for at, survive in enumerate(windows(kept, gamma)):
        # A round of which k drafts stood ends with one more token.
        ends = -np.diff(survive, prepend=1.0, append=0.0)
        begins[at + 1 : at + gamma + 2] += begins[at] * ends
    return begins[: len(kept)]


def survival_of(texts: Sequence[np.ndarray], gamma: int) -> list[float]:
    """Survival by depth where rounds start, drafts past a text's end left out.

    At a depth that no text reaches drafts stand as at the one before.

    Args:
        texts: of each, the chances of `metrics.Agreement`.
        gamma: draft length, >= 1.
    """
    tried, stood = np.zeros((2, gamma))
    for kept in texts:
        inside = np.add.outer(np.arange(len(kept)), np.arange(gamma)) < len(kept)
        weight = round_starts(kept, gamma)[:, None] * inside
        survive = windows(kept, gamma)
        stood += (weight * survive).sum(0)
        tried += (weight * np.insert(survive[:, :-1], 0, 1.0, axis=1)).sum(0)
    made, hazard = [1.0], 1.0
    for up, down in zip(stood, tried, strict=True):
        hazard = min(up / down, 1.0) if down else hazard
        made.append(made[-1] * hazard)
    return [float(own) for own in made[1:]]
