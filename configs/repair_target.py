"""A target for `repair` alone: a T5 1.1 of 9.1 M parameters.

    python -m experiments.train --config=configs/repair_target.py \
        --config.data.folder=DATA --workdir=DIR

DATA comes from `python -m experiments.prepare --config=configs/repair_data.py`.
Expected: DIR/export, a Hugging Face directory, after about an hour on two free cores.
More steps make it better.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.train`."""
    return ml_collections.ConfigDict(
        dict(
            seed=0,
            # dictionary, random, target, or the directory of a trained model; "zoo/..."
            # ships with specjax.
            init="mimetic",
            init_layers=dict(encoder=(), decoder=()),  # of the target, for "target"
            label_smoothing=0.0,
            z_loss=0.0,  # weight of log(normaliser)^2; T5's is 1e-4
            # For early exits, both 0 for none: `specjax.training.layer_skip`.
            layer_dropout=0.0,  # chance that the last decoder layer is left out
            exit_loss=0.0,  # weight of the loss at an earlier decoder layer
            accumulate=1,  # micro-batches of a step, one after another
            # Sizes that come to the number of devices: data=4,model=2. Each matrix, its
            # moments too, is split over all of them. Empty: one device.
            mesh="",
            # bfloat16; bfloat16_products, which rounds the factors of products alone
            # and is twice as fast on a CPU with AMX; empty: the parameters' float32.
            compute_dtype="",
            log_every=20,
            evaluate_every=200,  # teacher-forced, on all the held-out rows
            decode_every=0,  # steps between greedy decodes; 0: never
            evaluate=dict(  # what these decodes are
                rows=200,  # of the held-out, the first
                max_length=97,  # decoder tokens, start token included
                batch_size=50,
                # More of them: `specjax.metrics.text`. All but the first need the
                # extra `data`.
                scores=("exact_match", "character_error_rate", "bleu", "chrf"),
            ),
            checkpoint_every=100,  # and at every evaluation
            keep=3,  # the newest checkpoints, and one more:
            best="validation_nll",  # by this metric; empty: none
            tensorboard=False,  # DIR/tensorboard; needs the extra `data`
            measure_peak=False,  # log the share of the machine's matrix product
            model=dict(
                vocab_size=4096,
                d_model=256,
                d_kv=32,
                num_heads=8,
                d_ff=768,
                num_encoder_layers=3,
                num_decoder_layers=4,
                dropout_rate=0.0,  # two passes over the data: nothing to overfit
            ),
            optimizer=dict(
                learning_rate=1.2e-3,
                warmup_steps=100,
                steps=2700,
                schedule="trapezoid",
                decay_steps=1800,
                weight_decay=0.01,
                clip=1.0,
                b1=0.9,
                b2=0.98,
            ),
            data=dict(
                folder="",  # train.jsonl, validation.jsonl, spiece.model
                train="",  # another training file; empty: folder/train.jsonl
                validation="",  # empty: folder/validation.jsonl
                buckets=(16, 24, 32, 48, 96),  # tokens of the longer side
                max_tokens=96,  # of either side; longer examples stay out
                tokens_per_batch=1536,  # padded target tokens
                multiple_of=1,  # rows of a batch: of a multiple of a mesh's data
                validation_rows=1000,
            ),
            # A draft learns from a target's laws on the training texts, which are best
            # the target's own (`experiments.generate`). Empty: from the texts alone.
            distill=dict(
                target="",  # a folder, or "zoo/..."
                name="forward_kl",  # see `specjax.training.distill`
                beta=0.5,
                decay=3.0,
                target_temperature=1.0,
                draft_temperature=1.0,
                # Shares of the steps that learn on the training file's texts, on what
                # the target writes at that moment, and on what the draft writes.
                # These two at a temperature; 0: greedily.
                texts=dict(truth=1.0, target=0.0, draft=0.0, temperature=1.0),
            ),
            export=dict(which="last", dtype="float16"),  # last or best checkpoint
        )
    )
