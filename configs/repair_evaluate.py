"""Scores the shipped pair on held-out packages: what its model cards say.

    python -m experiments.evaluate --config=configs/repair_evaluate.py \
        --input=DATA/test.jsonl --workdir=DIR

DATA comes from `configs/repair_data.py` with --config.tokenizer=zoo/repair/target and
--config.prefix="repair: ".
Expected: the figures of specjax/zoo/repair/*/README.md.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.evaluate`."""
    return ml_collections.ConfigDict(
        dict(
            target=dict(checkpoint="zoo/repair/target"),
            draft=dict(checkpoint="zoo/repair/draft"),  # empty: no draft, no alpha
            input="",  # JSONL with "source" and "target", or a two-column TSV
            prefix="repair: ",  # of every source: the task's; no part of what is copied
            limit=0,  # score only so many lines; 0: all
            buckets=(24, 32, 48, 64, 96),  # source lengths that are padded to
            max_length=96,
            batch_size=64,
            dtype="float32",
            seed=0,
        )
    )
