"""The draft of the `english_target`: an eighth of the weights a step.

    python -m experiments.distill --config=configs/english_draft.py \
        --config.data.folder=BOTH --workdir=FIRST
    python -m experiments.generate --config=configs/english_generate.py \
        --input=BOTH/train.jsonl --workdir=TEXTS
    python -m experiments.distill --config=configs/english_draft.py \
        --config.data.folder=BOTH --config.data.train=TEXTS/generated.jsonl \
        --config.init=FIRST/export --config.optimizer.learning_rate=1e-3 --workdir=DIR

First from the target's laws on people's texts, of which there are many; then on the
target's own, which are what the draft will meet.
Expected: DIR/export, a Hugging Face directory.
"""

import ml_collections

from configs import english_target, repair_draft


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.distill`."""
    config = repair_draft.get_config()
    own = english_target.get_config()
    config.update(init=own.init, evaluate_every=500, checkpoint_every=250)
    config.model.vocab_size = own.model.vocab_size
    config.optimizer.update(steps=1500, decay_steps=1400)
    config.data.update(own.data)
    config.distill.target = "zoo/repair/target"
    config.data.validation_rows = 600
    return config
