"""What a training run reads: pairs of texts as ids, and what is held out."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh

from experiments import train_settings
from specjax import errors, sharding
from specjax.data import batches, pairs, tokenizer
from specjax.models import t5_weights
from specjax.training import step

Example = tuple[list[int], list[int]]


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run reads.

    Attributes:
        train: examples as ids.
        validation: the held-out examples in padded batches.
        sources: ids of the held-out sources, in the order of the file.
        references: their targets as text.
        pieces: the tokenizer.
        dropped: by file, how many examples were too long.
        fingerprints: SHA-256 of the examples and of the tokenizer.
    """

    train: list[Example]
    validation: list[step.Batch]
    sources: list[list[int]]
    references: list[str]
    pieces: tokenizer.Tokenizer
    dropped: dict[str, int]
    fingerprints: dict[str, str]


def load_data(
    config: ml_collections.ConfigDict,
    show: Callable[[str], None],
    mesh: Mesh | None = None,
) -> Data:
    """Reads the files of ``config.data``.

    Args:
        config: see `configs/repair_target.py`.
        show: prints a line: what stays out, and how many.
        mesh: that the held-out batches go to.

    Raises:
        errors.InputError: the tokenizer is not the model's, a file has a line that is
            no pair, or holds no example that is short enough.
    """
    pieces = _load_tokenizer(config, pathlib.Path(config.data.folder), show)
    return read_data(config, pieces, show, mesh)


def read_data(
    config: ml_collections.ConfigDict,
    pieces: tokenizer.Tokenizer,
    show: Callable[[str], None],
    mesh: Mesh | None = None,
) -> Data:
    """The same with a tokenizer that is known to be the model's.

    Args:
        config: see `configs/repair_target.py`; its ``data`` is read.
        pieces: of ``config.data.folder``.
        show: prints a line.
        mesh: that the held-out batches go to.

    Raises:
        errors.InputError: see `load_data`.
    """
    folder, limit = pathlib.Path(config.data.folder), config.data.max_tokens
    longest = f"config.data.max_tokens = {limit} or all of config.data.buckets"
    dropped = {}

    def read(path: pathlib.Path) -> list[tuple[Example, str]]:
        # A model may have written nothing: so a draft must learn to do.
        found = pairs.load_pairs(path, empty_targets=True)
        empty = sum(not pair.target.strip() for pair in found)
        if empty:
            show(f"{path}: {empty} of {len(found)} examples have an empty target")
        examples = [
            (
                (
                    pieces.encode(pair.source),
                    pieces.encode(pair.target)[: None if pair.finished else -1],
                ),
                pair.target,
            )
            for pair in found
        ]
        # Cut before its first token, a text teaches nothing: not even where it ends.
        taught = [own for own in examples if own[0][1]]
        if len(taught) < len(examples):
            show(
                f"{path}: {len(examples) - len(taught)} of {len(examples)} examples "
                "are unfinished and empty, and stay out"
            )
        sizes = [example for example, _ in taught]
        held = batches.which_bucket(sizes, config.data.buckets) >= 0
        short = [
            own
            for own, fits in zip(taught, held, strict=True)
            if fits and max(map(len, own[0])) <= limit
        ]
        dropped[str(path)] = len(taught) - len(short)
        if not short:
            raise errors.InputError(
                f"{path}: no example is left: {len(taught)} of {len(examples)} are "
                f"longer than {longest}"
            )
        if len(short) < len(taught):
            show(
                f"{path}: {len(taught) - len(short)} of {len(examples)} examples "
                f"are longer than {longest}, and stay out"
            )
        return short

    train = read(pathlib.Path(config.data.train or folder / "train.jsonl"))
    held_out = read(pathlib.Path(config.data.validation or folder / "validation.jsonl"))
    held_out = held_out[: config.data.validation_rows]
    rows = [example for example, _ in held_out]
    own = config.data
    plan = batches.plan_batches(
        rows, own.tokens_per_batch, own.buckets, own.multiple_of
    )
    return Data(
        train=[example for example, _ in train],
        validation=[
            to_device(batch, mesh)
            for batch in batches.epoch_batches(rows, plan, 0, epoch=0)
        ],
        sources=[source for source, _ in rows],
        references=[text for _, text in held_out],
        pieces=pieces,
        dropped=dropped,
        fingerprints={
            "training examples": _fingerprint([example for example, _ in train]),
            "held-out examples": _fingerprint(rows),
            "tokenizer": fingerprint_tokenizer(folder),
        },
    )


def to_device(batch: batches.Batch, mesh: Mesh | None = None) -> step.Batch:
    """A batch of numpy arrays as the train step takes it, on a mesh if there is one."""
    moved = step.Batch(
        inputs=jnp.asarray(batch.inputs),
        inputs_mask=jnp.asarray(batch.input_mask),
        targets=jnp.asarray(batch.targets),
        targets_mask=jnp.asarray(batch.target_mask),
    )
    return moved if mesh is None else sharding.place_rows(moved, mesh)


def _load_tokenizer(
    config: ml_collections.ConfigDict,
    folder: pathlib.Path,
    show: Callable[[str], None],
) -> tokenizer.Tokenizer:
    pieces = tokenizer.load_tokenizer(folder)
    if pieces.vocab_size > config.model.vocab_size:
        raise errors.InputError(
            f"config.model.vocab_size is {config.model.vocab_size}, the tokenizer in "
            f"{folder} has {pieces.vocab_size} ids"
        )
    shape = train_settings.model_config(config)
    for name in ("pad_id", "eos_id"):
        if getattr(shape, name) != getattr(pieces, name):
            raise errors.InputError(
                f"config.model.{name} is {getattr(shape, name)}, and the tokenizer in "
                f"{folder} has {getattr(pieces, name)}: they must agree"
            )
    if config.init not in train_settings.INITS:
        _check_same(config, pieces, show)
    return pieces


def _check_same(
    config: ml_collections.ConfigDict,
    pieces: tokenizer.Tokenizer,
    show: Callable[[str], None],
) -> None:
    folder = train_settings.init_folder(config)
    if not any((folder / name).is_file() for name in tokenizer.FILES):
        show(
            f"config.init: {config.init} holds no tokenizer; its model is taken to "
            "know the ids of config.data.folder"
        )
        return
    try:
        tokenizer.check_same_tokenizer(tokenizer.load_tokenizer(folder), pieces)
    except errors.InputError as error:
        raise errors.InputError(
            f"config.init: the model in {config.init} has another tokenizer than "
            f"config.data.folder, {config.data.folder}"
        ) from error


def _fingerprint(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for sides in examples:
        for ids in sides:
            digest.update(np.array([len(ids), *ids], np.int64).tobytes())
    return digest.hexdigest()


def fingerprint_files(config: ml_collections.ConfigDict) -> str:
    """SHA-256 of all that a run reads: its files, and the model that it starts from."""
    folder = pathlib.Path(config.data.folder)
    digest = hashlib.sha256(fingerprint_tokenizer(folder).encode())
    for name in ("train", "validation"):
        path = pathlib.Path(config.data[name] or folder / f"{name}.jsonl")
        digest.update(path.read_bytes() if path.is_file() else b"")
    if config.init not in train_settings.INITS:
        start = train_settings.init_folder(config)
        digest.update(t5_weights.fingerprint(start).encode())
    return digest.hexdigest()


def fingerprint_tokenizer(folder: pathlib.Path) -> str:
    """SHA-256 of a folder's tokenizer."""
    digest = hashlib.sha256()
    for name in tokenizer.FILES:
        if (folder / name).is_file():
            digest.update(name.encode() + (folder / name).read_bytes())
    return digest.hexdigest()
