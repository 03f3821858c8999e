"""The target of the `ende` pair (English to German): a T5 1.1 of 9.1 M parameters.

    python -m experiments.train --config=configs/ende_target.py \
        --config.data.folder=DATA --workdir=DIR

DATA comes from `python -m experiments.prepare --config=configs/ende_data.py`. The
corpus is small (32,700 pairs): many passes, with dropout and label smoothing.
Train on short pairs first (--config.data.max_tokens=24, --config.optimizer.steps=2000)
and go on from there in another DIR with --config.init=FIRST/export.
Expected: DIR/export, a Hugging Face directory.
"""

import ml_collections

from configs import repair_target


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train`."""
    config = repair_target.get_config()
    config.label_smoothing = 0.1
    config.model.update(vocab_size=8000, dropout_rate=0.25)
    config.optimizer.update(learning_rate=1e-3, warmup_steps=300)
    return config
