"""Table 2 with real weights: the original T5-11B translates, smaller ones draft.

    python -m experiments.reproduce --config=configs/t5_11b_ende.py --workdir=DIR \
        --config.target.checkpoint=T5_11B --config.draft.checkpoint=T5_SMALL \
        --config.draft_cost.base.checkpoint=T5_BASE \
        --config.draft_cost.large.checkpoint=T5_LARGE --config.task.ende.input=FILE

Expected: DIR/report.html, each figure beside the paper's. The original T5 (t5-11b,
t5-small, ..., not 1.1) was trained on WMT 14 among other tasks, told apart by a prefix,
and needs no fine-tuning; the paper's own models were 1.1, fine-tuned, and are not
public. Folders are in Hugging Face's layout. In bfloat16 the pair takes some 25 GB.
With one draft alone: --config.target_cost.own.drafts=small
"""

import ml_collections

from configs import leviathan


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.reproduce`."""
    return original("ende", "translate English to German: ")


def original(name: str, prefix: str) -> ml_collections.ConfigDict:
    """The settings of a task of the original T5.

    Args:
        name: of the task in `configs/leviathan.py`.
        prefix: that tells it.
    """
    config = leviathan.get_config("full")
    drafts = ("small", "base", "large")
    with config.unlocked():
        for other in list(config.task):
            if other != name:
                del config.task[other]
        config.task[name].task_prefix = prefix
        config.task[name].folder = ""
        config.target_cost = dict(
            own=dict(widen="", drafts=drafts, lines=8, repeats=3, recompute=True)
        )
        for draft in config.draft_cost.values():
            draft.widen = ""
    config.figure5.update(task=name, target="own")
    config.max_length = 128
    return config
