"""A pair of tiny T5s with a tokenizer on disk, and commands run in this process."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from experiments import command
from specjax import metrics
from specjax.data import tokenizer as tokenizers
from specjax.models import t5_weights
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from tests.helpers import perturbed

ROOT = pathlib.Path(__file__).resolve().parent.parent
PIECES, SENTINELS, DEAD_ROWS = 130, 100, 6
TEXTS = (
    "a small server reads the mail and writes it to the disk",
    "the library opens images of many formats and shows them",
    "this package holds the files that every program needs",
    "it sends mails, parses tables and prints the pages of a book",
    "a game with a mouse, a cat and more than fifty levels",
    "the daemon starts at boot and stops when the disk is full",
)
LINES = (
    "the small mail server",
    "it opens images",
    "a game with a cat",
    "this package parses the tables",
    "many files",
    "the disk is full",
    "it prints pages and images",
)
SHAPE = T5Config(
    vocab_size=PIECES + SENTINELS + DEAD_ROWS,
    d_model=32,
    d_kv=8,
    num_heads=4,
    d_ff=48,
    num_encoder_layers=2,
    num_decoder_layers=2,
)


@dataclasses.dataclass(frozen=True)
class Folders:
    """Where a pair lies."""

    target: pathlib.Path
    draft: pathlib.Path


def make_pair(folder: pathlib.Path) -> Folders:
    """A target whose laws are neither flat nor sure, and a draft that often agrees."""
    folders = Folders(folder / "target", folder / "draft")
    target = T5(SHAPE, jax.random.key(5))
    # Sharper laws; the end of a sequence is likelier than one word in 256.
    target.head[...] = (target.head[...] * 3.0).at[1].multiply(2.0)
    t5_weights.save_t5(target, folders.target)
    t5_weights.save_t5(perturbed(target, 1, 0.15), folders.draft)
    model = folders.target / "spiece.model"
    tokenizers.train_sentencepiece(TEXTS, PIECES, model)
    shutil.copy(model, folders.draft)
    return folders
