"""Proves that every verification rule is as lossless as it says, on tables of laws.

    python -m experiments.lossless --config=configs/lossless.py --workdir=runs/lossless

Expected: exit code 0; every lossless rule has p-values above 0.001, corrected for their
number, and every lossy one below. With --fast in less than two minutes on 2 cores.
A pair of your own, beside the tables:

    --config.target.checkpoint=DIR --config.draft.checkpoint=DIR --input=FILE
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.lossless`."""
    config = ml_collections.ConfigDict()
    # The claims: names of lossless rules, "token,block". Empty: all that there are.
    # The lossy ones always run beside them, and must be caught.
    config.rules = ""
    config.rows = 6000  # samples of each kind of draft and setting, in each round
    config.rounds = 3
    config.fast = ml_collections.ConfigDict({"rows": 1000, "rounds": 1, "draws": 50})
    config.seed = 0
    # A pair. Empty: tables alone.
    config.target = ml_collections.ConfigDict({"checkpoint": ""})
    config.draft = ml_collections.ConfigDict({"checkpoint": ""})
    config.gamma = 4  # of rules of chains; those of trees draft a small tree
    config.draws = 200  # samples of each line
    config.tokens = 2  # whose joint law is compared
    config.sampling = ml_collections.ConfigDict({"temperature": 1.0})
    config.sampling.top_k = config_dict.placeholder(int)
    config.sampling.top_p = config_dict.placeholder(float)
    config.task_prefix = ""  # put before each line
    config.buckets = (32, 64, 128, 256, 512)  # source lengths that are padded to
    config.max_length = 64  # decoder tokens, start token and EOS included
    config.batch_size = 32
    config.dtype = "float32"  # float32, bfloat16
    return config
