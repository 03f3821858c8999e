"""The start of the `ende` target: short pairs, until it has learnt where to look.

    python -m experiments.train --config=configs/ende_short.py \
        --config.data.folder=DATA --workdir=SHORT

DATA comes from `python -m experiments.prepare --config=configs/ende_data.py`. Go on
from here with `configs/ende_target.py`. Dropout comes there: from the first step it
keeps the cross-attention from finding its place.
Expected: SHORT/export, a Hugging Face directory, after a quarter of an hour on two free
cores; validation loss 2.9 on pairs of at most 32 tokens.
"""

import ml_collections

from configs import repair_target


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train`."""
    config = repair_target.get_config()
    config.init = "dictionary"
    config.evaluate_every = 100
    config.model.update(vocab_size=2048, dropout_rate=0.0)
    # Constant to the end: the run that follows brings it down.
    config.optimizer.update(learning_rate=1.5e-3, steps=600, decay_steps=1)
    config.data.update(max_tokens=32, validation_rows=400)
    return config
