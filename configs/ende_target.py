"""The target of the `ende` pair (English to German): a T5 1.1 of 11.1 M parameters.

    python -m experiments.train --config=configs/ende_target.py \
        --config.data.folder=DATA --config.init=SHORT/export --workdir=DIR

SHORT comes from `configs/ende_short.py`, DATA from `configs/ende_data.py`.
Expected: DIR/export, a Hugging Face directory, after some forty minutes on two free
cores.
"""

import ml_collections

from configs import ende_short


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train`."""
    config = ende_short.get_config()
    config.init = ""  # SHORT/export
    config.label_smoothing = 0.1
    config.evaluate_every = 500
    config.model.dropout_rate = 0.1
    config.optimizer.update(learning_rate=1.2e-3, steps=4000, decay_steps=3500)
    config.data.update(max_tokens=96, validation_rows=500)
    return config
