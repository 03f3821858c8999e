"""Every verification rule on one pair at equal settings: what it gains, what it costs.

    python -m experiments.rules --config=configs/rules.py --workdir=runs/rules

Expected: a table of tokens per target call with their standard errors, for chains of
4 and 7 drafts, for trees of as many nodes and for larger ones; what is to be said of
block, best path and traversal; and each rule's own microseconds beside a step of a
T5-base. Half an hour on two free cores, most of it compiling.
"""

import pathlib

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.rules`."""
    return ml_collections.ConfigDict(
        dict(
            target=dict(checkpoint="zoo/repair/target"),
            draft=dict(checkpoint="zoo/repair/draft"),
            drafter="model",
            rules="all",  # or names, with commas between
            gammas=(4, 7),  # of the chains; and trees of as many nodes
            nodes=16,  # of the greatest tree
            greedy=True,  # also greedily, where all lossless rules are one
            sampling=dict(
                temperature=1.0,
                top_k=config_dict.placeholder(int),
                top_p=config_dict.placeholder(float),
            ),
            seeds=16,  # draws of each line
            input=str(pathlib.Path(__file__).with_name("demo_repair.txt")),
            task_prefix="repair: ",
            buckets=(32, 64, 128, 256, 512),  # source lengths that are padded to
            max_length=96,  # decoder tokens, start token and EOS included
            batch_size=80,
            dtype="float32",
            seed=0,
            # A rule's own time is taken beside a decoder step of this shape, whose
            # weights are random, at its vocabulary and with made-up dense laws.
            cost=dict(model="t5-v1_1-base", repeats=9, seconds=0.1),
        )
    )
