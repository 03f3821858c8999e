"""The draft of the `ende` pair: a sixth of the weights a step of the target.

    python -m experiments.train --config=configs/ende_draft.py \
        --config.data.folder=DATA --config.data.train=FILE --workdir=DIR

FILE is a JSONL of `source` and `target` whose targets the target model has written.
Expected: DIR/export, a Hugging Face directory.
"""

import ml_collections

from configs import ende_target, repair_draft


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train`."""
    config = ende_target.get_config()
    config.model.update(repair_draft.get_config().model)
    config.model.update(vocab_size=8000, dropout_rate=0.1)
    config.label_smoothing = 0.0
    return config
