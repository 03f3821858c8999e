"""Data of the `repair` task: restore capitals, punctuation and spelling.

    python -m experiments.prepare --config=configs/repair_data.py --workdir=DIR

Expected (Debian bookworm, two minutes on one core): DIR/train.jsonl with 143,000
examples (88,000 sentences and 55,000 one-line summaries of 20-140 characters),
validation.jsonl and test.jsonl with 1,400 sentences each from other packages,
spiece.model with 3,996 pieces (4,096 ids with the 100 sentinels), and data.json with
the counts.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.prepare`."""
    return ml_collections.ConfigDict(
        dict(
            task="repair",
            seed=0,
            lists="",  # folder of the package lists; empty: DIR/lists
            min_length=20,  # characters
            max_length=140,
            max_alike=20,  # sentences of one mould
            synopses=True,  # one-line summaries, in the training split only
            typo_rate=1 / 8,  # typos a word
            copies=1,  # of each training sentence, with other typos each
            num_pieces=3996,  # without the sentinels
            tokenizer="",  # a folder or spiece.model to copy; empty: train num_pieces
            prefix="",  # before every source: "repair: " beside other tasks
        )
    )
