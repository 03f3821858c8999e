"""What a program compiled for a TPU does with its memory, read off its text.

XLA's own count of bytes adds what moves from the chip's memory (HBM) to its on-chip
memories (VMEM; CMEM of a v4) to what is then read from there, and takes a slice for the
whole array: several times what the HBM sees. Here only the HBM counts, padding to whole
tiles included.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2}
_ITEM_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(([^)]*)\)(.*)")
_TILE = re.compile(r"T\(([\d,]+)\)")
_SPACE = re.compile(r"S\((\d+)\)")
# Memory spaces off the chip: its own memory, which usually goes without saying, and the
# host's.
_MEMORY = ("0", "5")

# What only renames, or begins what another instruction ends.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota"}
_IN_PLACE = {"dynamic-update-slice", "scatter"}
_SLICING = {"dynamic-slice", "slice", "gather"}
_COLLECTIVES = {
    *("all-reduce", "all-gather", "all-to-all", "reduce-scatter"),
    *("collective-permute", "collective-broadcast", "ragged-all-to-all"),
}


@dataclasses.dataclass(frozen=True)
class ArrayType:
    """One array of an instruction's type.

    Attributes:
        dtype: XLA's name of it.
        dims: its shape.
        bytes: with padding to whole tiles.
        on_chip: whether it is kept on the chip, and not in its memory.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: int
    on_chip: bool


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        name: of its result.
        op: what it does.
        results: arrays that it makes.
        operands: names of what it reads.
        rest: its attributes.
        text: what stands between its parentheses.
        is_root: whether it is its computation's result.
    """

    name: str
    op: str
    results: tuple[ArrayType, ...]
    operands: tuple[str, ...]
    rest: str
    text: str
    is_root: bool

    def called(self, attribute: str) -> str | None:
        """The computation that an attribute names."""
        found = re.search(rf"\b{attribute}=%?([\w.\-]+)", self.rest)
        return found[1] if found else None


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program: its computations by name, and the first to run."""

    computations: dict[str, dict[str, Instruction]]
    entry: str

    @staticmethod
    def parse(text: str) -> Program:
        """Reads what ``compiled.as_text()`` gives."""
        computations: dict[str, dict[str, Instruction]] = {}
        entry, own = "", {}
        for line in text.splitlines():
            if line and not line[0].isspace() and line.rstrip().endswith("{"):
                found = re.match(r"(ENTRY )?%?([\w.\-]+)", line)
                assert found is not None  # a line that is not empty
                own = computations.setdefault(found[2], {})
                entry = found[2] if found[1] else entry
            elif made := _INSTRUCTION.match(line):
                root, name, types, op, arguments, rest = made.groups()
                own[name] = Instruction(
                    name=name,
                    op=op,
                    results=tuple(_arrays(types)),
                    operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
                    rest=rest,
                    text=arguments,
                    is_root=root is not None,
                )
        return Program(computations, entry)

    def bodies(self) -> Iterator[dict[str, Instruction]]:
        """The bodies of all its loops."""
        for own in self.computations.values():
            for one in own.values():
                body = one.called("body") if one.op == "while" else None
                if body is not None:
                    yield self.computations[body]

    def collectives(self) -> Counter[tuple[str, tuple[int, ...]]]:
        """How often each kind of exchange between devices stands in the program.

        Returns:
            counts by the operation and the shape of one array that it makes.
        """
        return Counter(
            (one.op.removesuffix("-start"), own.dims)
            for body in self.computations.values()
            for one in body.values()
            if one.op.removesuffix("-start") in _COLLECTIVES
            for own in one.results
        )

    def loop_bytes(self, dims: Sequence[int]) -> int:
        """Bytes of the arrays of a shape that the first loop to run carries, padded.

        Args:
            dims: of one array, up to the order of axes and axes of one.
        """
        return max(
            (
                sum(own.bytes for own in one.results if _alike(own, dims))
                for one in self.computations[self.entry].values()
                if one.op == "while"
            ),
            default=0,
        )

    def copies(self, dims: Sequence[int]) -> list[str]:
        """What within a loop makes a new array of this shape in the chip's memory.

        Writes in place make none, nor do moves between memory and chip.

        Args:
            dims: see `loop_bytes`.

        Returns:
            a name and an operation for each.
        """
        found = []
        for body in self.bodies():
            for one in body.values():
                if one.op in _FREE or one.op == "while" or one.op.endswith("-start"):
                    continue
                made = [own for own in one.results if _alike(own, dims)]
                if not made or all(own.on_chip for own in made):
                    continue
                if one.op in _IN_PLACE or self._writes_in_place(one, dims):
                    continue
                if one.op.endswith("-done") and _from_chip(body, one):
                    continue
                found.append(f"{one.name} ({one.op})")
        return found

    def memory_bytes(self) -> int:
        """Bytes that a run of the first computation reads and writes in memory.

        Loops within it are left out.
        """
        body = self.computations[self.entry]
        # What is fetched onto the chip for the next run, before its turn: no pass in a
        # loop has that. Its users are taken to read it from memory.
        early = {
            start.operands[0]
            for start in body.values()
            if "cross_program_prefetch_index" in start.rest
        }
        done = {
            one.name
            for one in body.values()
            if one.op == "copy-done" and body[one.operands[0]].operands[0] in early
        }
        return sum(
            self._traffic(body, one, done)
            for one in body.values()
            if one.name not in done
        )

    def _writes_in_place(self, one: Instruction, dims: Sequence[int]) -> bool:
        called = self.computations.get(one.called("calls") or "", {})
        return any(
            inner.op in _IN_PLACE and any(_alike(own, dims) for own in inner.results)
            for inner in called.values()
        )

    def _traffic(
        self, body: dict[str, Instruction], one: Instruction, early: Collection[str]
    ) -> int:
        if one.op in _FREE or one.op == "while" or one.op.endswith("-start"):
            return 0
        written = sum(own.bytes for own in one.results if not own.on_chip)
        if one.op.endswith("-done"):
            moved = sum(own.bytes for own in one.results)
            return written + (0 if _from_chip(body, one) else moved)
        called = self.computations.get(one.called("calls") or "", {})
        read = 0
        for at, name in enumerate(one.operands):
            source = body.get(name)
            if source is None:
                continue
            whole = sum(
                own.bytes for own in source.results if name in early or not own.on_chip
            )
            read += _read_of(called, at, whole) if one.op == "fusion" else whole
        return read + min(written, _put_in_place(called, one, written))


def _arrays(text: str) -> Iterator[ArrayType]:
    for dtype, sizes, order, layout in _ARRAY.findall(text):
        if dtype not in _ITEM_BYTES:
            continue
        dims = tuple(int(size) for size in sizes.split(",") if size)
        # From the innermost axis on, as the tile's last number is.
        padded = [dims[int(axis)] for axis in order.split(",") if axis] or list(dims)
        tile = _TILE.search(layout)
        if tile:
            steps = [int(step) for step in tile[1].split(",")][::-1]
            padded += [1] * (len(steps) - len(padded))
            for axis, step in enumerate(steps):
                padded[axis] = -(-padded[axis] // step) * step
        size = math.prod(padded) * _ITEM_BYTES[dtype]
        space = _SPACE.search(layout)
        on_chip = space is not None and space[1] not in _MEMORY
        yield ArrayType(dtype, dims, size, on_chip)


def _alike(own: ArrayType, dims: Sequence[int]) -> bool:
    def key(sizes: Sequence[int]) -> list[int]:
        return sorted(size for size in sizes if size != 1)

    # Masks and places of the same shape are no copies of what is floating.
    return key(own.dims) == key(dims) and own.dtype in ("bf16", "f16", "f32")


def _put_in_place(
    called: dict[str, Instruction], one: Instruction, written: int
) -> int:
    """Bytes that a fusion writes: a part of its result, where it edits an array."""
    sizes = [math.prod(own.dims) for own in one.results]
    for inner in called.values():
        if inner.op in _IN_PLACE and sizes == [
            math.prod(a.dims) for a in inner.results
        ]:
            update = inner.operands[-1 if inner.op == "scatter" else 1]
            if update in called:
                return sum(made.bytes for made in called[update].results)
    return written


def _from_chip(body: dict[str, Instruction], done: Instruction) -> bool:
    """Whether what a move brings to memory, or keeps on the chip, was on the chip."""
    start = body.get(done.operands[0]) if done.operands else None
    ends = start.results if start is not None else ()
    spaces = [own.on_chip for own in ends if math.prod(own.dims) > 1]
    kept = all(own.on_chip for own in done.results)
    return all(spaces) if kept else any(spaces)


def _read_of(called: dict[str, Instruction], at: int, whole: int) -> int:
    """Bytes of its operand `at` that a fusion reads: slices of it may be all."""
    own = next(
        (
            one
            for one in called.values()
            if one.op == "parameter" and one.text.strip() == str(at)
        ),
        None,
    )
    if own is None:
        return whole
    read = 0
    for user in called.values():
        if own.name not in user.operands:
            continue
        if user.op in _IN_PLACE and user.operands[0] == own.name:
            continue
        if user.op not in _SLICING or user.operands[0] != own.name:
            return whole
        read += sum(one.bytes for one in user.results)
    return min(read, whole)
