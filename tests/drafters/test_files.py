"""Drafters' folders: what is written is what is read, and what is wrong is named."""

from __future__ import annotations

import json
import types
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct

from specjax.drafters import files
from specjax.errors import InputError

TARGET = "f" * 64


class Part(nnx.Module):
    def __init__(self, width: int, key: jax.Array):
        self.weight = nnx.Param(jax.random.normal(key, (width, 2)))


@struct.dataclass
class Scored:
    """A record with a module, an array of whole numbers and a static setting."""

    part: Part
    counts: jax.Array
    width: int = struct.field(pytree_node=False)

    kind: ClassVar[str] = "scored"

    @classmethod
    def create(cls, target: Any, settings: dict[str, Any], key: jax.Array) -> Scored:
        width = settings["width"]
        return cls(Part(width, key), jnp.arange(width), width)

    def settings(self) -> dict[str, Any]:
        return {"width": self.width}


@pytest.fixture
def folder(tmp_path):
    made = Scored.create(None, {"width": 3}, jax.random.key(1))
    files.save_drafter(made, tmp_path / "own", TARGET, about={"minutes": 2})
    return tmp_path / "own"


def load(folder, kind=Scored, fingerprint=TARGET):
    target = types.SimpleNamespace(dtype=jnp.dtype(jnp.float32))
    return files.load_drafter(kind, folder, target, fingerprint)


def test_what_is_written_is_read(folder):
    read = load(folder)
    made = Scored.create(None, {"width": 3}, jax.random.key(1))
    assert jax.tree.structure(read) == jax.tree.structure(made)
    np.testing.assert_array_equal(read.counts, made.counts)
    weight = made.part.weight[...]
    assert read.part.weight[...].dtype == jnp.float32
    np.testing.assert_array_equal(
        read.part.weight[...], weight.astype(jnp.float16).astype(jnp.float32)
    )
    assert files.read_header(folder)["about"] == {"minutes": 2}


def test_another_target_is_refused(folder):
    with pytest.raises(InputError, match="made for another target.*train it anew"):
        load(folder, fingerprint="0" * 64)


def test_another_kind_is_refused(folder):
    class Other(Scored):
        kind = "other"

    with pytest.raises(InputError, match="kind 'scored', not 'other'"):
        load(folder, kind=Other)


def test_damage_is_named(folder, tmp_path):
    with pytest.raises(InputError, match="no drafter is kept there"):
        load(tmp_path)
    arrays = folder / files.ARRAYS_FILE
    whole = arrays.read_bytes()
    arrays.write_bytes(whole[:-8])
    with pytest.raises(InputError, match="cut short"):
        load(folder)
    arrays.write_bytes(whole)
    header = folder / files.DRAFTER_FILE
    text = header.read_text()
    for broken in (text[:20], "[]", json.dumps(json.loads(text) | {"format": 9})):
        header.write_text(broken)
        with pytest.raises(InputError, match="drafter.json is damaged"):
            load(folder)
    header.write_text(text.replace('"width": 3', '"width": 4'))
    with pytest.raises(InputError, match=r"shape \(3,.*ask for \(4,"):
        load(folder)


def test_names_of_arrays_must_agree(folder):
    from safetensors.numpy import load_file, save_file

    arrays = load_file(folder / files.ARRAYS_FILE)
    assert set(arrays) == {"part.weight", "counts"}
    save_file({"counts": arrays["counts"]}, folder / files.ARRAYS_FILE)
    with pytest.raises(InputError, match="lacks part.weight"):
        load(folder)
    save_file(arrays | {"more": arrays["counts"]}, folder / files.ARRAYS_FILE)
    with pytest.raises(InputError, match="no place for more"):
        load(folder)


def test_what_is_not_finite_is_not_written(tmp_path):
    made = Scored.create(None, {"width": 3}, jax.random.key(1))
    made.part.weight[...] = made.part.weight[...] * 1e6
    with pytest.raises(InputError, match="part.weight.*not finite as float16"):
        files.save_drafter(made, tmp_path, TARGET)
    assert list(tmp_path.iterdir()) == []
