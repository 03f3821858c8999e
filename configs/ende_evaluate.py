"""Scores the shipped English-German pair on held-out packages.

    python -m experiments.evaluate --config=configs/ende_evaluate.py \
        --input=DATA/test.jsonl --workdir=DIR

Expected: the figures of specjax/zoo/ende/*/README.md.
"""

import ml_collections

from configs import repair_evaluate


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.evaluate`."""
    config = repair_evaluate.get_config()
    config.target.checkpoint = "zoo/ende/target"
    config.draft.checkpoint = "zoo/ende/draft"
    config.prefix = ""
    config.buckets = (16, 24, 32, 48, 96, 256)
    config.max_length = 128  # the longest references have 108 to 113 tokens
    return config
