"""Compiles speculative decoding for TPUs, on a machine that has none.

    pip install -e '.[tpu]'
    python -m experiments.tpu_aot --config=configs/tpu_aot.py --workdir=runs/tpu_aot

Expected: for each pair and chip a line that says whether it fits, how the compiler's
traffic stands to our own count, and that no loop copies the cache. A pair takes one to
five minutes per chip; a run that was stopped goes on. Less:

    --config.targets=t5-v1_1-base --config.chips=v5e
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.tpu_aot`."""
    config = ml_collections.ConfigDict()
    # Presets of `specjax.models.t5_config`. A draft as large as a target is left out.
    config.targets = ("t5-v1_1-base", "t5-v1_1-large", "t5-v1_1-xl", "t5-v1_1-xxl")
    config.drafts = ("t5-v1_1-small",)
    config.chips = ("v4", "v5e", "v5p", "v6e")
    # One chip; the target split over four, the draft whole on each.
    config.meshes = ("model=1", "model=4")
    config.gamma = 7
    config.temperature = 0.0  # 0: greedy
    config.batch_size = 1
    config.source_length = 128
    # Columns of the output. The first one's memory is shown; the second tells whether
    # temporaries grow by more than the caches.
    config.max_lengths = (128, 1024)
    config.dtype = "bfloat16"
    return config
