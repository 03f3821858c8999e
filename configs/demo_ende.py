"""Translates English sentences to German with the shipped pair, with and without draft.

    python -m experiments.decode --config=configs/demo_ende.py --workdir=runs/demo_ende

Expected: every greedy output identical both ways. The target is small and learnt from
42,000 pairs: about half of the package phrases come out understandable, other
English does not. The README's table holds measured values.
"""

import pathlib

import ml_collections

from configs import demo


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.decode`."""
    config = demo.get_config()
    config.target.checkpoint = "zoo/ende/target"
    config.draft.checkpoint = "zoo/ende/draft"
    config.task_prefix = ""
    config.runs = ("greedy",)  # half the compiling: the demo is to end in three minutes
    config.input = str(pathlib.Path(__file__).with_name("demo_ende.txt"))
    return config
