"""Data of the `ende` task: English package descriptions to German.

    python -m experiments.prepare --config=configs/ende_data.py --workdir=DIR

Expected (Debian bookworm, two minutes on one core): DIR/train.jsonl with 41,600 pairs
(summaries, sentences, list items and paragraphs of up to 400 characters),
validation.jsonl and test.jsonl with 700-800 each from other packages, spiece.model
with 1,948 pieces of both languages (2,048 ids with the 100 sentinels), and data.json
with the counts.

Programs' messages give more pairs for the training split: 126,519 from the packages
that `configs/ende_packages.txt` names (2.6 GB to fetch, of which 21 MB are catalogues).
Any package with German catalogues will do; one that is not to be had is left out.

    for package in $(cat configs/ende_packages.txt); do
        apt-get download $package && dpkg-deb -x ${package}_*.deb MORE
        rm -f ${package}_*.deb
    done
    python -m experiments.prepare --config=configs/ende_data.py \
        --config.catalogues=MORE --workdir=DIR
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The settings of `experiments.prepare`."""
    return ml_collections.ConfigDict(
        dict(
            task="ende",
            seed=0,
            lists="",  # folder of the package lists; empty: DIR/lists
            by_sentence=True,  # cut paragraphs where both sides have equally many
            max_length=400,  # characters of either side
            max_ratio=3.0,  # of the two sides' lengths
            catalogues="",  # folder of de/LC_MESSAGES/*.mo at any depth, for more pairs
            num_pieces=1948,  # without the sentinels
            tokenizer="",  # a folder or spiece.model to copy; empty: train num_pieces
            prefix="",  # before every source: T5's is "translate English to German: "
        )
    )
