"""A draft for the `repair_target`: a sixth of the weights a step.

    python -m experiments.distill --config=configs/repair_draft.py \
        --config.distill.target=TARGET --config.data.folder=DATA \
        --config.data.train=FILE --workdir=DIR

FILE is a JSONL of `source` and `target` whose targets the target model has written: a
draft is there to say what the target says (sequence-level distillation, Kim and Rush
2016, arXiv:1606.07947). Without FILE it learns from the people's own sentences. Start
from an earlier draft with --config.init=EARLIER/export.
Expected: DIR/export, a Hugging Face directory.
"""

import ml_collections

from configs import repair_target


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.distill`."""
    config = repair_target.get_config()
    config.model.update(
        d_model=128,
        d_kv=32,
        num_heads=4,
        d_ff=384,
        num_encoder_layers=2,
        num_decoder_layers=1,
    )
    config.optimizer.update(learning_rate=3e-3, warmup_steps=100)
    return config
