"""Data of the `synopsis` task: a package's long description to its one-line synopsis.

    python -m experiments.prepare --config=configs/synopsis_data.py --workdir=DIR

Expected (Debian bookworm, two minutes on one core): DIR/train.jsonl with 46,200 pairs
(sources of 300 characters in the mean, 68 tokens; synopses of 45, 10 tokens),
validation.jsonl and test.jsonl with 750-790 each from other packages, spiece.model with
7,900 pieces, and data.json with the counts, among them what was left out: 7,500 longer
descriptions, which --config.shorten brings back without their ends, 3,100 of nothing
but boilerplate and 2,600 copies.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.prepare`."""
    return ml_collections.ConfigDict(
        dict(
            task="synopsis",
            seed=0,
            lists="",  # folder of the package lists; empty: DIR/lists
            max_source=600,  # characters
            shorten=False,  # cut longer ones to whole paragraphs; else they stay out
            min_target=10,
            max_target=100,
            max_alike=20,  # a paragraph that so many packages share is boilerplate
            num_pieces=7900,  # without the sentinels
            tokenizer="",  # a folder or spiece.model to copy; empty: train num_pieces
            prefix="summarize: ",  # before every source, as T5 has it; may be empty
        )
    )
