"""From settings to devices: the mesh of a run, and the processes that share it."""

from __future__ import annotations

import contextlib
import operator
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import ml_collections
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import errors, sharding
from specjax.models.t5 import T5
from specjax.models.t5_weights import load_t5

AUTO = "auto"


@contextlib.contextmanager
def entered(config: ml_collections.ConfigDict, *rows: str) -> Iterator[Mesh | None]:
    """The mesh of ``config.mesh``, on all devices of all processes; None: one device.

    Enter it before anything asks jax for devices. Where ``config`` has `distributed`,
    the processes join here first. One that sees another end says so and ends at once,
    with exit code 1: what is left of a collective cannot be unwound.

    Args:
        config: has `mesh`, and `distributed` where processes may share a run.
        *rows: settings that are numbers of rows, which the mesh must divide.

    Raises:
        InputError: no such mesh, rows that it does not divide, settings that do not go
            together, or processes that do not come together in time.
    """
    several = _join(config)
    mesh = None
    if config.mesh:
        mesh = sharding.make_mesh(config.mesh)
        for name in rows:
            count = operator.attrgetter(name)(config)
            if count != sharding.padded_rows(count, mesh):
                raise errors.InputError(
                    f"config.{name} is {count} and the mesh's {sharding.DATA} is "
                    f"{mesh.shape[sharding.DATA]}: a multiple of it, such as "
                    f"{sharding.padded_rows(count, mesh)}"
                )
    elif several:
        raise errors.InputError(
            f"config.mesh is empty and {jax.process_count()} processes share the work: "
            f"name a mesh of all {jax.device_count()} devices, such as "
            f"data={jax.device_count()}"
        )
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        if not several:
            yield mesh
            return
        try:
            yield mesh
        except jax.errors.JaxRuntimeError as error:
            print(
                "error: another process has ended, or cannot be reached: what was "
                "written stays, and the same command in all processes goes on with it "
                f"({str(error).splitlines()[0]})",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)  # leaving in order would wait for the other


def load(
    folder: pathlib.Path,
    dtype: DTypeLike,
    mesh: Mesh | None,
    role: str,
    split: bool = True,
) -> T5:
    """Reads a model straight to where its parameters belong.

    Args:
        folder: of the model.
        dtype: of its parameters.
        mesh: of the run; None: to one device.
        role: target or draft, for messages.
        split: over the mesh's `model` axis; else each device has all of them.

    Raises:
        InputError: as `load_t5`, or the mesh does not divide the model.
    """

    def where(model: T5) -> Any:
        assert mesh is not None
        if split:
            sharding.check_heads(model.config.num_heads, mesh.shape, role)
        return sharding.shardings(model, mesh, layout(split))

    return load_t5(folder, dtype, shardings=where if mesh is not None else None)


def splits_draft(config: ml_collections.ConfigDict, mesh: Mesh | None) -> bool:
    """Whether the draft is split as its target is; a config may leave that out.

    Raises:
        InputError: ``config.draft.split`` is on, and there is no mesh.
    """
    split = bool(config.draft.get("split"))
    if split and mesh is None:
        raise errors.InputError(
            "config.draft.split is on and there is no mesh to split the draft over: "
            "set config.mesh, where the command has it, or leave it out"
        )
    return split


def layout(split: bool) -> sharding.Layout:
    """Of a model that decodes."""
    return sharding.DECODING if split else sharding.REPLICATED


def is_first() -> bool:
    """Whether this process is the one that writes files and shows progress."""
    return jax.process_index() == 0


def first_says(ask: Callable[[], int]) -> int:
    """What the first process finds, told to all: only its files count.

    Args:
        ask: looks it up; a number from 0 to below 2**31.

    Raises:
        InputError: as `ask` does, in the first; in the others, that it did.
    """
    refused: errors.InputError | None = None
    found = 0
    if is_first():
        try:
            found = ask()
        except errors.InputError as error:
            found, refused = -1, error
    if jax.process_count() > 1:
        found = int(multihost_utils.broadcast_one_to_all(np.int32(found)))
    if refused is not None:
        raise refused
    if found < 0:
        raise errors.InputError("the first process has refused: its message says why")
    return found


def _join(config: ml_collections.ConfigDict) -> bool:
    """Whether several processes share the run, which have come together by now."""
    own = config.get("distributed")
    if own is None:
        return False
    if not own.coordinator:
        if own.processes or own.process is not None:
            raise errors.InputError(
                "config.distributed.coordinator is empty: the address of the first "
                "process, such as 10.0.0.1:1234, or auto where jax finds the others"
            )
        return False
    arguments: dict[str, Any] = {}
    if own.coordinator != AUTO:
        if own.processes < 1 or own.process is None:
            raise errors.InputError(
                "config.distributed needs its processes, how many there are, and its "
                "process, which of them this is, from 0; or coordinator=auto"
            )
        if not 0 <= own.process < own.processes:
            raise errors.InputError(
                f"config.distributed.process is {own.process} and there are "
                f"{own.processes}: 0 to {own.processes - 1}"
            )
        arguments = dict(
            coordinator_address=own.coordinator,
            num_processes=own.processes,
            process_id=own.process,
        )
    late = (
        f"the processes did not come together within {own.timeout} s, which is "
        "config.distributed.timeout: start all of them, with one coordinator, that "
        "each can reach"
    )

    def give_up() -> None:
        print(f"error: {late}", file=sys.stderr, flush=True)
        os._exit(2)

    # When jax's own time is up it aborts, with a page of C++ and a core.
    clock = threading.Timer(own.timeout, give_up)
    clock.start()
    try:
        jax.distributed.initialize(
            **arguments,
            initialization_timeout=2 * own.timeout,
            heartbeat_timeout_seconds=own.timeout,
        )
    except (RuntimeError, ValueError) as error:
        raise errors.InputError(f"{late} ({str(error).splitlines()[0]})") from error
    finally:
        clock.cancel()
    return jax.process_count() > 1
