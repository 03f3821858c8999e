"""Checkpoints written anew: the same logits, runs that go on, and what is refused."""

from __future__ import annotations

import errno
import shutil
import sys
from collections import namedtuple

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from experiments import convert
from specjax import sharding
from specjax.errors import InputError
from specjax.models import t5_weights
from specjax.models.formats import remote
from tests import foreign, pairs
from tests.t5_tensors import UNTIED, assert_holds, random_tensors

CONFIG = pairs.ROOT / "configs" / "convert.py"
SMALL_SHARDS = "--config.shard_gigabytes=4e-6"


def run(source, workdir, *settings: str) -> pairs.Run:
    return pairs.run(
        convert.main,
        workdir,
        f"--config={CONFIG}",
        f"--from={source}",
        f"--workdir={workdir}",
        *settings,
        define=convert._define,
    )


@pytest.fixture(scope="module")
def tensors():
    """Small enough that a T5 of them is no chaos."""
    return {name: 0.3 * x for name, x in random_tensors(UNTIED).items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory, tensors):
    """A checkpoint of PyTorch, and a tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "model"
    foreign.write_config(folder, UNTIED)
    foreign.write_stream(folder / "pytorch_model.bin", tensors)
    (folder / "spiece.model").write_text("pieces")
    return folder


def test_t5x_to_safetensors(tmp_path, tensors):
    foreign.write_t5x(tmp_path / "t5x", tensors, UNTIED, chunks=9, scanned=True)
    done = run(tmp_path / "t5x", tmp_path / "out", "--to=hf", SMALL_SHARDS)
    assert done.code == 0, done.err
    export = tmp_path / "out" / "export"
    assert "from T5X, stored as float32" in done.out
    assert_holds(t5_weights.load_t5(export), UNTIED, tensors)
    assert (export / "model.safetensors.index.json").is_file()
    names = {path.name for path in export.iterdir()}
    assert not any("partial" in name or "conversion" in name for name in names)
    logits = done.effective["logits"]
    assert logits["before"] == logits["rounded"] == logits["after"]
    assert logits["rounding"] == logits["difference"] == 0
    again = run(tmp_path / "t5x", tmp_path / "out")
    assert again.code == 2 and "is there already" in again.err


@pytest.mark.parametrize("to", convert.TARGETS)
def test_rounded_to_bfloat16(tmp_path, source, tensors, to):
    done = run(source, tmp_path, f"--to={to}", "--config.dtype=bfloat16")
    assert done.code == 0, done.err
    logits = done.effective["logits"]
    assert logits["before"] != logits["rounded"] == logits["after"]
    assert 0 < logits["rounding"] < 0.1 * logits["largest"]
    rounded = {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()}
    model = t5_weights.load_t5(tmp_path / "export", ml_dtypes.bfloat16)
    assert_holds(model, UNTIED, rounded, ml_dtypes.bfloat16)
    assert (tmp_path / "export" / "spiece.model").read_text() == "pieces"


def test_orbax_and_back(tmp_path, source, tensors):
    done = run(source, tmp_path / "orbax", "--to=orbax")
    assert done.code == 0, done.err
    folder = tmp_path / "orbax" / "export"
    assert_holds(t5_weights.load_t5(folder), UNTIED, tensors)
    before = t5_weights.fingerprint(folder)
    back = run(folder, tmp_path / "hf", "--to=hf")
    assert back.code == 0 and "from Orbax, stored as float32" in back.out
    assert_holds(t5_weights.load_t5(tmp_path / "hf" / "export"), UNTIED, tensors)
    assert back.effective["logits"]["after"] == done.effective["logits"]["before"]
    # One changed byte among the weights.
    data = max((folder / "0").rglob("*"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(bytes(content))
    with (
        pytest.warns(UserWarning, match="is changed"),
        pytest.raises(InputError, match="export cannot be loaded: no readable"),
    ):
        t5_weights.load_t5(folder)
    hashes = folder / "0" / "sha256.json"
    hashes.write_text(hashes.read_text() + " ")
    assert t5_weights.fingerprint(folder) != before


def test_what_was_written_is_compared(tmp_path, source, monkeypatch):
    """A weight that changes on its way is found, and nothing takes its final name."""
    honest = t5_weights.as_stored

    def slip(name, array, storage):
        return honest(name, array + 0.1 if name == "lm_head.weight" else array, storage)

    monkeypatch.setattr(t5_weights, "as_stored", slip)
    done = run(source, tmp_path)
    assert done.code == 2 and "away from those of" in done.err
    assert not (tmp_path / "export").exists()
    unseen = run(source, tmp_path / "unseen", "--config.check=")
    assert unseen.code == 0 and unseen.effective["logits"] is None


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("model-*")}


def stop_after(monkeypatch, files: int, error: BaseException):
    """The writer of shards fails after some, with half of the next one on the disk."""
    save, left = safetensors.numpy.save_file, iter(range(files))

    def save_file(arrays, path, **settings):
        if next(left, None) is None:
            path.write_bytes(b"half")
            raise error
        save(arrays, path, **settings)

    monkeypatch.setattr(safetensors.numpy, "save_file", save_file)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyboardInterrupt(), "interrupted: what was written stays"),
        (OSError(errno.ENOSPC, "No space left on device"), "is full: what is whole"),
        (
            safetensors.SafetensorError(
                "I/O error: No space left on device (os error 28)"
            ),
            "is full: what is whole",
        ),
    ],
)
def test_a_stopped_run_goes_on(tmp_path, source, tensors, error, message):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3, error)
        done = run(source, tmp_path, SMALL_SHARDS)
    assert done.code != 0 and message in done.err and len(done.err.splitlines()) == 1
    partial = tmp_path / "export.partial"
    before = times(partial)
    assert len(before) == 3 and not list(partial.glob(".*.partial"))
    with pytest.raises(InputError, match="has no config.json"):
        t5_weights.load_t5(partial)
    damaged = next(iter(before))
    (partial / damaged).write_bytes(b"short")
    done = run(source, tmp_path, SMALL_SHARDS)
    assert done.code == 0, done.err
    after = times(tmp_path / "export")
    kept = {name for name in before if after[name] == before[name]}
    assert kept == before.keys() - {damaged}
    assert_holds(t5_weights.load_t5(tmp_path / "export"), UNTIED, tensors)


def test_files_of_another_conversion_are_dropped(tmp_path, source):
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 3, KeyboardInterrupt())
        run(source, tmp_path, SMALL_SHARDS)
    before = times(tmp_path / "export.partial")
    done = run(source, tmp_path, SMALL_SHARDS, "--config.dtype=float16")
    assert done.code == 0, done.err
    after = times(tmp_path / "export")
    assert before and not any(after.get(name) == old for name, old in before.items())
    header = safetensors.safe_open(tmp_path / "export" / next(iter(after)), "numpy")
    assert header.get_tensor(next(iter(header.keys()))).dtype == np.float16


@pytest.mark.parametrize("to", convert.TARGETS)
def test_a_disk_without_room_is_refused_at_once(tmp_path, source, monkeypatch, to):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(9, 9, 10_000))
    done = run(source, tmp_path, f"--to={to}")
    assert done.code == 2 and "0.00 GB left" in done.err and "make room" in done.err
    assert not list((tmp_path / "export.partial").glob("*model*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--to=zarr"], "--to is 'zarr': it must be hf or orbax"),
        (["--config.dtype=int8"], "config.dtype is 'int8'"),
        (["--config.preset=t5-huge"], "config.preset: There is no T5 preset"),
        (["--config.preset=t5-small"], "lacks the tensors decoder.block.0"),
        (["--config.shard_gigabytes=0.0"], "must be positive"),
        (["--config.check=float16"], "config.check is 'float16'"),
        (["--to=orbax", "--config.dtype=float16"], "Orbax stores a model as it"),
        (
            ["--config.dtype=float16", "--config.check=bfloat16"],
            "coarser than float16",
        ),
        (["--from="], "--from is missing"),
        (["--from=nowhere"], "no such folder"),
        (["--from=nothing://a/b"], "nothing://a/b cannot be read"),
    ],
)
def test_bad_settings(tmp_path, source, settings, message):
    done = run(source, tmp_path, *settings)
    assert done.code == 2 and message in done.err
    assert not (tmp_path / "export").exists()


def test_a_url(tmp_path, source, tensors, monkeypatch):
    """fsspec's own files in memory stand for a bucket."""
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    for path in source.iterdir():
        store.pipe_file(f"/bucket/model/{path.name}", path.read_bytes())
    store.pipe_file("/bucket/model/flax_model.msgpack", b"not wanted")
    store.pipe_file("/bucket/model/README.md", b"not wanted")
    done = run("memory://bucket/model", tmp_path)
    assert done.code == 0, done.err
    assert_holds(t5_weights.load_t5(tmp_path / "export"), UNTIED, tensors)
    copied = tmp_path / "source"
    names = {"config.json", "pytorch_model.bin", "spiece.model"}
    assert {path.name for path in copied.iterdir()} == names

    # What is there in full is not copied again.
    before = (copied / "pytorch_model.bin").stat().st_mtime_ns
    (copied / "spiece.model").write_text("cut")
    remote.fetch("memory://bucket/model", copied)
    assert (copied / "spiece.model").read_text() == "pieces"
    assert (copied / "pytorch_model.bin").stat().st_mtime_ns == before

    with pytest.raises(
        InputError, match="elsewhere holds no checkpoint|cannot be read"
    ):
        remote.fetch("memory://bucket/elsewhere", tmp_path / "none")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(InputError, match="not installed: install .* extra remote"):
        remote.fetch("memory://bucket/model", copied)


def test_orbax_onto_a_mesh(tmp_path, source, tensors):
    """Each array is read to where it belongs; what is there is the model."""
    done = run(source, tmp_path, "--to=orbax", "--config.check=")
    assert done.code == 0, done.err
    mesh = sharding.make_mesh("data=8")
    layout = sharding.Layout(units=None, width=sharding.DATA)
    model = t5_weights.load_t5(
        tmp_path / "export", shardings=lambda own: sharding.shardings(own, mesh, layout)
    )
    assert_holds(model, UNTIED, tensors)
    parts = model.embedding[...].addressable_shards
    assert [part.data.shape for part in parts] == [(40, 2)] * 8
