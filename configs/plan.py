"""What each device holds while T5-XXL decodes, on four kinds of device.

    python -m experiments.plan --config=configs/plan.py --workdir=runs/plan

Expected: a table with the bytes of weights, caches, laws and activations on each
device, and whether they fit; nothing is loaded or allocated. With the compiler's own
figures beside ours where a device is a TPU (extra `tpu`; half a minute each):

    --config.compile=True
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.plan`."""
    return ml_collections.ConfigDict(
        dict(
            # A preset of `specjax.models.t5_config`, or a model's folder.
            target="t5-v1_1-xxl",
            draft="t5-v1_1-small",  # empty: the target decodes alone
            split_draft=False,  # over the mesh's model axis; else all on each device
            dtype="bfloat16",  # float32, bfloat16
            batch_size=1,
            source_length=128,
            max_length=128,  # decoder tokens
            gamma=7,
            temperature=0.0,  # 0: greedy
            # Devices of `specjax.roofline.Device.presets()`, and how they are laid out.
            place=dict(
                v5e=dict(device="TPU v5e", mesh="model=4"),
                v4=dict(device="TPU v4", mesh="model=1"),
                h200=dict(device="H200", mesh="model=1"),
                a100=dict(device="A100-40GB", mesh="model=2"),
            ),
            compile=False,
        )
    )
