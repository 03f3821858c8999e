"""From settings to the rule that ends a row's draft: the table of their names."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from specjax import zoo
from specjax.drafters import files
from specjax.drafters.acceptance_head import AcceptanceHead
from specjax.drafters.base import Drafter
from specjax.drafters.chain import LengthRule
from specjax.drafters.lengths import (
    AcceptanceStop,
    Bandit,
    Confidence,
    EntropyBound,
    Fixed,
    Heuristic,
    check_rule,
)
from specjax.drafters.optimal_length import Optimal
from specjax.errors import InputError
from specjax.models import t5_weights

if TYPE_CHECKING:  # that module's table is made with what stands here
    from experiments.build_drafter import Parts

_PATH = "config.draft.length"
_ARMS = ("heuristic", "confidence", "entropy")  # of a bandit, unless told

RULES: Mapping[str, Callable[..., LengthRule]] = {
    "fixed": Fixed,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "entropy": EntropyBound,
    "acceptance": AcceptanceStop,
    "bandit": Bandit,
    "optimal": Optimal,
}
# What has no usual value.
_NEEDED = {
    "fixed": ("length", "how many tokens"),
    "acceptance": ("head", "a folder that experiments.train_acceptance wrote"),
    "optimal": ("cost", "c, as experiments.decode prints it"),
}


def with_rule(drafter: Drafter, parts: Parts) -> Drafter:
    """The drafter, which ends its drafts as ``config.draft.length`` says.

    Args:
        drafter: drafts gamma tokens, or decides by itself.
        parts: what it was made of.

    Raises:
        InputError: settings that mean nothing or that nothing reads, a drafter whose
            length no rule can decide, a tree, or a gamma that is yet to be chosen.
    """
    settings = parts.own("length")
    if not settings:  # of commands that draft with a model alone
        return drafter
    name = settings.get("rule")
    used = (name, *_arms(settings)) if name == "bandit" else (name,)
    if name is not None and name not in RULES:
        raise InputError(
            f"{_PATH}.rule is {name!r}: it must be one of {', '.join(RULES)}, or "
            "nothing: every block has gamma tokens"
        )
    for other in RULES:
        if other not in used and _own(settings, other):
            raise InputError(
                f"{_PATH}.{other} is set and {_PATH}.rule is {name!r}, which does not "
                "read it: leave it out"
            )
    if name is None:
        return drafter
    config = parts.config
    if config.get("tree"):
        raise InputError(
            f"{_PATH}.rule is {name!r} and config.tree is set: a tree has its own "
            "depth; leave one of them out"
        )
    if not hasattr(drafter, "rule"):
        raise InputError(
            f"{_PATH}.rule is {name!r} and the drafter {config.drafter!r} does not "
            "write one token after another: leave the rule out"
        )
    if config.get("gamma") == "auto":
        raise InputError(
            f"{_PATH}.rule is {name!r} and config.gamma 'auto': the rule decides how "
            "long drafts are; set gamma to the most tokens"
        )
    ruled: Drafter = drafter.replace(rule=_build(name, settings, drafter, parts))  # type: ignore[attr-defined]
    return ruled


def has_rule(drafter: Drafter) -> bool:
    """Whether a rule ends the drafts."""
    return getattr(drafter, "rule", None) is not None


def without_rule(drafter: Drafter) -> Drafter:
    """The drafter with blocks of gamma tokens."""
    if not has_rule(drafter):
        return drafter
    whole: Drafter = drafter.replace(rule=None)  # type: ignore[attr-defined]
    return whole


def _own(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What is set of one rule."""
    given = settings.get(name) or {}
    return {key: own for key, own in given.items() if own is not None}


def _arms(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The rules of a bandit."""
    given = _own(settings, "bandit").get("rules")
    if given is None:
        return _ARMS
    names = tuple(own.strip() for own in given.split(","))
    for name in names:
        if name not in RULES or name == "bandit":
            able = ", ".join(own for own in RULES if own != "bandit")
            raise InputError(f"{_PATH}.bandit.rules has {name!r}: some of {able}")
    return names


def _build(
    name: str, settings: Mapping[str, Any], drafter: Drafter, parts: Parts
) -> LengthRule:
    own = _own(settings, name)
    if name in _NEEDED:
        needed, what = _NEEDED[name]
        if needed not in own:
            raise InputError(f"{_PATH}.{name}.{needed} is not set: {what}")
    if name == "bandit":
        arms = _arms(settings)
        own["rules"] = tuple(_build(arm, settings, drafter, parts) for arm in arms)
    if name == "acceptance":
        own["head"] = _load_head(own["head"], drafter, parts)
    rule = RULES[name](**own)
    check_rule(rule, f"{_PATH}.{name}")
    return rule


def _load_head(name: str, drafter: Drafter, parts: Parts) -> AcceptanceHead:
    """The head in a folder, which must be that of this target and this draft."""
    setting = f"{_PATH}.acceptance.head"
    target = zoo.locate(parts.config.target.checkpoint).expanduser()
    draft = pathlib.Path(parts.folder or target)
    try:
        head = files.load_drafter(
            AcceptanceHead,
            zoo.locate(name).expanduser(),
            parts.target,
            t5_weights.fingerprint(target),
            "float32",
        )
    except InputError as error:
        raise InputError(f"{setting}: {error}") from error
    if head.draft != t5_weights.fingerprint(draft):
        raise InputError(
            f"{setting} is {name!r}, which was trained for another draft: train it "
            "anew for this one"
        )
    model = getattr(drafter, "model", None)
    features = head.settings()["features"]
    width = model.config.d_model if model else features
    if width != features:
        raise InputError(
            f"{setting} is {name!r}, for hidden states of {features} numbers; this "
            f"draft's have {width}"
        )
    return head
