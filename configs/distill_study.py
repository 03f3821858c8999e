"""Which divergence, on whose texts: short runs of one draft over all pairs of both.

    python -m experiments.distill_study --config=configs/distill_study.py \
        --config.train.data.folder=DATA --workdir=DIR

DATA comes from `python -m experiments.prepare --config=configs/repair_data.py
--config.tokenizer=zoo/repair/target`: the ids must be the target's.
Expected: DIR/study.md and DIR/study.png, after about a minute and a half a run on two
free cores; a study that was stopped goes on where it was.
"""

import ml_collections

from configs import repair_draft


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.distill_study`."""
    train = repair_draft.get_config()
    train.optimizer.update(steps=100, warmup_steps=20, decay_steps=60)
    train.update(log_every=20, evaluate_every=100, checkpoint_every=100, keep=1)
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
