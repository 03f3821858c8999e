"""A target of billions of parameters, from files to tokens, on the machine at hand.

    python -m experiments.large_check --config=configs/large_check.py --workdir=DIR

Expected: the shape of T5-XL with random weights (5.7 GB in DIR/target, in shards), read
with no more than its largest parameter beside it, and 16 tokens decoded with a draft of
T5-small's shape, the same as without it. Some ten minutes on two cores, 9 GB of memory.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.large_check`."""
    return ml_collections.ConfigDict(
        dict(
            target="t5-v1_1-xl",  # presets of `specjax.models.t5_config`
            draft="t5-v1_1-small",
            dtype="bfloat16",  # of the files, the parameters and the activations
            shard_bytes=2_000_000_000,
            mesh="",  # sizes that come to the number of devices; empty: one
            source_length=32,
            max_length=17,  # decoder tokens, start token included
            gamma=4,
            seed=0,
        )
    )
