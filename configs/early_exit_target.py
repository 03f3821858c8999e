"""A target whose own first decoder layers draft for it (LayerSkip).

    python -m experiments.train --config=configs/early_exit_target.py \
        --config.data.folder=DATA --workdir=DIR
    python -m experiments.train_drafter --config=configs/train_drafter.py \
        --config.kind=early_exit --config.settings.early_exit.adapter=none \
        --config.target=DIR/export --config.data.folder=DATA --workdir=EXIT

DATA as for `configs/repair_target.py`, whose shape and length of training this has. The
second command fits the exit's norm, the only weights that such a drafter has then.
Expected: DIR/export, a target, and EXIT/export, its drafter's folder, to be used with
``--config.drafter=early_exit --config.draft.checkpoint=EXIT/export``.
"""

import ml_collections

from configs import repair_target


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train`."""
    config = repair_target.get_config()
    # Few layers: the last is left out of one step in ten.
    config.update(layer_dropout=0.1, exit_loss=0.5)
    return config
