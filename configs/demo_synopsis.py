"""Writes one line about each package description with the shipped pair.

    python -m experiments.decode --config=configs/demo_synopsis.py --workdir=DIR

Expected: every greedy output identical both ways.
"""

import pathlib

import ml_collections

from configs import demo


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.decode`."""
    config = demo.get_config()
    config.target.checkpoint = "zoo/synopsis/target"
    config.draft.checkpoint = "zoo/synopsis/draft"
    config.task_prefix = "summarize: "
    config.input = str(pathlib.Path(__file__).with_name("demo_synopsis.txt"))
    return config
