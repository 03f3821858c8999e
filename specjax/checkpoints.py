"""Checkpoints of a run: arrays by path, settings as JSON; whole or not at all.

A checkpoint appears under its final name only once it is complete, hashes of its files
included, so that a run killed at any moment finds the one before. Only arrays and plain
settings are known here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import pathlib
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from specjax import errors

PyTree = Any

_HASHES = "sha256.json"
_METRICS = "metrics.json"
_CONFIG = "config.json"
# Ends the name of what is being written or dropped, and of what could not be read.
_PARTIAL, _DAMAGED = ".partial", ".damaged"


@dataclasses.dataclass(frozen=True)
class Best:
    """What makes a checkpoint the best: a metric that was saved with it.

    Attributes:
        metric: its name.
        largest: whether more of it is better.
    """

    metric: str
    largest: bool


@dataclasses.dataclass(frozen=True)
class Restored:
    """A checkpoint that was read.

    Attributes:
        step: its number.
        state: a tree like the one asked for.
        config: the settings that were saved beside it.
        skipped: newer steps that could not be read.
    """

    step: int
    state: PyTree
    config: dict[str, Any]
    skipped: tuple[int, ...] = ()


def _orbax() -> ocp.Checkpointer:
    # Orbax logs each of its moves.
    logging.getLogger("absl").setLevel(logging.WARNING)
    return ocp.Checkpointer(ocp.StandardCheckpointHandler())


def _root(directory: str | pathlib.Path) -> pathlib.Path:
    # Orbax wants an absolute path; people give relative ones.
    return pathlib.Path(directory).expanduser().resolve()


def _path(path: tuple[Any, ...]) -> tuple[str, ...]:
    names = [jax.tree_util.keystr((key,), simple=True) for key in path]
    # The box around a parameter is not part of its name.
    return tuple(name for name in names if name not in ("value", "raw_value"))


def to_pure_dict(state: PyTree) -> dict[str, Any]:
    """A nested dict of plain arrays for any pytree, typed random keys as their bits.

    Args:
        state: a pytree of arrays: records, tuples, modules.

    Returns:
        Dicts keyed by the fields, indices and attributes on the way to each leaf.
    """
    pure: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        *parents, name = _path(path)
        node = pure
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = _bits(leaf)
    return pure


def from_pure_dict(like: PyTree, pure: dict[str, Any]) -> PyTree:
    """The inverse of `to_pure_dict`.

    Args:
        like: a pytree of the wanted structure, shapes and types.
        pure: from `to_pure_dict`.

    Returns:
        A pytree like `like` with the leaves of `pure`.

    Raises:
        errors.InputError: a leaf is absent, left over, or of another shape.
    """
    expected, found = _flat(to_pure_dict(like)), _flat(pure)
    _check_same(
        {name: np.shape(leaf) for name, leaf in expected.items()},
        {name: np.shape(leaf) for name, leaf in found.items()},
    )

    def leaf(path: tuple[Any, ...], old: Any) -> Any:
        new = found["/".join(_path(path))]
        if _is_key(old):
            return jax.random.wrap_key_data(
                jax.numpy.asarray(new), impl=jax.random.key_impl(old)
            )
        return jax.numpy.asarray(new, old.dtype)

    return jax.tree_util.tree_map_with_path(leaf, like)


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jax.dtypes.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )


def _bits(leaf: Any) -> Any:
    return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _flat(pure: dict[str, Any]) -> dict[str, Any]:
    return {
        "/".join(_path(path)): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(pure)
    }


def _check_same(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]]
) -> None:
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            raise errors.InputError(f"the checkpoint lacks {name}, which this run has")
        if name not in expected:
            raise errors.InputError(f"the checkpoint holds {name}, unknown to this run")
        if tuple(expected[name]) != tuple(found[name]):
            raise errors.InputError(
                f"the checkpoint's {name} has shape {tuple(found[name])}, this run"
                f" needs {tuple(expected[name])}"
            )


def save(
    directory: str | pathlib.Path,
    step: int,
    state: PyTree,
    config: dict[str, Any],
    metrics: Mapping[str, float] | None = None,
    *,
    keep: int = 3,
    best: Best | None = None,
) -> None:
    """Writes checkpoint `step`, then drops all but the newest `keep` and the best.

    Args:
        directory: of the run's checkpoints; made if absent; may be relative.
        step: number of the checkpoint, above those already there.
        state: a pytree of arrays.
        config: settings, as JSON values.
        metrics: what was measured of this state, if anything.
        keep: how many of the newest checkpoints stay, >= 1.
        best: by which metric one more stays; None: none does.

    Raises:
        errors.InputError: there is a checkpoint of this step or a later one.
        OSError: the disk is full, or the like. Nothing of the checkpoint is left then,
            and the earlier ones stay. A full disk may show as another error too.
    """
    _save(_root(directory), step, _on_host(state), config, metrics or {}, keep, best)


def save_in_background(
    directory: str | pathlib.Path,
    step: int,
    state: PyTree,
    config: dict[str, Any],
    metrics: Mapping[str, float] | None = None,
    *,
    keep: int = 3,
    best: Best | None = None,
) -> futures.Future[None]:
    """`save`, which goes on after the return: only the copy to the host is waited for.

    The copy is made here and in full, so that the state's buffers can be donated to the
    next step at once. Wait for one save before the next is begun.

    Args:
        directory: see `save`, as for the other arguments.

    Returns:
        Done when the checkpoint stands; its `exception()` is what `save` would raise.
    """
    copied = _on_host(state)
    pool = futures.ThreadPoolExecutor(1, "checkpoint")
    root, metrics = _root(directory), dict(metrics or {})
    writing = pool.submit(_save, root, step, copied, config, metrics, keep, best)
    pool.shutdown(wait=False)
    return writing


def _on_host(state: PyTree) -> dict[str, Any]:
    # On a CPU `device_get` may hand out the device's own memory: `np.array` copies it.
    return jax.tree.map(np.array, jax.device_get(to_pure_dict(state)))


def _save(
    root: pathlib.Path,
    step: int,
    pure: dict[str, Any],
    config: dict[str, Any],
    metrics: Mapping[str, float],
    keep: int,
    best: Best | None,
) -> None:
    if max(steps(root), default=-1) >= step:
        raise errors.InputError(
            f"checkpoint {step} in {root} was not written: there is one of this "
            "step or a later one"
        )
    _remove_partial(root)
    partial = root / f"{step}{_PARTIAL}"
    try:
        partial.mkdir(parents=True)
        with _orbax() as checkpointer:
            checkpointer.save(partial / "state", args=ocp.args.StandardSave(pure))
        _write_json(partial / _CONFIG, config)
        _write_json(partial / _METRICS, dict(metrics))
        _write_json(partial / _HASHES, _hashes(partial))
        partial.rename(root / str(step))
    except BaseException:
        _remove_partial(root)
        raise
    kept = {*steps(root)[-keep:], None if best is None else best_step(root, best)}
    for number in set(steps(root)) - kept:
        # First by its name, at a stroke: half of a checkpoint is none.
        (root / str(number)).rename(root / f"{number}{_PARTIAL}")
    _remove_partial(root)


def _remove_partial(root: pathlib.Path) -> None:
    """Removes what a killed or failed save has left."""
    for path in root.glob(f"*{_PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _write_json(path: pathlib.Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _hashes(folder: pathlib.Path) -> dict[str, str]:
    """SHA-256 of each file of a checkpoint but the list of them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.startswith(_HASHES):
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def _check_files(folder: pathlib.Path) -> None:
    """Raises ValueError if a file has changed since it was written.

    Without this, damage inside an array goes unseen, and damage elsewhere shows as
    pages of messages from the threads of the reader.
    """
    path = folder / _HASHES
    expected, found = json.loads(path.read_text(encoding="utf-8")), _hashes(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            state = "changed" if name in found else "absent"
            raise ValueError(f"its file {name} is {state}")


def steps(directory: str | pathlib.Path) -> list[int]:
    """Numbers of the complete checkpoints, oldest first; none if there is no folder."""
    root = _root(directory)
    found = root.iterdir() if root.is_dir() else ()
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def best_step(directory: str | pathlib.Path, best: Best) -> int | None:
    """The checkpoint with the best metric, the newest of equals; None if none has it.

    Args:
        directory: of the run's checkpoints; may be relative.
        best: by which metric.
    """
    sign = 1 if best.largest else -1
    scored = []
    for number in steps(directory):
        path = _root(directory) / str(number) / _METRICS
        try:
            value = float(json.loads(path.read_text(encoding="utf-8"))[best.metric])
        except (OSError, ValueError, KeyError, TypeError):
            continue  # saved between two evaluations, or damaged
        if math.isfinite(value):
            scored.append((sign * value, number))
    return max(scored)[1] if scored else None


def set_aside(directory: str | pathlib.Path, numbers: Iterable[int]) -> None:
    """Renames checkpoints that cannot be read, so that their steps are free again.

    Args:
        directory: of the run's checkpoints; may be relative.
        numbers: of the checkpoints, as in `Restored.skipped`; each becomes
            `NUMBER.damaged`, in the place of an earlier one of that name.
    """
    for number in numbers:
        new = _root(directory) / f"{number}{_DAMAGED}"
        shutil.rmtree(new, ignore_errors=True)
        (_root(directory) / str(number)).rename(new)


def restore(
    directory: str | pathlib.Path,
    like: PyTree,
    *,
    step: int | None = None,
    check: Callable[[dict[str, Any]], None] = lambda config: None,
) -> Restored | None:
    """Reads the newest checkpoint that can be read.

    Each array is read straight to where that of `like` lies, on whatever mesh: it need
    not be the one that it was saved from.

    Args:
        directory: of the run's checkpoints; may be relative.
        like: a pytree of the wanted structure, shapes, types and places.
        step: this one and no other; None: the newest, or the one before where the
            newest is damaged, with a warning that says so.
        check: called with the settings saved beside it, before its arrays are compared
            with `like`: it may say in the user's words what makes them differ.

    Returns:
        The checkpoint; None where the folder holds none.

    Raises:
        errors.InputError: none of the checkpoints can be read, or the one asked for
            cannot, or it is of a model or an optimizer of another shape.
    """
    found = steps(directory)
    wanted = found[::-1] if step is None else [step]
    if not wanted:
        return None
    skipped: list[int] = []
    places = {name: _place(leaf) for name, leaf in _flat(to_pure_dict(like)).items()}
    with _orbax() as checkpointer:
        for number in wanted:
            try:
                folder = _root(directory) / str(number)
                _check_files(folder)
                pure, config = _read(checkpointer, folder, places)
            # Damage shows as whatever the layer below trips over: of any type.
            except Exception as error:
                skipped.append(number)
                reason = str(error).strip().splitlines() or [type(error).__name__]
                warnings.warn(
                    f"checkpoint {number} in {directory} cannot be read"
                    f" ({reason[0][:200]})",
                    stacklevel=2,
                )
                continue
            check(config)
            state = from_pure_dict(like, pure)
            return Restored(number, state, config, tuple(skipped))
    raise errors.InputError(
        f"no readable checkpoint in {directory}: tried steps {wanted}, found {found}"
    )


def _place(leaf: Any) -> jax.sharding.NamedSharding | None:
    """The part of a mesh where an array lies; None: on one device."""
    where = getattr(leaf, "sharding", None)
    return where if isinstance(where, jax.sharding.NamedSharding) else None


def _read(
    checkpointer: ocp.Checkpointer,
    folder: pathlib.Path,
    places: Mapping[str, jax.sharding.NamedSharding | None],
) -> tuple[dict[str, Any], dict[str, Any]]:
    # As saved, not as wanted: a mismatch is then told apart from damage, and named.
    saved = checkpointer.metadata(folder / "state").item_metadata
    if saved is None:
        raise ValueError("it holds no state")
    first = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def wanted(path: tuple[Any, ...], leaf: Any) -> jax.ShapeDtypeStruct:
        where = places.get("/".join(_path(path))) or first
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

    tree = getattr(saved, "tree", saved)
    abstract = jax.tree_util.tree_map_with_path(wanted, tree)
    state = checkpointer.restore(
        folder / "state", args=ocp.args.StandardRestore(abstract)
    )
    config = folder / _CONFIG
    if not config.is_file():
        config = folder / "config" / "metadata"  # where it was once
    return state, json.loads(config.read_text(encoding="utf-8"))
