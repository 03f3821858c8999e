"""The draft of the `ende` pair: a sixth of the weights a step of the target.

    python -m experiments.distill --config=configs/ende_draft.py \
        --config.data.folder=DATA --config.data.train=FILE --workdir=DIR

FILE is a JSONL of `source` and `target` whose targets the target model has written
(`configs/ende_generate.py`).
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
    config.optimizer.update(learning_rate=3e-3, steps=1400, decay_steps=1300)
    config.data.update(max_tokens=96, validation_rows=500)
    config.distill.target = "zoo/ende/target"
    return config
