"""Scores the shipped pair on held-out descriptions: what its cards say of `synopsis`.

    python -m experiments.evaluate --config=configs/synopsis_evaluate.py \
        --input=DATA/test.jsonl --workdir=DIR

DATA comes from `configs/synopsis_data.py --config.tokenizer=zoo/synopsis/target`.
Expected: the figures of specjax/zoo/repair/*/README.md.
"""

import ml_collections

from configs import repair_evaluate


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.evaluate`."""
    config = repair_evaluate.get_config()
    config.target.checkpoint = "zoo/synopsis/target"
    config.draft.checkpoint = "zoo/synopsis/draft"
    config.prefix = "summarize: "
    config.buckets = (64, 128, 256, 384)
    return config
