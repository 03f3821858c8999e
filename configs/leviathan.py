"""Leviathan et al. 2023 (arXiv:2211.17192), every table and figure, walked here.

    python -m experiments.reproduce --config=configs/leviathan.py:small --workdir=DIR

Expected: DIR/report.html and report.md, each figure beside the paper's; some twenty
minutes on two free cores. ":full" is for one GPU or TPU of 80 GB or more: T5-XXL's cost
in bfloat16. A run that was stopped goes on with what it lacks. A part of it:
--only=table1,table3. Trained models of your own, of any size:

    --config.tasks=ende --config.target.checkpoint=DIR --config.draft.checkpoint=DIR
"""

import pathlib

import ml_collections

_HERE = pathlib.Path(__file__)


def get_config(which: str = "small") -> ml_collections.ConfigDict:
    """Settings of `experiments.reproduce`.

    Args:
        which: "small", for a laptop, or "full".
    """
    sizes = {"small": _small, "full": _full}
    if which not in sizes:
        raise ValueError(f"configs/leviathan.py:{which}: small or full")
    config = ml_collections.ConfigDict(
        dict(
            tasks="all",  # of `task`, with commas between
            target_costs="all",  # of `target_cost`
            # Empty: each task's own, FOLDER/target and FOLDER/draft.
            target=dict(checkpoint=""),
            draft=dict(checkpoint=""),
            task=dict(
                ende=dict(
                    folder="zoo/ende",
                    paper="EnDe",  # whose rows of the paper stand beside
                    task_prefix="",
                    input=str(_HERE.with_name("demo_ende.txt")),
                    # Texts of the target's language, one a line, that unigrams and
                    # bigrams are counted on. Empty: FOLDER/unigram and FOLDER/bigram
                    # (experiments.count), or where they lack the target's own texts of
                    # other lines.
                    counts="",
                ),
                synopsis=dict(
                    folder="zoo/synopsis",
                    paper="CNNDM",
                    task_prefix="summarize: ",
                    input=str(_HERE.with_name("demo_synopsis.txt")),
                    counts="",
                ),
            ),
            gammas=(3, 7),  # among which the best is taken; one: that one
            # For that choice alone: what each drafted token adds to the pass that
            # verifies, in steps. c is taken from the bytes that both decoders read.
            verify_growth=0.08,
            leniences=(1.0, 0.5, 0.3, 0.1),
            # Texts per line at temperature 1, of how many rows a batch, and the depth
            # down to which survival is computed.
            acceptance=dict(draws=8, batch_size=8, depth=16),
            buckets=(32, 64, 128, 256, 512),  # a task takes the least for all its lines
            max_length=96,
            dtype="float32",
            seed=0,
            # Of each timing of a part: least length in seconds, and how many.
            timing=dict(seconds=0.05, repeats=5),
        )
    )
    config.update(sizes[which]())
    return config


def _small() -> dict[str, object]:
    return dict(
        # What the target is widened to, the drafts that stand before it, how many lines
        # are timed and how often, and whether the baseline that projects its source
        # anew at every step is timed too.
        target_cost=dict(
            base=_cost("t5-v1_1-base", ("shipped", "small"), recompute=True),
            # The rows that the paper stars; with this draft c is nearest to its own.
            large=_cost("t5-v1_1-large", ("shipped",)),
        ),
        # The same of drafts; each stands beside the paper's rows of a draft. An empty
        # checkpoint: `draft.checkpoint`, or the task's own.
        draft_cost=dict(
            shipped=dict(checkpoint="", widen="", paper="T5-small"),
            small=dict(checkpoint="", widen="t5-v1_1-small", paper="T5-small"),
        ),
        # The decodes whose parts are drawn to scale.
        figure5=dict(task="ende", target="base", draft="shipped", gammas=(7, 3)),
    )


def _full() -> dict[str, object]:
    drafts = ("small", "base", "large")
    return dict(
        target_cost=dict(xxl=_cost("t5-v1_1-xxl", drafts, recompute=True)),
        draft_cost={
            size: dict(checkpoint="", widen=f"t5-v1_1-{size}", paper=f"T5-{size}")
            for size in drafts
        },
        figure5=dict(task="ende", target="xxl", draft="small", gammas=(7, 3)),
        gammas=(3, 5, 7),
        verify_growth=0.0,
        dtype="bfloat16",
    )


def _cost(
    widen: str, drafts: tuple[str, ...], recompute: bool = False
) -> dict[str, object]:
    return dict(widen=widen, drafts=drafts, lines=8, repeats=3, recompute=recompute)
