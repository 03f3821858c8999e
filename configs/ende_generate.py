"""Decodes the English training texts with the target: what the draft learns from.

    python -m experiments.generate --config=configs/ende_generate.py \
        --config.target.checkpoint=TARGET --input=DATA/train.jsonl --workdir=DIR

Expected: DIR/generated.jsonl, one source and the target's own output per line.
"""

import ml_collections

from configs import repair_generate


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.generate`."""
    config = repair_generate.get_config()
    config.buckets = (16, 24, 32, 48, 96, 256)  # the longest source has 209 tokens
    return config
