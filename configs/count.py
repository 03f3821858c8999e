"""Makes a drafter that is counted from texts, not trained.

    python -m experiments.count --config=configs/count.py \
        --config.target.checkpoint=zoo/ende/target --config.drafter=bigram \
        --input=DATA/train.jsonl --workdir=DIR

Expected, within seconds: DIR/export, which decodes with

    --config.drafter=bigram --config.draft.checkpoint=DIR/export
"""

import ml_collections
from ml_collections import config_dict


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.count`."""
    return ml_collections.ConfigDict(
        dict(
            target=dict(checkpoint="zoo/ende/target"),
            drafter="bigram",  # unigram, bigram, suffix
            # Pairs (.tsv, .jsonl) whose targets are read; those that the target model
            # wrote itself (`experiments.generate`) are the better ones.
            input="",
            limit=0,  # of lines; 0: all
            # What is None has its usual value.
            bigram=dict(
                successors=config_dict.placeholder(int),  # kept for each id; None: 32
            ),
            suffix=dict(
                # Tokens of the latest outputs that are kept; None: 65,536.
                capacity=config_dict.placeholder(int),
                # How it drafts unless told otherwise; see configs/drafting.py.
                max_match=config_dict.placeholder(int),
                factor=config_dict.placeholder(float),
                offset=config_dict.placeholder(float),
                threshold=config_dict.placeholder(float),
                places=config_dict.placeholder(int),
            ),
        )
    )
