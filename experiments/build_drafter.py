"""From the settings of a draft to a drafter: the table of their names."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from specjax.drafters.base import Drafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.models.t5 import T5


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a drafter is made of, loaded and checked.

    Attributes:
        config: all settings; a kind's own stand in ``config.draft[name]``.
        target: the target model.
        fingerprint: of the target's folder; see `drafters.files`.
        folder: of ``config.draft.checkpoint``; None for kinds that read none.
        model: the draft model in it; None for kinds that read none.
        num_tokens: ids with a meaning; None: all of the target's.
    """

    config: ml_collections.ConfigDict
    target: T5
    fingerprint: str
    folder: pathlib.Path | None
    model: T5 | None
    num_tokens: int | None

    def own(self, name: str) -> Mapping[str, Any]:
        """The settings of one kind that are set."""
        given = self.config.draft.get(name) or {}
        return {key: value for key, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to draft.

    Attributes:
        make: the drafter.
        reads: what ``config.draft.checkpoint`` holds: "model", a T5; "drafter", a
            folder of `drafters.files`; "": it is not read.
        samples: whether it reads ``config.draft_sampling``.
    """

    make: Callable[[Parts], Drafter]
    reads: str = ""
    samples: bool = False


DRAFTERS: Mapping[str, Kind] = {
    # A draft model that shares the target's encoder is one like any other.
    "model": Kind(lambda parts: ModelDrafter(parts.model), "model", samples=True),
    "ngram": Kind(lambda parts: NgramDrafter(**parts.own("ngram"))),
}
# Those that draft token by token with a model alone: such can draft trees too.
MODELS = ("model",)
