"""Meshes of devices, and where each array of a decode or a training lies on them.

Layers know nothing of it: parameters are placed by rules on their paths, rows by their
first axis, and the compiler carries both through the loops (GSPMD, Xu et al. 2021,
arXiv:2105.04663). What is decoded on a mesh is what one device decodes, up to the order
in which sums of floating-point numbers are taken.

    mesh = make_mesh("data=2,model=4")
    target = place(target, mesh)
    inputs, mask, keys, budget = place_rows((inputs, mask, keys, budget), mesh)
    with jax.set_mesh(mesh):
        output = speculative_generate(target, drafter, inputs, mask, keys, ...)

`data` splits the rows; `model` splits the attention heads, the hidden units and the
vocabulary (Shoeybi et al. 2019, arXiv:1909.08053).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.errors import InputError

Tree = TypeVar("Tree")

DATA, MODEL = "data", "model"
AXES = (DATA, MODEL)

# What an axis of a parameter stands for: units that work apart from each other (heads,
# hidden units, entries of the vocabulary), or the width that all layers share.
_UNITS, _WIDTH = "units", "width"

# The first that fits a parameter's path counts; one that none fits is on every device.
RULES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"\.(qkv|kv|wi)\b", (None, _UNITS, _WIDTH)),
    (r"\.cross\.q\b", (_UNITS, _WIDTH)),
    (r"\.(out|wo)\b", (_WIDTH, _UNITS)),
    (r"\.bias\b", (None, _UNITS)),
    (r"\.(embedding|head)\b", (_UNITS, _WIDTH)),
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which axis of the mesh splits what of a parameter; None: no axis does.

    Attributes:
        units: heads, hidden units and the vocabulary.
        width: the rest of each matrix. `DATA` is for training: no device keeps a whole
            matrix, and each is gathered when it is used (FSDP; Zhao et al. 2023,
            arXiv:2304.11277).
    """

    units: str | None = MODEL
    width: str | None = None


DECODING = Layout()
TRAINING = Layout(width=DATA)
REPLICATED = Layout(units=None)


def mesh_sizes(text: str) -> dict[str, int]:
    """Devices of each axis of a mesh.

    Args:
        text: such as ``data=2,model=4``; an axis that is left out has size 1.

    Raises:
        InputError: an axis that is not known, given twice or of no size.

    >>> mesh_sizes("model=4")
    {'data': 1, 'model': 4}
    """
    sizes = {axis: 1 for axis in AXES}
    named: set[str] = set()
    for part in text.split(","):
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if axis not in AXES or axis in named or not re.fullmatch("[1-9][0-9]*", size):
            raise InputError(
                f"mesh is {text!r}, of which {part.strip()!r} is no part: it must be "
                "sizes of data and model, each at most once, such as data=2,model=4"
            )
        sizes[axis] = int(size)
        named.add(axis)
    return sizes


def make_mesh(text: str, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of all devices.

    Args:
        text: sizes of its axes, as of `mesh_sizes`.
        devices: of every process; default: those that jax finds.

    Raises:
        InputError: as `mesh_sizes`, or sizes that do not come to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = mesh_sizes(text)
    wanted = math.prod(sizes.values())
    if wanted != len(devices):
        raise InputError(
            f"mesh is {text!r}, which takes {wanted} devices, and there are "
            f"{len(devices)} ({devices[0].platform}): the sizes must come to "
            f"{len(devices)}, such as data={len(devices)}"
        )
    return Mesh(np.asarray(devices).reshape(tuple(sizes.values())), AXES)


def spec_of(path: str, shape: Sequence[int], layout: Layout) -> PartitionSpec:
    """How a parameter is split.

    Args:
        path: as `jax.tree_util.keystr` writes it.
        shape: of the parameter.
        layout: what the axes of the mesh split.
    """
    axes = {_UNITS: layout.units, _WIDTH: layout.width, None: None}
    for pattern, meaning in RULES:
        # A quantized weight's scales lack its last axis. What else is of fewer axes is
        # an optimizer's sums over some.
        whole = len(shape) == len(meaning) or path.endswith(".scale")
        if whole and re.search(pattern, path):
            return PartitionSpec(*(axes[own] for own in meaning[: len(shape)]))
    return PartitionSpec()


def shard_shape(
    path: str, shape: Sequence[int], sizes: Mapping[str, int], layout: Layout
) -> tuple[int, ...]:
    """What one device has of a parameter.

    Args:
        path: of it, see `spec_of`, as for `shape` and `layout`.
        shape: of the whole.
        sizes: devices of each axis of the mesh.
        layout: what the axes split.

    Raises:
        InputError: an axis of the mesh does not divide what it would split.
    """
    own = list(shape)
    for at, axis in enumerate(spec_of(path, shape, layout)):
        if axis is None:
            continue
        if shape[at] % sizes[axis]:
            raise InputError(
                f"the mesh's {axis}={sizes[axis]} does not divide the {shape[at]} "
                f"units of {path} {tuple(shape)}: take a size of {axis} that does, or 1"
            )
        own[at] //= sizes[axis]
    return tuple(own)


def shardings(tree: Any, mesh: Mesh, layout: Layout = DECODING) -> Any:
    """Where the parameters of a model, or of what holds models, go.

    Args:
        tree: arrays, or their shapes (`jax.eval_shape`); also an optimizer's state,
            whose moments have the paths of what they belong to.
        mesh: the devices.
        layout: what its axes split.

    Returns:
        the same tree of `NamedSharding`.

    Raises:
        InputError: an axis of the mesh does not divide what it would split.
    """

    def of(path: Any, leaf: Any) -> NamedSharding:
        name = jax.tree_util.keystr(path)
        shard_shape(name, leaf.shape, mesh.shape, layout)  # or it is refused
        return NamedSharding(mesh, spec_of(name, leaf.shape, layout))

    return jax.tree_util.tree_map_with_path(of, tree)


def check_heads(heads: int, sizes: Mapping[str, int], role: str = "target") -> None:
    """Refuses a mesh that would cut an attention head in two.

    Args:
        heads: of each attention.
        sizes: devices of each axis of the mesh.
        role: target or draft, for the message.

    Raises:
        InputError: its size of `model` does not divide the heads.
    """
    size = sizes[MODEL]
    if heads % size:
        fitting = [n for n in range(1, heads + 1) if heads % n == 0]
        raise InputError(
            f"the mesh's {MODEL}={size} does not divide the {heads} attention heads of "
            f"the {role}: take one of {', '.join(map(str, fitting))}"
        )


def place(tree: Tree, mesh: Mesh, layout: Layout = DECODING) -> Tree:
    """Puts parameters where they belong; see `shardings`, as for what is raised."""
    return _put(tree, shardings(tree, mesh, layout))


def place_rows(tree: Tree, mesh: Mesh) -> Tree:
    """Puts arrays whose first axis is rows where their rows belong.

    Args:
        tree: arrays of one number of rows.
        mesh: the devices.

    Raises:
        InputError: its size of `data` does not divide the rows: see `padded_rows`.
    """
    for leaf in jax.tree.leaves(tree):
        if leaf.shape[0] % mesh.shape[DATA]:
            raise InputError(
                f"the mesh's {DATA}={mesh.shape[DATA]} does not divide the "
                f"{leaf.shape[0]} rows: fill them up with rows of budget 0, to "
                f"{padded_rows(leaf.shape[0], mesh)}"
            )
    rows = NamedSharding(mesh, PartitionSpec(DATA))
    return _put(tree, jax.tree.map(lambda _: rows, tree))


def mesh_of(tree: Any) -> Mesh | None:
    """The mesh that arrays lie on; None: they lie on one device."""
    for leaf in jax.tree.leaves(tree):
        where = getattr(leaf, "sharding", None)
        if isinstance(where, NamedSharding):
            return where.mesh  # type: ignore[return-value]  # of real devices
    return None


def fetch(tree: Tree) -> Tree:
    """Brings what lies on devices of several processes to each of them, as it is.

    All processes must call it alike. Arrays that this process can read stay.
    """

    def one(leaf: Any) -> Any:
        if getattr(leaf, "is_fully_addressable", True):
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.tree.map(one, tree)


def padded_rows(rows: int, mesh: Mesh) -> int:
    """The least number of rows, at least `rows`, that a mesh splits evenly."""
    size = mesh.shape[DATA]
    return -(-rows // size) * size


def _put(tree: Tree, where: Any) -> Tree:
    return jax.tree.map(_put_one, tree, where)


def _put_one(leaf: Any, where: NamedSharding) -> jax.Array:
    if where.is_fully_addressable:
        return jax.device_put(leaf, where)
    # Other processes hold the rest; each has the whole here, and gives its own part.
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _put_one(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    own = np.asarray(leaf)
    return jax.make_array_from_callback(own.shape, where, own.__getitem__)
