"""A training run of seconds: forty pairs of texts, and a model of one small layer."""

from __future__ import annotations

import json
import pathlib
import random

import ml_collections

from configs import repair_target
from specjax.data import pairs, tokenizer

WORDS = "ab cde fgh ijk lmn opq rst uvw xyz The A Of".split()


def make_folder(folder: pathlib.Path) -> pathlib.Path:
    """Forty pairs, lower case to the words as they are, and a tokenizer."""
    shuffled = random.Random(0)
    texts = [" ".join(shuffled.choices(WORDS, k=4)) for _ in range(40)]
    rows = [pairs.Pair(text.lower(), text) for text in texts]
    pairs.save_pairs(folder / "train.jsonl", rows[:32])
    pairs.save_pairs(folder / "validation.jsonl", rows[32:])
    tokenizer.train_sentencepiece(texts, 105, folder / "spiece.model")
    return folder


def tiny_config(folder: pathlib.Path) -> ml_collections.ConfigDict:
    """Eight steps of eight rows."""
    config = repair_target.get_config()
    config.update(log_every=1, evaluate_every=4, checkpoint_every=2)
    config.model.update(
        vocab_size=205, d_model=16, d_kv=4, num_heads=4, d_ff=16, dropout_rate=0.1
    )
    config.model.update(num_encoder_layers=1, num_decoder_layers=1)
    config.optimizer.update(steps=8, warmup_steps=2, decay_steps=4)
    config.data.update(folder=str(folder), buckets=(32,), max_tokens=32)
    config.data.update(tokens_per_batch=256, validation_rows=6)
    config.evaluate.update(rows=3, max_length=9, batch_size=3)
    return config


def lines(workdir: pathlib.Path) -> list[dict[str, float]]:
    """The lines of a run's log, without the speed of its steps."""
    found = (workdir / "train.jsonl").read_text().splitlines()
    timed = ("tokens_per_second", "seconds_per_step")
    return [
        {name: value for name, value in json.loads(line).items() if name not in timed}
        for line in found
    ]


def losses(workdir: pathlib.Path) -> list[tuple[float, float]]:
    """Step and loss of each logged step."""
    return [(own["step"], own["loss"]) for own in lines(workdir) if "loss" in own]
