"""Drafters with arrays of their own, as folders that know their target.

A folder holds ``drafter.json`` (kind, settings, whose target it was made for) and
``drafter.safetensors`` (its arrays by their place in the drafter).
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from specjax.drafters.base import StoredDrafter
from specjax.errors import InputError

DRAFTER_FILE = "drafter.json"
ARRAYS_FILE = "drafter.safetensors"
_FORMAT = 1

Kind = TypeVar("Kind")  # a class as `StoredDrafter` has it


def save_drafter(
    drafter: StoredDrafter,
    folder: str | os.PathLike[str],
    target_fingerprint: str,
    *,
    dtype: DTypeLike = jnp.float16,
    about: dict[str, Any] | None = None,
) -> None:
    """Writes a drafter; what stands in the folder is replaced when all is written.

    Args:
        drafter: of a kind that `load_drafter` is told.
        folder: made if it is absent.
        target_fingerprint: `t5_weights.fingerprint` of the target's folder.
        dtype: that floating arrays are stored as.
        about: of JSON's types, kept for readers, such as what training took.

    Raises:
        InputError: an array is not finite, or overflows `dtype`.
    """
    # Imported late: writing weights is the only use of safetensors.
    from safetensors.numpy import save_file

    folder = pathlib.Path(folder)
    arrays = {}
    for name, leaf in _named_leaves(drafter):
        array = np.asarray(leaf)
        if jnp.issubdtype(array.dtype, jnp.floating):
            with np.errstate(over="ignore"):  # told below, in words
                array = array.astype(dtype)
            if not np.isfinite(array.astype(np.float32)).all():
                raise InputError(
                    f"{name} of the drafter is not finite as {jnp.dtype(dtype)}: it "
                    "cannot be stored so"
                )
        # In one piece, and of its own shape: a single number would become a row.
        arrays[name] = np.ascontiguousarray(array).reshape(array.shape)
    fields = {
        "format": _FORMAT,
        "kind": drafter.kind,
        "settings": drafter.settings(),
        "target": target_fingerprint,
        "about": about or {},
    }
    folder.mkdir(parents=True, exist_ok=True)
    arrays_file, header = folder / f"{ARRAYS_FILE}.new", folder / f"{DRAFTER_FILE}.new"
    save_file(arrays, arrays_file)
    header.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    arrays_file.replace(folder / ARRAYS_FILE)
    header.replace(folder / DRAFTER_FILE)


def read_header(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """What a drafter's folder says of itself: kind, settings, target, about.

    Raises:
        InputError: no drafter is there, or its header cannot be read.
    """
    path = pathlib.Path(folder) / DRAFTER_FILE
    if not path.is_file():
        raise InputError(f"{folder} has no {DRAFTER_FILE}: no drafter is kept there")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        known = {"kind": str, "settings": dict, "target": str, "about": dict}
        if fields["format"] != _FORMAT:
            raise ValueError(f"format {fields['format']} instead of {_FORMAT}")
        for name, kind in known.items():
            if not isinstance(fields[name], kind):
                raise ValueError(f"{name} is no {kind.__name__}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is damaged ({error!r})") from error
    return {name: fields[name] for name in known}


def load_drafter(
    kind: type[Kind],
    folder: str | os.PathLike[str],
    target: Any,
    target_fingerprint: str,
    dtype: DTypeLike | None = None,
) -> Kind:
    """Reads a drafter; every array of it comes from the file.

    Args:
        kind: its class.
        folder: see `save_drafter`.
        target: the model that it drafts for.
        target_fingerprint: of the folder that the target was read from.
        dtype: of floating arrays; None: the target's.

    Raises:
        InputError: the folder is damaged or of another kind, was made for another
            target, or an array is missing, unknown, mis-shaped or not finite.
    """
    import safetensors

    header, own = read_header(folder), cast(type[StoredDrafter], kind)
    if header["kind"] != own.kind:
        raise InputError(
            f"{folder} holds a drafter of the kind {header['kind']!r}, not {own.kind!r}"
        )
    if header["target"] != target_fingerprint:
        raise InputError(
            f"{folder} was made for another target (fingerprint "
            f"{header['target'][:12]}, this target's is {target_fingerprint[:12]}): "
            "its weights or its vocabulary are not this one's; train it anew"
        )
    dtype = jnp.dtype(target.dtype if dtype is None else dtype)
    shape = jax.eval_shape(
        lambda: own.create(target, header["settings"], jax.random.key(0))
    )
    path = pathlib.Path(folder) / ARRAYS_FILE
    try:
        with safetensors.safe_open(path, framework="numpy") as file:
            stored = {name: file.get_tensor(name) for name in file.keys()}
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is cut short or absent ({error})") from error
    wanted = dict(_named_leaves(shape))
    for what, names in (
        ("lacks", wanted.keys() - stored.keys()),
        ("has no place for", stored.keys() - wanted.keys()),
    ):
        if names:
            raise InputError(f"{path} {what} {', '.join(sorted(names)[:3])}")
    leaves = []
    for name, leaf in wanted.items():
        array = stored[name]
        if array.shape != leaf.shape:
            raise InputError(
                f"{name} in {path} has shape {array.shape}: its settings ask for "
                f"{leaf.shape}"
            )
        floating = jnp.issubdtype(leaf.dtype, jnp.floating)
        if floating and not np.isfinite(array.astype(np.float32)).all():
            raise InputError(f"{name} in {path} is not finite")
        leaves.append(jnp.asarray(array, dtype if floating else leaf.dtype))
    return cast(Kind, jax.tree.unflatten(jax.tree.structure(shape), leaves))


def _named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Arrays of a pytree with the path to each, joined by dots."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    # A parameter's own field says nothing.
    return [
        (".".join(map(_name, path)).removesuffix(".value"), leaf)
        for path, leaf in leaves
    ]


def _name(key: Any) -> str:
    for attribute in ("name", "key", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    raise TypeError(f"a pytree key of no known form: {key!r}")
