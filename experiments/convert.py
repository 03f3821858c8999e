"""Writes a T5 checkpoint of any format anew, and compares the logits.

    python -m experiments.convert --config=configs/convert.py \
        --from=DIR --to=hf --workdir=OUT

Writes OUT/export, a folder for ``config.target.checkpoint``, tokenizer included, and
OUT/manifest.json. A run that was killed goes on if it is started again: shards that are
whole stay in OUT/export.partial, which becomes OUT/export at the end.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import logging
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from absl import flags
from flax import nnx

from configs import convert
from experiments import build, command, train_settings
from specjax import errors
from specjax.data import tokenizer as tokenizers
from specjax.models import t5_convert, t5_weights
from specjax.models.formats import orbax_folder, remote
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config

TARGETS = ("hf", "orbax")
# Types to compute the logits in; none is not to.
CHECKS = {"": None, "float32": jnp.float32, "bfloat16": jnp.bfloat16}
EXPORT, PARTIAL = "export", "export.partial"
_RECORD = "conversion.json"  # whose the files in PARTIAL are
_SOURCE = "source"  # what was copied from a URL
_ALMOST_FULL = 1 << 24  # bytes of a disk that had no room for a file
# Of sums in another order; the weights are the same to the last bit.
_TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Job:
    """What is asked for.

    Attributes:
        folder: of the source.
        to: one of `TARGETS`.
        config: the model's shape.
        dtype: type to store the weights in.
        max_shard_bytes: of a file.
        check: type to compute logits in; None: they are not compared.
        workdir: receives all files.
    """

    folder: pathlib.Path
    to: str
    config: T5Config
    dtype: np.dtype
    max_shard_bytes: int
    check: Any
    workdir: pathlib.Path

    @property
    def partial(self) -> pathlib.Path:
        """Where files stand until all are whole."""
        return self.workdir / PARTIAL

    def record(self) -> dict[str, Any]:
        """What must be the same for files of an earlier run to be this one's."""
        source = [
            [path.relative_to(self.folder).as_posix(), own.st_size, own.st_mtime_ns]
            for path in t5_weights.files_of(self.folder)
            for own in [path.stat()]
        ]
        return {
            "source": source,
            "to": self.to,
            "dtype": self.dtype.name,
            "max_shard_bytes": self.max_shard_bytes,
            "config": self.config.to_json(),
        }


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    build.check_settings(config, convert.get_config())
    to, check, shape = _settings(config, values)
    if (workdir / EXPORT).exists():
        raise errors.InputError(
            f"{workdir / EXPORT} is there already: name another --workdir, or remove it"
        )
    folder = _source(values["from"].value or config.source, workdir)
    checkpoint = t5_weights.open_t5(folder, shape)
    dtype = np.dtype(
        train_settings.STORED[config.dtype]
        if config.dtype
        else t5_convert.stored_type(checkpoint)
    )
    _check_types(to, dtype, check)
    max_shard_bytes = int(config.shard_gigabytes * 1e9)
    job = Job(folder, to, checkpoint.config, dtype, max_shard_bytes, check, workdir)
    _begin(job)
    with _told_of_a_full_disk(job):
        if to == "hf":
            _write_hf(job, checkpoint)
        else:
            _write_orbax(job)
        for name in tokenizers.FILES:
            if (folder / name).is_file():
                shutil.copy(folder / name, job.partial)
    logits = _compare(job)
    command.write_json(
        workdir / "manifest.json",
        command.manifest(
            config,
            source=str(folder),
            format=checkpoint.format,
            dtype=dtype.name,
            logits=logits,
        ),
    )
    job.partial.rename(workdir / EXPORT)
    (workdir / EXPORT / _RECORD).unlink()
    print(f"{workdir / EXPORT}: from {checkpoint.format}, stored as {dtype.name}")


def _settings(
    config: ml_collections.ConfigDict, values: flags.FlagValues
) -> tuple[str, Any, T5Config | None]:
    to = values["to"].value or config.to
    if to not in TARGETS:
        raise errors.InputError(f"--to is {to!r}: it must be {' or '.join(TARGETS)}")
    if config.dtype:
        build.named(train_settings.STORED, config.dtype, "dtype")
    if not config.shard_gigabytes > 0:
        raise errors.InputError(
            f"config.shard_gigabytes is {config.shard_gigabytes}: it must be positive"
        )
    check = build.named(CHECKS, config.check, "check")
    try:
        shape = T5Config.preset(config.preset) if config.preset else None
    except errors.InputError as error:
        raise errors.InputError(f"config.preset: {error}") from error
    return to, check, shape


def _source(name: str, workdir: pathlib.Path) -> pathlib.Path:
    """The source's folder; that of a URL is copied first."""
    if not name:
        raise errors.InputError("--from is missing: name a checkpoint's folder")
    if not remote.is_remote(name):
        return build.checkpoint_folder(name, "source")
    with _bar("copying") as advance:
        remote.fetch(name, workdir / _SOURCE, advance)
    return workdir / _SOURCE


def _check_types(to: str, dtype: np.dtype, check: Any) -> None:
    if dtype == np.float16 and to == "orbax":
        raise errors.InputError(
            "config.dtype is float16: Orbax stores a model as it computes, and T5 does "
            "not compute in float16; use bfloat16 or float32"
        )
    if dtype == np.float16 and check == jnp.bfloat16:
        raise errors.InputError(
            "config.check is bfloat16, which is coarser than float16, as which the "
            "weights are stored: use float32"
        )


def _begin(job: Job) -> None:
    """Makes the folder of unfinished files, without those of another conversion."""
    path, record = job.partial / _RECORD, job.record()
    try:
        same = json.loads(path.read_text(encoding="utf-8")) == record
    except (OSError, ValueError):
        same = False
    if not same and job.partial.exists():
        shutil.rmtree(job.partial)
    job.partial.mkdir(parents=True, exist_ok=True)
    command.write_json(path, record)


def _write_hf(job: Job, checkpoint: t5_weights.Checkpoint) -> None:
    tensors = t5_convert.readable(checkpoint)
    shards, sizes = t5_convert.plan(tensors, job.dtype, job.max_shard_bytes)
    missing = sum(
        sizes[name]
        for file, names in shards.items()
        if not t5_convert.is_whole(job.partial / file, names)
        for name in names
    )
    _check_room(job, missing)
    done, total = 0, sum(sizes.values())
    with _bar("writing") as advance:

        def more(size: int) -> None:
            nonlocal done
            done += size
            advance(done, total)

        t5_convert.write(
            tensors,
            job.config,
            job.partial,
            job.dtype,
            max_shard_bytes=job.max_shard_bytes,
            advance=more,
        )


def _write_orbax(job: Job) -> None:
    model = t5_weights.load_t5(job.folder, job.dtype, config=job.config)
    parameters = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    if not orbax_folder.is_one(job.partial):
        _check_room(job, sum(leaf.nbytes for leaf in jax.tree.leaves(parameters)))
    fields = t5_convert.config_fields(job.config, job.dtype)
    orbax_folder.save(parameters, fields, job.partial)


def _check_room(job: Job, needed: int) -> None:
    free = shutil.disk_usage(job.workdir).free
    if needed > free:
        raise errors.InputError(
            f"the disk of {job.workdir} has {free / 1e9:.2f} GB left, and "
            f"{needed / 1e9:.2f} GB are to be written: make room, or name another "
            "--workdir"
        )


@contextlib.contextmanager
def _told_of_a_full_disk(job: Job) -> Iterator[None]:
    """Says in one sentence that the disk is full, however it shows."""
    # Orbax's threads log pages of what is raised here as well.
    log = logging.getLogger("absl")
    log.disabled = True
    try:
        yield
    except errors.InputError:
        raise
    # Which error a full disk becomes depends on the writer.
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC
        full |= "No space left" in str(error)
        if not full and shutil.disk_usage(job.workdir).free > _ALMOST_FULL:
            raise
        raise errors.InputError(
            f"the disk of {job.workdir} is full: what is whole stays in {job.partial}; "
            "make room and run the command again"
        ) from error
    finally:
        log.disabled = False


@jax.jit
def _run(model: T5) -> jax.Array:
    """Logits of one fixed source and text."""
    vocab_size = model.config.vocab_size
    inputs = (2 + 7 * jnp.arange(16, dtype=jnp.int32)[None]) % vocab_size
    tokens = (11 * jnp.arange(8, dtype=jnp.int32)[None]) % vocab_size
    encoded = model.encode(inputs, jnp.ones(inputs.shape, bool))
    return model.decode(tokens, None, encoded)[0].logits.astype(jnp.float32)


def _compare(job: Job) -> dict[str, Any] | None:
    """Runs source and result; None: they are not compared.

    Raises:
        InputError: the logits of what was written are not those of the source, rounded
            to the stored type.
    """
    if job.check is None:
        return None
    if job.config.encoder_width is not None:
        print("not compared: a draft without an encoder does not run by itself")
        return None
    model = t5_weights.load_t5(job.folder, job.check, config=job.config)
    before = np.asarray(_run(model))
    model = jax.tree.map(lambda leaf: leaf.astype(job.dtype).astype(leaf.dtype), model)
    rounded = np.asarray(_run(model))
    del model  # before the other one is loaded
    after = np.asarray(_run(t5_weights.load_t5(job.partial, job.check)))
    largest = float(np.abs(rounded).max())
    moved, apart = (float(np.abs(own - rounded).max()) for own in (before, after))
    sums = {"before": _sum(before), "rounded": _sum(rounded), "after": _sum(after)}
    print(
        f"logits of a fixed input, at most {largest:.4g}:\n"
        f"  source                     {sums['before']}\n"
        f"  source rounded to {job.dtype.name:<8} {sums['rounded']}, which moves them "
        f"by {moved:.2g}\n"
        f"  written                    {sums['after']}"
    )
    if not apart <= _TOLERANCE * largest:
        raise errors.InputError(
            f"the logits of what was written are {apart:.2g} away from those of "
            f"{job.folder}: it stays in {job.partial} and must not be used"
        )
    return sums | {"largest": largest, "rounding": moved, "difference": apart}


def _sum(logits: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(logits).tobytes()).hexdigest()[:16]


@contextlib.contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar; what it yields is told how many bytes of how many are done."""
    from rich import progress

    with progress.Progress(
        progress.TextColumn(name),
        progress.BarColumn(),
        progress.DownloadColumn(),
        progress.TimeRemainingColumn(),
        transient=True,
    ) as bar:
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _define(values: flags.FlagValues) -> None:
    flags.DEFINE_string("from", None, "Checkpoint to read.", flag_values=values)
    flags.DEFINE_string("to", None, "Format to write: hf, orbax.", flag_values=values)


if __name__ == "__main__":
    command.run(main, define=_define)
