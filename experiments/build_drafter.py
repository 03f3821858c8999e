"""From the settings of a draft to a drafter: the table of their names."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import ml_collections

from experiments import build_length, build_wrapped
from specjax.drafters import files
from specjax.drafters.base import Drafter
from specjax.drafters.eagle import EagleDrafter
from specjax.drafters.early_exit import EarlyExitDrafter
from specjax.drafters.medusa import MedusaDrafter
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.drafters.parallel import ParallelDrafter
from specjax.drafters.quantized import quantize
from specjax.drafters.suffix import SuffixDrafter
from specjax.drafters.tables import BigramDrafter, UnigramDrafter
from specjax.errors import InputError
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


def load_trained(kind: type[Any], parts: Parts) -> Any:
    """The drafter in the folder of ``config.draft.checkpoint``.

    Args:
        kind: its class.
        parts: has the folder, and the target that the drafter must have been made for.
    """
    assert parts.folder is not None  # `Kind.reads` asks for it
    return files.load_drafter(kind, parts.folder, parts.target, parts.fingerprint)


def build_suffix(parts: Parts) -> SuffixDrafter:
    """One that copies: with a global table where a folder holds one, else without.

    Raises:
        InputError: the folder holds no such drafter, or a setting means nothing.
    """
    made = SuffixDrafter()
    if parts.folder is not None:
        if not (parts.folder / files.DRAFTER_FILE).is_file():
            raise InputError(
                f"config.draft.checkpoint is {parts.config.draft.checkpoint!r}, which "
                "holds no drafter: name the folder of a suffix drafter "
                "(`experiments.count`), or leave it empty for one that knows nothing"
            )
        made = load_trained(SuffixDrafter, parts)
    made = made.replace(**parts.own("suffix"))
    try:
        made.check()
    except InputError as error:
        raise InputError(f"config.draft.suffix: {error}") from error
    return made


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to draft.

    Attributes:
        make: the drafter.
        reads: what ``config.draft.checkpoint`` holds: "model", a T5; "drafter", a
            folder of `drafters.files`; "": it is not read.
        samples: whether it reads ``config.draft_sampling``.
        optional: whether it does without a folder where the setting is empty.
    """

    make: Callable[[Parts], Drafter]
    reads: str = ""
    samples: bool = False
    optional: bool = False

    def has_folder(self, config: ml_collections.ConfigDict) -> bool:
        """Whether ``config.draft.checkpoint`` is to be read."""
        given = bool(config.draft.checkpoint)
        return bool(self.reads) and (given or not self.optional)


DRAFTERS: Mapping[str, Kind] = {
    # A draft model that shares the target's encoder is one like any other.
    "model": Kind(lambda parts: ModelDrafter(parts.model), "model", samples=True),
    "ngram": Kind(lambda parts: NgramDrafter(**parts.own("ngram"))),
    "suffix": Kind(build_suffix, "drafter", optional=True),
    **{
        own.kind: Kind(functools.partial(load_trained, own), "drafter", samples=True)
        for own in (UnigramDrafter, BigramDrafter, EarlyExitDrafter, EagleDrafter)
    },
    "medusa": Kind(
        lambda parts: load_trained(MedusaDrafter, parts).replace(**parts.own("medusa")),
        "drafter",
        samples=True,
    ),
    "parallel": Kind(
        lambda parts: load_trained(ParallelDrafter, parts).replace(
            **parts.own("parallel")
        ),
        "drafter",
        samples=True,
    ),
    # The same weights a token at a time.
    "parallel_chain": Kind(
        lambda parts: ModelDrafter(load_trained(ParallelDrafter, parts).model),
        "drafter",
        samples=True,
    ),
    "trimmed": Kind(
        lambda parts: ModelDrafter(build_wrapped.trim_model(parts)),
        "model",
        samples=True,
    ),
    "cascade": Kind(
        lambda parts: build_wrapped.build_cascade(parts, DRAFTERS),
        "model",
        samples=True,
    ),
    "quantized": Kind(lambda parts: ModelDrafter(quantize(parts.target)), samples=True),
}
# Those with weights of their own: classes as `drafters.base.TrainableDrafter` says,
# which `experiments.train_drafter` trains. One that can start from an ordinary draft
# has ``from_model(target, model, settings, key)`` too, in the place of `create`.
TRAINABLE: Mapping[str, type[Any]] = {
    "early_exit": EarlyExitDrafter,
    "eagle": EagleDrafter,
    "medusa": MedusaDrafter,
    "parallel": ParallelDrafter,
}
# Those that draft token by token with a model alone: such can draft trees too.
MODELS = ("model", "trimmed", "quantized")


def make(name: str, parts: Parts) -> Drafter:
    """The drafter of a name, with the rule that ends its drafts.

    Args:
        name: of `DRAFTERS`.
        parts: what it is made of.

    Raises:
        InputError: its settings mean nothing, or those of ``config.draft.length``.
    """
    return build_length.with_rule(DRAFTERS[name].make(parts), parts)
