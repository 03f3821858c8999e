"""One target for `repair` and `synopsis`: a T5 1.1 of 7.5 M parameters, 1,024 ids.

    P="python -m experiments.prepare --workdir"
    $P REPAIR --config=configs/repair_data.py --config.num_pieces=924 \
        --config.prefix="repair: "
    $P SYNOPSIS --config=configs/synopsis_data.py --config.tokenizer=REPAIR
    $P BOTH --config=configs/files_data.py --config.tokenizer=REPAIR --config.apart \
        --config.train=REPAIR/train.jsonl,SYNOPSIS/train.jsonl \
        --config.validation=REPAIR/validation.jsonl,SYNOPSIS/validation.jsonl \
        --config.test=REPAIR/test.jsonl,SYNOPSIS/test.jsonl
    python -m experiments.train --config=configs/english_target.py \
        --config.data.folder=BOTH --workdir=DIR

Each task has its prefix before every source, as T5's have. Few ids learn the spelling
of words sooner: a typo moves one or two pieces instead of making new ones.
Expected: DIR/export, a Hugging Face directory, after two hours and a half on two free
cores. What ships was trained on from there, for as long again:

    --config.init=DIR/export --config.compute_dtype=bfloat16_products \
        --config.data.tokens_per_batch=3072 --config.optimizer.b2=0.99 \
        --config.optimizer.learning_rate=8e-4 --config.optimizer.steps=6000 \
        --config.optimizer.decay_steps=5940
"""

import ml_collections

from configs import repair_target

# Tokens of source and target: repairs, then summaries.
BUCKETS = (
    *((28, 24), (40, 36), (52, 48), (68, 64), (96, 100)),
    *((64, 24), (96, 24), (128, 24), (176, 24), (240, 40), (384, 56)),
)


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train`."""
    config = repair_target.get_config()
    config.update(init="dictionary", evaluate_every=600, checkpoint_every=200)
    config.model.vocab_size = 1024
    config.optimizer.update(
        learning_rate=1e-3, warmup_steps=50, steps=8300, decay_steps=8250
    )
    config.data.update(buckets=BUCKETS, max_tokens=384, validation_rows=2245)
    return config
