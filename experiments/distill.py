"""Trains a draft against a target: to say what the target says.

    python -m experiments.distill --config=configs/repair_draft.py \
        --config.data.folder=DATA --workdir=DIR

``config.distill`` says which divergence from the target's laws, and on whose texts:
those of the training file (people's, or what `experiments.generate` wrote), the
target's, or the draft's own, written while it trains. Everything else is as in
`experiments.train`. Evaluations log alpha as the paper measures it, on the target's own
greedy and sampled texts of held-out sources: ``alpha_greedy`` and ``alpha_sampled``.
"""

from __future__ import annotations

import pathlib

import ml_collections
from absl import flags

from experiments import command, train
from specjax import errors


def main(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, values: flags.FlagValues
) -> None:
    """Runs the command."""
    if not config.get("distill", {}).get("target"):
        raise errors.InputError(
            "config.distill.target is empty: name the target's folder (python -m "
            "experiments.train trains without one)"
        )
    train.run(config, workdir, values)


if __name__ == "__main__":
    command.run(main, define=train.define)
