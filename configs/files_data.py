"""Any pairs as a task: TSV or JSONL files of your own.

    python -m experiments.prepare --config=configs/files_data.py --workdir=DIR \
        --config.train='a.jsonl,more/*.jsonl' --config.validation=b.tsv \
        --config.test=c.tsv

A `.tsv` file has a source, a tab and a target in each line, or a header that names its
columns (`--config.header`); a `.jsonl` file has an object in each line. Expected: all
pairs in DIR/{train,validation,test}.jsonl, DIR/spiece.model, and DIR/data.json with the
counts, those of held-out sources that stand in the training split among them.

Several tasks for one model: prepare each with one tokenizer and a prefix of its own,
then name their files here, with `--config.apart`, and that tokenizer.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.prepare`."""
    return ml_collections.ConfigDict(
        dict(
            task="files",
            seed=0,
            train="",  # names and patterns of files, with commas between
            validation="",
            test="",
            source_key="source",  # the field of JSONL, or the column under a header
            target_key="target",
            header=False,  # the first line of a TSV file names its columns
            max_source=0,  # characters; 0: any length; longer pairs are left out
            max_target=0,
            apart=False,  # leave out training pairs with a held-out source or target
            shorten=False,  # cut long sources to their leading whole sentences instead
            num_pieces=7900,  # without the sentinels
            tokenizer="",  # a folder or spiece.model to copy; empty: train num_pieces
            prefix="",  # before every source
        )
    )
