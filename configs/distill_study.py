"""Which divergence, on whose texts: short runs of one draft over all pairs of both.

    python -m experiments.distill --config=configs/english_draft.py \
        --config.data.folder=DATA --config.data.max_tokens=64 \
        --config.distill.name=sequence --config.optimizer.steps=300 \
        --config.optimizer.warmup_steps=50 --config.optimizer.decay_steps=250 \
        --workdir=START
    python -m experiments.distill_study --config=configs/distill_study.py \
        --config.train.data.folder=DATA --config.train.init=START/export --workdir=DIR

DATA comes from `configs/repair_data.py` with --config.tokenizer=zoo/repair/target: the
ids must be the target's. All runs go on from one draft, which a short training on
people's texts has made: from random numbers the divergences that meet the target where
the draft is likely (reverse KL, JSD, total variation) do not get going.
Expected: DIR/study.md and DIR/study.png, after one to three minutes a run on two free
cores; a study that was stopped goes on where it was.
"""

import ml_collections

from configs import english_draft


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.distill_study`."""
    train = english_draft.get_config()
    train.init = ""  # START/export
    train.data.max_tokens = 64
    train.optimizer.update(
        learning_rate=1e-3, steps=150, warmup_steps=20, decay_steps=130
    )
    train.update(log_every=20, evaluate_every=300, checkpoint_every=100, keep=1)
    train.evaluate.update(rows=100)
    return ml_collections.ConfigDict(
        dict(
            train=train,  # each run's settings, as `experiments.distill` takes them
            divergences=(
                "sequence",
                "forward_kl",
                "reverse_kl",
                "jsd",
                "total_variation",
                "lk_hybrid",
            ),
            # Whose texts: truth, target, draft, or mixed, a third of each.
            writers=("truth", "target", "draft", "mixed"),
            gamma=7,  # of the measured block efficiency
        )
    )
