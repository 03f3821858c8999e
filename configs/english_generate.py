"""Decodes training sources of both tasks: what the `english_draft` learns from.

    python -m experiments.generate --config=configs/english_generate.py \
        --config.target.checkpoint=TARGET --input=BOTH/train.jsonl --workdir=DIR

Expected: DIR/generated.jsonl, one source and the target's own output per line. A run
that was stopped goes on where it was.
"""

import ml_collections

from configs import repair_generate


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.generate`."""
    config = repair_generate.get_config()
    config.target.checkpoint = "zoo/repair/target"
    config.buckets = (28, 40, 52, 64, 96, 128, 176, 240, 384)
    return config
