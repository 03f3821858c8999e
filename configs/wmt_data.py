"""Data of English-to-German translation as in T5: WMT14, tested on newstest2014.

    pip install 'specjax[hub,data]'
    python -m experiments.prepare --config=configs/wmt_data.py --workdir=DIR \
        --config.tokenizer=T5

T5 is the folder of a T5 checkpoint or its spiece.model. Needs the hub (or a copy of the
data set in a folder, --config.dataset) and sacrebleu's download of the test set.
Expected by the corpus's own counts: 4,508,785 training pairs, 3,000 of newstest2013 and
3,003 of newstest2014. --config.limit=100000 makes a small beginning.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.prepare`."""
    return ml_collections.ConfigDict(
        dict(
            task="hub",
            seed=0,
            dataset="wmt/wmt14",  # on the hub, or a folder of train.jsonl and the like
            name="de-en",  # the data set's configuration
            revision="",  # the hub's branch or commit; empty: the main one
            source_field="translation.en",
            target_field="translation.de",
            test_set="wmt14/full",  # of sacrebleu; empty: the data set's own test split
            langpair="en-de",  # of the test set
            limit=0,  # the first rows of each of the data set's splits; 0: all
            max_source=0,  # characters; 0: any length; longer pairs are left out
            max_target=0,
            shorten=False,  # cut long sources to their leading whole sentences instead
            num_pieces=32000,  # without the sentinels
            tokenizer="",  # a folder or spiece.model to copy; empty: train num_pieces
            prefix="translate English to German: ",
            metrics=("bleu",),  # what the task is measured by, for the record
        )
    )
