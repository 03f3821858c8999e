"""The pickles inside PyTorch's files, read without running anything that they name.

A pickle is a program: its instructions may import any function and call it. Here they
are read by a machine of our own that knows no Python: a name stays a name, a call is
understood if it rebuilds a tensor or makes an empty dict and refused otherwise, and
nothing is imported.
"""

from __future__ import annotations

import dataclasses
import math
import pickletools
from typing import Any

import ml_dtypes
import numpy as np

from specjax.errors import InputError

# Classes of PyTorch that name a number type.
_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_EMPTY_DICT = "collections.OrderedDict"
_TENSORS = ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor")
_PARAMETER = "torch._utils._rebuild_parameter"
_KNOWN = (_EMPTY_DICT, *_TENSORS, _PARAMETER, *(f"torch.{name}" for name in _STORAGES))

# Instructions by what they do, under the names that `pickletools` gives.
_NOTHING = ("PROTO", "FRAME")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_LITERALS = (
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT", "LONG", "BINFLOAT"),
    *("FLOAT", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("BINSTRING", "SHORT_BINSTRING", "STRING"),
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_PUT = ("PUT", "BINPUT", "LONG_BINPUT")
_GET = ("GET", "BINGET", "LONG_BINGET")


@dataclasses.dataclass(frozen=True)
class Storage:
    """A run of numbers in the file, which several tensors may share.

    Attributes:
        key: its name in the file.
        dtype: of its numbers.
        size: how many there are.
        start: of a view within another storage, in numbers.
    """

    key: str
    dtype: np.dtype
    size: int
    start: int = 0


@dataclasses.dataclass(frozen=True)
class View:
    """A tensor as a view of a storage.

    Attributes:
        storage: has its numbers.
        offset: of its first number, `Storage.start` included.
        shape: its sizes.
        strides: steps along each axis, in numbers.
    """

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def needed(self) -> int:
        """How many numbers the storage must have."""
        if math.prod(self.shape) == 0:
            return 0
        steps = zip(self.shape, self.strides, strict=True)
        return self.offset + 1 + sum((size - 1) * step for size, step in steps)


@dataclasses.dataclass(frozen=True)
class _Name:
    """A function or class that the pickle names, which is never looked up."""

    text: str


def load(file: Any, where: str) -> Any:
    """What one pickle describes: numbers, strings, tuples, lists, dicts, and `View`s.

    Args:
        file: a binary file or a map of one; stands at the pickle's beginning, and
            after the return at its end.
        where: names the file in messages.

    Raises:
        InputError: the pickle asks for anything else, or is cut short.
    """
    try:
        return _run(file, where)
    except InputError:
        raise
    # Damage shows as whatever the instruction trips over.
    except Exception as error:
        raise InputError(
            f"{where} is cut short or no PyTorch file ({type(error).__name__}: {error})"
            "."
        ) from error


def _run(file: Any, where: str) -> Any:
    stack: list[Any] = []
    marks: list[int] = []  # how high the stack was at each mark
    memo: dict[Any, Any] = {}

    def above_mark() -> list[Any]:
        start = marks.pop()
        taken = stack[start:]
        del stack[start:]
        return taken

    for code, argument, _ in pickletools.genops(file):
        name = code.name
        if name in _NOTHING:
            pass
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _LITERALS:
            stack.append(argument)
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in _TUPLES:
            count = _TUPLES[name]
            parts = tuple(stack[-count:])
            del stack[-count:]
            stack.append(parts)
        elif name == "TUPLE":
            stack.append(tuple(above_mark()))
        elif name == "LIST":
            stack.append(above_mark())
        elif name == "DICT":
            stack.append(_pairs(above_mark()))
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = above_mark()
            stack[-1].extend(values)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            values = above_mark()
            stack[-1].update(_pairs(values))
        elif name in _PUT:
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in _GET:
            stack.append(memo[argument])
        elif name == "GLOBAL":
            stack.append(_known(str(argument).replace(" ", "."), where))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(_known(f"{module}.{attribute}", where))
        elif name == "REDUCE":
            arguments, called = stack.pop(), stack.pop()
            stack.append(_call(called, arguments, where))
        elif name == "BUILD":
            stack.pop()  # attributes of a dict, such as its version: no weights
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "STOP":
            return stack.pop()
        else:
            raise InputError(
                f"{where} asks for {name}, which no file of weights needs; nothing of "
                "it was run."
            )
    raise EOFError("its pickle has no end")


def _pairs(values: list[Any]) -> dict[Any, Any]:
    return dict(zip(values[::2], values[1::2], strict=True))


def _known(name: str, where: str) -> _Name:
    if name not in _KNOWN:
        raise InputError(
            f"{where} names {name}, which no file of weights needs and which could run "
            "anything; nothing of it was run."
        )
    return _Name(name)


def _call(called: Any, arguments: Any, where: str) -> Any:
    function = called.text if isinstance(called, _Name) else type(called).__name__
    if function == _EMPTY_DICT and arguments == ():
        return {}
    if function in _TENSORS:
        storage, offset, shape, strides = arguments[:4]
        view = View(storage, storage.start + offset, tuple(shape), tuple(strides))
        numbers = (view.offset, *view.shape, *view.strides)
        if len(view.shape) != len(view.strides) or not all(
            type(number) is int and number >= 0 for number in numbers
        ):
            raise ValueError("a tensor's sizes make no sense")
        return view
    if function == _PARAMETER and isinstance(arguments[0], View):
        return arguments[0]
    raise InputError(
        f"{where} calls {function} otherwise than a file of weights does; nothing of "
        "it was run."
    )


def _storage(reference: tuple[Any, ...]) -> Storage:
    kind, storage, key, _, size, *view = reference
    if kind != "storage" or not isinstance(storage, _Name):
        raise ValueError(f"a reference to {kind!r} instead of a storage")
    if type(size) is not int or size < 0:
        raise ValueError(f"a storage of {size!r} numbers")
    # Files of before 2020 may name a part of a storage: its key, its start, its size.
    start = view[0][1] if view and view[0] is not None else 0
    dtype = _STORAGES[storage.text.removeprefix("torch.")]
    return Storage(str(key), dtype, size, start)
