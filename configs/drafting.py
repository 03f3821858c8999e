"""The settings of a draft that all decoding commands share."""

import ml_collections
from ml_collections import config_dict


def get_settings(checkpoint: str) -> ml_collections.ConfigDict:
    """What ``config.draft`` holds: where the draft is, and each kind's own settings.

    Args:
        checkpoint: unless told otherwise.
    """
    draft = ml_collections.ConfigDict()
    # A T5 in Hugging Face's layout, or the folder of a trained drafter; "zoo/..." ships
    # with specjax.
    draft.checkpoint = checkpoint
    # What is None has its usual value.
    draft.ngram = ml_collections.ConfigDict()
    draft.ngram.max_ngram = config_dict.placeholder(int)  # None: 3
    return draft
