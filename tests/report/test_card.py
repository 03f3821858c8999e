"""The card names the model, its recipe, its scores, and leaves out what is not so."""

import dataclasses

from configs import repair_target
from specjax.models import t5_config
from specjax.report import card
from specjax.training import optimizer

LINES = [
    {"step": 10, "loss": 3.0},
    {"step": 10, "validation_nll": 2.5, "alpha_greedy": 0.75},
    {"step": 20, "validation_nll": 1.5},
]


def card_of(step=10, picture=None, starts=(), **changes) -> str:
    config = repair_target.get_config()
    config.update_from_flattened_dict(changes)
    manifest = {
        "config": config.to_dict(),
        "effective": {
            "train_rows": 1234,
            "too_long": {"a": 2, "b": 0},
            "starts": starts,
        },
        "versions": {"jax": "1.2.3"},
        "command": "train --config=x",
    }
    shape = dataclasses.asdict(t5_config.T5Config(**config.model))
    own = dataclasses.asdict(optimizer.OptimizerConfig(**config.optimizer))
    return card.markdown(
        "a target", shape, 9_000_000, own, manifest, LINES, step, picture
    )


def test_what_it_says():
    text = card_of()
    assert text.startswith("# a target\n")
    for part in (
        "T5 of 9,000,000 parameters: d_model 256,",
        "10 steps of 1,536 positions",
        "adamw, peak learning rate 0.0012, schedule trapezoid, dropout 0,",
        "started from mimetic; 1,234 training pairs (2 longer ones left out).",
        "| validation_nll | 2.5 |\n| alpha_greedy | 0.75 |",
        "Made by `train --config=x` with jax 1.2.3.",
    ):
        assert part in text, part
    assert "Distilled" not in text and "![" not in text


def test_scores_are_those_of_the_weights():
    assert "| validation_nll | 1.5 |" in card_of(step=20)
    assert "Held out" not in card_of(step=5)


def test_every_start_of_a_run_is_named():
    starts = [{"step": 0, "command": "train"}, {"step": 8, "command": "train --a=1"}]
    assert "- from step 8: `train --a=1`\n" in card_of(starts=starts)
    assert "from step" not in card_of(starts=starts[:1])


def test_a_draft_and_its_curves():
    changes = {"distill.target": "zoo/x/target", "distill.texts.draft": 0.25}
    text = card_of(picture="curves.svg", **changes)
    wanted = (
        "Distilled from zoo/x/target by forward_kl on texts of: truth 1, draft 0.25."
    )
    assert wanted in text
    assert "![loss and learning rate by step](curves.svg)" in text
