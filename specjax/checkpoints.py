"""Checkpoints of a run: arrays by path, settings as JSON; whole or not at all.

A checkpoint appears under its final name only once it is complete, so that a run killed
at any moment finds the one before. Only arrays and plain settings are known here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import pathlib
import warnings
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from specjax import errors

PyTree = Any

_HASHES = "sha256.json"


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


def _manager(
    directory: str | pathlib.Path, keep: int | None, create: bool
) -> ocp.CheckpointManager:
    # Orbax wants an absolute path; people give relative ones. It also logs each move.
    logging.getLogger("absl").setLevel(logging.WARNING)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, create=create, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(
        pathlib.Path(directory).expanduser().resolve(),
        options=options,
        item_handlers={
            "state": ocp.StandardCheckpointHandler(),
            "config": ocp.JsonCheckpointHandler(),
        },
    )


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
    *,
    keep: int = 3,
) -> None:
    """Writes checkpoint `step`, then drops all but the newest `keep`.

    Args:
        directory: of the run's checkpoints; made if absent; may be relative.
        step: number of the checkpoint, above those already there.
        state: a pytree of arrays.
        config: settings, as JSON values.
        keep: how many checkpoints stay.
    """
    with _manager(directory, keep, create=True) as manager:
        saved = manager.save(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardSave(to_pure_dict(state)),
                config=ocp.args.JsonSave(config),
            ),
        )
    if not saved:
        raise errors.InputError(
            f"checkpoint {step} in {directory} was not written: there is one of this "
            "step or a later one"
        )
    folder = pathlib.Path(directory) / str(step)
    hashes = json.dumps(_hashes(folder), indent=2)
    partial = folder / f"{_HASHES}.partial"
    partial.write_text(hashes + "\n", encoding="utf-8")
    partial.rename(folder / _HASHES)


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
    if not path.is_file():
        # Killed between the checkpoint and its hashes: complete all the same.
        return
    expected, found = json.loads(path.read_text(encoding="utf-8")), _hashes(folder)
    for name, digest in expected.items():
        if found.get(name) != digest:
            state = "changed" if name in found else "absent"
            raise ValueError(f"its file {name} is {state}")


def steps(directory: str | pathlib.Path) -> list[int]:
    """Numbers of the complete checkpoints, oldest first; none if there is no folder."""
    if not pathlib.Path(directory).is_dir():
        return []
    with _manager(directory, None, create=False) as manager:
        return sorted(manager.all_steps())


def restore(
    directory: str | pathlib.Path, like: PyTree, *, step: int | None = None
) -> Restored | None:
    """Reads the newest checkpoint that can be read.

    Args:
        directory: of the run's checkpoints; may be relative.
        like: a pytree of the wanted structure, shapes and types.
        step: this one and no other; None: the newest, or the one before where the
            newest is damaged, with a warning that says so.

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
    with _manager(directory, None, create=False) as manager:
        for number in wanted:
            try:
                _check_files(pathlib.Path(directory) / str(number))
                pure, config = _read(manager, number)
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
            state = from_pure_dict(like, pure)
            return Restored(number, state, config, tuple(skipped))
    raise errors.InputError(
        f"no readable checkpoint in {directory}: tried steps {wanted}, found {found}"
    )


def _read(
    manager: ocp.CheckpointManager, step: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    # As saved, not as wanted: a mismatch is then told apart from damage, and named.
    saved = manager.item_metadata(step)["state"]
    if saved is None:
        raise ValueError("it holds no state")
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]),
        ),
        getattr(saved, "tree", saved),
    )
    restored = manager.restore(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), config=ocp.args.JsonRestore()
        ),
    )
    return restored["state"], restored["config"]
