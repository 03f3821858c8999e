"""Data of CNN/DailyMail summarisation as in T5: an article to its highlights.

    pip install 'specjax[hub]'
    python -m experiments.prepare --config=configs/cnn_dailymail_data.py \
        --workdir=DIR --config.tokenizer=T5

See `configs/wmt_data.py`. Expected by the corpus's own counts: 287,113 training pairs,
13,368 for validation and 11,490 for the test; articles are cut to the whole sentences
of their first 2,000 characters, about T5's 512 tokens.
"""

import ml_collections

from configs import wmt_data


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.prepare`."""
    config = wmt_data.get_config()
    config.dataset, config.name = "abisee/cnn_dailymail", "3.0.0"
    config.source_field, config.target_field = "article", "highlights"
    config.test_set, config.langpair = "", ""
    config.max_source, config.shorten = 2000, True
    config.prefix = "summarize: "
    config.metrics = ("rouge1", "rouge2", "rougeLsum")
    return config
