"""Decodes the training sources with the target: what the draft learns from.

    python -m experiments.generate --config=configs/repair_generate.py \
        --config.target.checkpoint=TARGET --input=DATA/train.jsonl --workdir=DIR

Expected: DIR/generated.jsonl, one source and the target's own output per line. A run
that was stopped goes on where it was.
"""

import ml_collections
from ml_collections import config_dict

from configs import drafting


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.generate`."""
    return ml_collections.ConfigDict(
        dict(
            target=dict(checkpoint="", widen=config_dict.placeholder(str)),
            # What drafts for the target, as in `configs/demo.py`; empty: nothing does.
            drafter="",
            draft=drafting.get_settings(""),
            gamma=4,
            verifier="token",
            input="",  # JSONL with "source" and "target", or a two-column TSV
            limit=0,  # decode only so many lines; 0: all
            # Greedy where the temperature is None.
            sampling=dict(
                temperature=config_dict.placeholder(float),
                top_k=config_dict.placeholder(int),
                top_p=config_dict.placeholder(float),
            ),
            buckets=(16, 24, 32, 48, 96),  # source lengths that are padded to
            max_length=96,
            batch_size=128,
            chunk=4096,  # lines that are decoded, then written, together
            # Sizes that come to the number of devices: data=2,model=4. Empty: one.
            mesh="",
            # Several processes, each with its devices, that run the same command.
            distributed=dict(
                # Of the first: host:port; auto: jax asks Slurm or the TPU. Empty: one.
                coordinator="",
                processes=0,
                process=config_dict.placeholder(int),  # which this is, from 0
                timeout=60,  # seconds without word from another: all end
            ),
            dtype="float32",
            seed=0,
        )
    )
