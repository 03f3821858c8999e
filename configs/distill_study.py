"""Which divergence, on whose texts: short runs of one draft over all pairs of both.

    python -m experiments.distill_study --config=configs/distill_study.py \
        --config.train.data.folder=DATA --workdir=DIR

DATA comes from `configs/english_target.py`, with --config.tokenizer=zoo/repair/target
instead of --config.num_pieces: the ids must be the target's.
Expected: DIR/study.md and DIR/study.png, after two to six minutes a run on two free
cores; a study that was stopped goes on where it was.
"""

import ml_collections

from configs import english_draft


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.distill_study`."""
    train = english_draft.get_config()
    train.optimizer.update(steps=300, warmup_steps=50, decay_steps=250)
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
