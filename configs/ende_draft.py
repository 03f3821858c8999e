"""The draft of the `ende` pair: a ninth of the weights a step of the target.

    D="python -m experiments.distill --config=configs/ende_draft.py
        --config.data.folder=DATA"
    $D --config.optimizer.steps=900 --config.optimizer.decay_steps=800 --workdir=FIRST
    $D --config.data.train=FILE --config.init=FIRST/export --workdir=SECOND \
        --config.optimizer.learning_rate=1.5e-3 --config.optimizer.steps=900 \
        --config.optimizer.decay_steps=850
    $D --config.data.train=FILE --config.init=SECOND/export --workdir=DIR \
        --config.distill.name=jsd --config.optimizer.learning_rate=1.2e-3 \
        --config.optimizer.steps=1000 --config.optimizer.decay_steps=950

First by forward KL from the target's laws on people's texts, then on the target's own
(FILE, by `configs/ende_generate.py`), at last by JSD, which meets the target best but
does not get going from random numbers (`configs/distill_study.py`).
Expected: DIR/export, a Hugging Face directory.
"""

import ml_collections

from configs import ende_short, repair_draft


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.distill`."""
    config = ende_short.get_config()
    config.model.update(repair_draft.get_config().model)
    # One table for both ends: most of a draft of so many ids would be the two of them.
    config.model.update(vocab_size=2048, tied_head=True, scaled_head=True)
    config.init = "dictionary"
    config.optimizer.update(learning_rate=3e-3, steps=900, decay_steps=800)
    config.data.update(max_tokens=96, validation_rows=500)
    config.distill.target = "zoo/ende/target"
    return config
