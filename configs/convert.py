"""Writes a checkpoint of T5X, PyTorch, Flax or safetensors anew, for Orbax or others.

    python -m experiments.convert --config=configs/convert.py \
        --from=t5-11b --to=hf --config.dtype=bfloat16 --workdir=runs/t5-11b

Expected: runs/t5-11b/export, a folder for ``config.target.checkpoint``. Its logits are
those of the source to the last bit, once that one's weights are rounded to the type.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.convert`."""
    return ml_collections.ConfigDict(
        dict(
            # A folder, "zoo/...", or a URL that fsspec knows; --from is shorter.
            source="",
            to="hf",  # hf (safetensors), orbax; --to is shorter
            # Stored type: float32, bfloat16, float16 (hf alone); empty: the source's.
            dtype="",
            # The shape of a T5X checkpoint, by the name of a published one; empty: that
            # of its config.json or, where there is none, of its tensors.
            preset="",
            # Tensors beyond so many gigabytes go to further files; a file is in memory
            # as a whole.
            shard_gigabytes=5.0,
            # Both models are run in this type, and their logits compared: float32,
            # bfloat16, or empty not to compare them. Each is in memory as a whole.
            check="float32",
        )
    )
