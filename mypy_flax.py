"""Tells mypy that a record made by `flax.struct.dataclass` has the method `replace`."""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import ARG_STAR2, Argument, Var
from mypy.plugin import ClassDefContext, Plugin
from mypy.plugins import dataclasses
from mypy.plugins.common import add_method_to_class
from mypy.types import AnyType, TypeOfAny
from mypy.typevars import fill_typevars


def _add_replace(context: ClassDefContext) -> bool:
    # A hook stands in for mypy's own treatment of the decorator, so that comes first.
    done = dataclasses.dataclass_class_maker_callback(context)
    if "replace" not in context.cls.info.names:
        kind = AnyType(TypeOfAny.explicit)
        changes = Argument(Var("changes", kind), kind, None, ARG_STAR2)
        self_type = fill_typevars(context.cls.info)
        add_method_to_class(context.api, context.cls, "replace", [changes], self_type)
    return done


class FlaxPlugin(Plugin):
    """Adds `replace` to the records of flax."""

    def get_class_decorator_hook_2(
        self, fullname: str
    ) -> Callable[[ClassDefContext], bool] | None:
        """The treatment of one class decorator."""
        return _add_replace if fullname == "flax.struct.dataclass" else None


def plugin(version: str) -> type[Plugin]:
    """What mypy looks up in this file."""
    return FlaxPlugin
