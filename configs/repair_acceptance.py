"""Trains the head that predicts which of a draft's tokens stand: SpecDec++'s rule.

    python -m experiments.train_acceptance --config=configs/repair_acceptance.py \
        --input=DATA/validation.jsonl --workdir=DIR

DATA comes from `configs/repair_data.py` with --config.tokenizer=zoo/repair/target and
--config.prefix="repair: ". Then decode with

    --config.draft.length.rule=acceptance --config.draft.length.acceptance.head=DIR/head

The lines are held-out ones, which neither model has learnt from. Expected: minutes,
most of them for writing the texts; a `loss` of held-out places in DIR/metrics.json that
lies well below `loss_of_a_constant`.
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.train_acceptance`."""
    return ml_collections.ConfigDict(
        dict(
            target=dict(checkpoint="zoo/repair/target"),
            draft=dict(checkpoint="zoo/repair/draft"),  # a T5
            input="",  # JSONL with "source" and "target", or a two-column TSV
            limit=0,  # use only so many lines; 0: all
            held_out=0.2,  # share of the lines that measure the loss
            # Of the texts, and of both laws. Greedily a token is accepted or not.
            temperature=config_dict.placeholder(float),  # None: greedy
            hidden=64,  # width of the head's hidden layer
            steps=1000,  # of 1,024 places each
            learning_rate=1e-3,
            buckets=(32, 48, 64, 96),  # source lengths that are padded to
            max_length=96,
            batch_size=64,
            seed=0,
        )
    )
