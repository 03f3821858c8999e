"""Times decoder steps of a T5-base shape against this machine's memory bandwidth.

    python -m experiments.benchmark --config=configs/bench.py --workdir=runs/bench

Expected on a 2-core x86-64 machine in float32: a step within 1.3 times the time of
reading the decoder's weights once, and scoring 8 tokens within 2 steps.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.benchmark`."""
    config = ml_collections.ConfigDict()
    config.model = "t5-v1_1-base"  # a published shape; its weights are random
    config.dtype = "float32"  # float32, bfloat16
    config.batch_size = 1
    config.source_length = 64
    config.max_length = 64
    config.fed = (1, 4, 8, 16)  # tokens that one target pass is fed
    config.repeats = 9  # timed passes; the median counts
    config.seed = 0
    return config
