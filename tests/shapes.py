"""Checks, while the tests run, every shape that a signature of specjax promises."""

from __future__ import annotations

import typing
from collections.abc import Callable, Iterator
from typing import Any

from beartype import BeartypeConf, FrozenDict, beartype


def _protocols(hint: Any) -> Iterator[type]:
    """The protocols anywhere in a type hint."""
    if getattr(hint, "_is_protocol", False):
        yield hint
    for argument in typing.get_args(hint):
        yield from _protocols(argument)


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype, with two exceptions that JAX and our protocols need.

    JAX rebuilds records around placeholders (`tree_map` to shapes, `in_axes`), so what
    their constructors are given is not checked; protocols are left to the type checker,
    so that a test's table model needs no more than what is called.
    """
    if function.__name__ == "__init__":
        return function
    hints = function.__annotations__.values()
    overrides = {protocol: object for hint in hints for protocol in _protocols(hint)}
    conf = BeartypeConf(hint_overrides=FrozenDict(overrides))
    return beartype(conf=conf)(function)
