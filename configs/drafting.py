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
    # The published size whose cost a model has; None: its own.
    draft.widen = config_dict.placeholder(str)
    # On a mesh: whether its heads and hidden units are split as the target's are. A
    # small draft over many devices gets slower.
    draft.split = False
    # What is None has its usual value.
    draft.ngram = ml_collections.ConfigDict()
    draft.ngram.max_ngram = config_dict.placeholder(int)  # None: 3
    # See `drafters.suffix.SuffixDrafter`. An empty checkpoint is one that has learned
    # nothing. None: as it was made.
    draft.suffix = ml_collections.ConfigDict()
    draft.suffix.max_match = config_dict.placeholder(int)  # tokens; usually 8
    draft.suffix.factor = config_dict.placeholder(float)  # drafted per matched: 1
    draft.suffix.offset = config_dict.placeholder(float)  # drafted besides: 0
    draft.suffix.threshold = config_dict.placeholder(float)  # least estimate: 0.1
    draft.suffix.places = config_dict.placeholder(int)  # matches counted: 32
    draft.medusa = ml_collections.ConfigDict()
    draft.medusa.slots = config_dict.placeholder(str)  # None: argmax, as it was trained
    draft.parallel = ml_collections.ConfigDict()
    draft.parallel.slots = config_dict.placeholder(str)  # argmax or sampled; as trained
    # One of size, rank and tokens.
    draft.trimmed = ml_collections.ConfigDict()
    draft.trimmed.size = config_dict.placeholder(int)  # ids that the head keeps
    draft.trimmed.texts = config_dict.placeholder(str)  # outputs to count, one a line
    draft.trimmed.rank = config_dict.placeholder(int)  # of the head, all ids kept
    draft.trimmed.tokens = config_dict.placeholder(str)  # a file of ids, one a line
    draft.cascade = ml_collections.ConfigDict()
    draft.cascade.drafter = config_dict.placeholder(str)  # None: ngram
    draft.cascade.checkpoint = config_dict.placeholder(str)  # of its model, if any
    draft.cascade.gamma = config_dict.placeholder(int)  # tokens it drafts; None: 3
    draft.length = _length()
    return draft


def _length() -> ml_collections.ConfigDict:
    """When a row has drafted enough, for drafts that are written token by token."""
    length = ml_collections.ConfigDict()
    # fixed, heuristic, confidence, entropy, acceptance, bandit, optimal. None: every
    # block has gamma tokens, which are the most in any case.
    length.rule = config_dict.placeholder(str)
    length.fixed = ml_collections.ConfigDict()
    length.fixed.length = config_dict.placeholder(int)
    length.heuristic = ml_collections.ConfigDict()
    length.heuristic.start = config_dict.placeholder(int)  # None: 5
    length.heuristic.up = config_dict.placeholder(int)  # None: 2
    length.heuristic.down = config_dict.placeholder(int)  # None: 1
    length.confidence = ml_collections.ConfigDict()
    length.confidence.threshold = config_dict.placeholder(float)  # None: 0.4
    length.entropy = ml_collections.ConfigDict()
    length.entropy.kappa = config_dict.placeholder(float)  # None: 0.2
    length.entropy.start = config_dict.placeholder(float)  # None: 0.4
    length.entropy.aim = config_dict.placeholder(float)  # None: 0.9
    length.entropy.memory = config_dict.placeholder(float)  # None: 0.5
    length.entropy.step = config_dict.placeholder(float)  # None: 0.01
    length.acceptance = ml_collections.ConfigDict()
    # A folder that experiments.train_acceptance wrote.
    length.acceptance.head = config_dict.placeholder(str)
    length.acceptance.threshold = config_dict.placeholder(float)  # None: 0.7
    length.bandit = ml_collections.ConfigDict()
    # Names of others. None: heuristic,confidence,entropy
    length.bandit.rules = config_dict.placeholder(str)
    length.bandit.blend = config_dict.placeholder(float)  # None: 0.5
    length.bandit.explore = config_dict.placeholder(float)  # None: 1
    length.optimal = ml_collections.ConfigDict()
    length.optimal.cost = config_dict.placeholder(float)  # c
    length.optimal.growth = config_dict.placeholder(float)  # dv; None: 0
    length.optimal.verify = config_dict.placeholder(float)  # v; None: 1
    length.optimal.prior = config_dict.placeholder(float)  # None: 0.7
    length.optimal.weight = config_dict.placeholder(float)  # None: 4
    return length
