"""Data of XSum summarisation: a BBC article to one sentence, with T5's prefix.

    pip install 'specjax[hub]'
    python -m experiments.prepare --config=configs/xsum_data.py --workdir=DIR \
        --config.tokenizer=T5

See `configs/wmt_data.py`. Expected by the corpus's own counts: 204,045 training pairs,
11,332 for validation and 11,334 for the test.
"""

import ml_collections

from configs import cnn_dailymail_data


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.prepare`."""
    config = cnn_dailymail_data.get_config()
    config.dataset, config.name = "EdinburghNLP/xsum", ""
    # The main branch may hold a loading script, which newer `datasets` refuse to run.
    config.revision = "refs/convert/parquet"
    config.source_field, config.target_field = "document", "summary"
    config.metrics = ("rouge1", "rouge2", "rougeL")
    return config
