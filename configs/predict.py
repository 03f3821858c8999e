"""What speculation would give with the shipped pair, before it is run.

    python -m experiments.predict --config=configs/predict.py --workdir=runs/predict

Expected: a table of draft lengths 0 to 16, greedy and at temperature 1, and for each a
sentence that says whether speculation would pay, with which flags. Two minutes on two
free cores, most of them compiling. Any other pair, with the flags of
`experiments.decode`:

    --config.target.checkpoint=DIR --config.draft.checkpoint=DIR --input=FILE
"""

import pathlib

import ml_collections
from ml_collections import config_dict

from configs import drafting


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.predict`; see `configs/demo.py` for those it shares."""
    config = ml_collections.ConfigDict()
    config.target = ml_collections.ConfigDict({"checkpoint": "zoo/repair/target"})
    config.target.widen = config_dict.placeholder(str)
    config.draft = drafting.get_settings("zoo/repair/draft")
    config.drafter = "model"
    config.temperatures = (0.0, 1.0)  # one prediction each; 0 is greedy
    config.max_gamma = 16  # the longest draft that is looked at
    config.draws = 4  # texts that the target writes for each line at temperatures > 0
    # Of target and draft at temperatures > 0; the draft's default to the target's.
    config.sampling = ml_collections.ConfigDict()
    config.sampling.top_k = config_dict.placeholder(int)
    config.sampling.top_p = config_dict.placeholder(float)
    config.draft_sampling = ml_collections.ConfigDict()
    config.draft_sampling.temperature = config_dict.placeholder(float)
    config.draft_sampling.top_k = config_dict.placeholder(int)
    config.draft_sampling.top_p = config_dict.placeholder(float)
    config.input = str(pathlib.Path(__file__).with_name("demo_repair.txt"))
    config.task_prefix = "repair: "
    config.buckets = (64, 128, 256, 512)
    config.max_length = 96
    config.batch_size = 1
    config.dtype = "float32"
    config.seed = 0
    # Of each timing of a part: least length in seconds, and how many.
    config.timing = ml_collections.ConfigDict({"seconds": 0.05, "repeats": 7})
    return config
