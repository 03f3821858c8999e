"""Table 2 with real weights: the original T5-11B summarises, smaller ones draft.

    python -m experiments.reproduce --config=configs/t5_11b_cnndm.py --workdir=DIR \
        --config.target.checkpoint=T5_11B --config.draft.checkpoint=T5_SMALL \
        --config.draft_cost.base.checkpoint=T5_BASE \
        --config.draft_cost.large.checkpoint=T5_LARGE --config.task.synopsis.input=FILE

Expected: DIR/report.html, each figure beside the paper's; see `configs/t5_11b_ende.py`.
FILE holds an article a line, of at most 512 tokens each.
"""

import ml_collections

from configs import t5_11b_ende


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.reproduce`."""
    return t5_11b_ende.original("synopsis", "summarize: ")
