"""From the settings ``widen`` to models of a published size's cost."""

from __future__ import annotations

import dataclasses

import jax
import ml_collections

from specjax import errors
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.models.widen import widen, widened_config


def widen_target(config: ml_collections.ConfigDict, target: T5) -> T5:
    """The target at the cost of what ``config.target.widen`` names; it writes the same.

    Args:
        config: the settings; a config without this one leaves the model alone.
        target: as loaded.

    Raises:
        InputError: no such preset, or one that is smaller than the model.
    """
    return _widened("target", target, _shape(config, "target", target))


def widen_draft(
    config: ml_collections.ConfigDict, target: T5, draft: T5 | None
) -> T5 | None:
    """The draft model at the cost of what ``config.draft.widen`` names.

    A draft that reads the target's encoder reads the widened one, at its own cost
    unless it is widened too.

    Args:
        config: see `widen_target`.
        target: widened already; before, it had the width that the draft reads.
        draft: as loaded; None: the drafter has no model of its own.

    Raises:
        InputError: as `widen_target`; a draft to widen where there is none.
    """
    if draft is None:
        if config.draft.get("widen") is not None:
            raise errors.InputError(
                f"config.draft.widen is {config.draft.widen!r} and the drafter "
                f"{config.drafter!r} has no model to widen: leave it out"
            )
        return None
    own = _shape(config, "draft", draft)
    if draft.shares_encoder:
        own = dataclasses.replace(own, encoder_width=target.config.d_model)
    return _widened("draft", draft, own)


def _shape(config: ml_collections.ConfigDict, role: str, model: T5) -> T5Config:
    name = config[role].get("widen")
    if name is None:
        return model.config
    try:
        return widened_config(model.config, T5Config.preset(name))
    except errors.InputError as error:
        raise errors.InputError(f"config.{role}.widen: {error}") from error


def _widened(role: str, model: T5, shape: T5Config) -> T5:
    if shape == model.config:
        return model
    try:
        return widen(model, shape, jax.random.key(0))
    except errors.InputError as error:
        raise errors.InputError(f"config.{role}.widen: {error}") from error
