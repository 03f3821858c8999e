"""A drafter with weights of its own, for a target that ships.

    python -m experiments.train_drafter --config=configs/train_drafter.py \
        --config.kind=medusa --config.data.folder=DATA \
        --config.data.train=TEXTS/generated.jsonl --workdir=DIR

DATA holds the tokenizer and the held-out sources (`experiments.prepare`), TEXTS what
the target has written of the training sources (`experiments.generate`).
Expected: DIR/export, a drafter's folder for ``config.draft.checkpoint``, with a card.
"""

import ml_collections
from ml_collections import config_dict

from configs import english_target, repair_target


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train_drafter`."""
    own = repair_target.get_config()
    config = ml_collections.ConfigDict(
        dict(
            seed=0,
            kind="medusa",  # medusa, parallel
            target="zoo/repair/target",  # a folder, or "zoo/..."
            # A folder to start from: an earlier drafter of the same kind, or an
            # ordinary draft where the kind can. Empty: as the kind begins.
            init="",
            gamma=4,  # tokens of a block
            loss=dict(
                name="lk_hybrid",  # see `specjax.training.distill`, as for the next
                beta=0.5,
                decay=3.0,
                target_temperature=1.0,
                draft_temperature=1.0,
                weights="cat",  # of slots: `specjax.training.slots`, as for the next
                slot_decay=0.8,
                floor=0.5,
            ),
            # bfloat16_products: see `configs/repair_target.py`; empty: float32.
            compute_dtype="",
            log_every=20,
            evaluate_every=200,
            checkpoint_every=100,  # and at every evaluation
            keep=2,  # the newest checkpoints
            tensorboard=False,  # DIR/tensorboard; needs the extra `data`
            optimizer=dict(
                learning_rate=2e-3,
                warmup_steps=50,
                steps=1000,
                schedule="trapezoid",
                decay_steps=900,
                weight_decay=0.01,
                clip=1.0,
                b1=0.9,
                b2=0.98,
            ),
            data=own.data.to_dict() | dict(buckets=english_target.BUCKETS),
            export=dict(dtype="float16"),
        )
    )
    # Held-out texts are what the target writes, greedily; else those of the file.
    config.data.update(max_tokens=384, validation_rows=200, rewrite=True)
    # What shapes a drafter, by kind: see its `create`. None: the usual value.
    config.settings = ml_collections.ConfigDict()
    config.settings.medusa = ml_collections.ConfigDict()
    config.settings.medusa.heads = config_dict.placeholder(int)  # None: 4
    config.settings.medusa.rank = config_dict.placeholder(
        int
    )  # None: the target's head
    config.settings.medusa.tap = config_dict.placeholder(int)  # None: the last layer
    config.settings.medusa.slots = config_dict.placeholder(str)  # None: argmax
    config.settings.early_exit = ml_collections.ConfigDict()
    config.settings.early_exit.layers = config_dict.placeholder(int)  # None: half
    # none, feed_forward or layer. None: layer.
    config.settings.early_exit.adapter = config_dict.placeholder(str)
    config.settings.eagle = ml_collections.ConfigDict()
    # Decoder layers of the target. None: the first, the middle and the last.
    config.settings.eagle.taps = config_dict.placeholder(tuple)
    # It can start from a draft: --config.init=zoo/repair/draft
    config.settings.parallel = ml_collections.ConfigDict()
    config.settings.parallel.max_gamma = config_dict.placeholder(int)  # config.gamma; 8
    config.settings.parallel.first_sentinel = config_dict.placeholder(int)  # an id
    config.settings.parallel.markov_rank = config_dict.placeholder(int)  # None: 0
    config.settings.parallel.slots = config_dict.placeholder(str)  # argmax, sampled
    config.settings.parallel.keep = config_dict.placeholder(float)  # None: 0.7
    config.settings.parallel.keep_least = config_dict.placeholder(float)  # None: 0.2
    return config
