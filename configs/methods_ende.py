"""Every drafter at its best setting, on translation and on synopses.

    python -m experiments.compare --config=configs/methods_ende.py --workdir=DIR

Expected: DIR/methods.md, methods.csv and methods.png: a row per task, cost of the
target and method. An hour and a half on two free cores; a comparison that was stopped
goes on with the cells that it lacks. A part of it: --config.tasks=ende,
--config.levels=shipped, --config.methods=model,ngram,parallel.
"""

import pathlib

import ml_collections

_HERE = pathlib.Path(__file__)


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.compare`."""
    return ml_collections.ConfigDict(
        dict(
            tasks=("ende", "synopsis"),
            levels=("shipped", "base", "large"),
            methods="all",  # or names, with commas between
            task=dict(
                ende=dict(
                    folder="zoo/ende",  # {folder} of the methods
                    task_prefix="",
                    input=str(_HERE.with_name("demo_ende.txt")),
                ),
                synopsis=dict(
                    folder="zoo/synopsis",
                    task_prefix="summarize: ",
                    input=str(_HERE.with_name("demo_synopsis.txt")),
                ),
            ),
            # What the target is widened to, how many lines are timed, and how often.
            level=dict(
                shipped=dict(widen="", lines=10, repeats=3),
                base=dict(widen="t5-v1_1-base", lines=8, repeats=3),
                large=dict(widen="t5-v1_1-large", lines=4, repeats=2),
            ),
            # A name, its drafter (`config.drafter` of `experiments.decode`), the
            # settings of `config.draft`, and what training it took.
            method=dict(
                model=_method("model", "draft"),
                model_confidence=_method(
                    "model", "draft", length=dict(rule="confidence")
                ),
                model_optimal=_method(
                    "model",
                    "draft",
                    length=dict(rule="optimal", optimal=dict(cost=0.1)),
                ),
                trimmed=_method("trimmed", "draft", trimmed=dict(rank=64)),
                cascade=_method("cascade", "draft", cascade=dict(drafter="ngram")),
                ngram=_method("ngram"),
                suffix=_method("suffix", "suffix"),
                unigram=_method("unigram", "unigram"),
                bigram=_method("bigram", "bigram"),
                early_exit=_method("early_exit", "early_exit"),
                medusa=_method("medusa", "medusa"),
                eagle=_method("eagle", "eagle"),
                parallel=_method("parallel", "parallel"),
                # Its weights a token at a time: where one pass breaks even.
                parallel_chain=_method("parallel_chain", "parallel"),
                quantized=_method("quantized"),
            ),
            gamma=7,  # the most that is drafted; each method's best is looked for
            temperature=1.0,  # of the sampled runs
            seeds=4,  # draws of each line that sampled acceptance is counted on
            buckets=(64, 128, 256, 512),
            max_length=96,
            dtype="float32",
            seed=0,
            # Of each timing of a part: least length in seconds, and how many.
            timing=dict(seconds=0.05, repeats=5),
        )
    )


def _method(drafter: str, part: str = "", **settings: object) -> dict[str, object]:
    """A method whose draft stands in the task's own folder, under `part`."""
    checkpoint = f"{{folder}}/{part}" if part else ""
    return dict(drafter=drafter, checkpoint=checkpoint, draft=settings)
