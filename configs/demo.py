"""Restores casing, punctuation and typos with the shipped pair.

    python -m experiments.decode --config=configs/demo.py --workdir=runs/demo

Expected: every greedy output identical both ways; the README's table holds measured
speedups, which are near 1 on a CPU. Any other pair:

    --config.target.checkpoint=DIR --config.draft.checkpoint=DIR --input=FILE
"""

import pathlib

import ml_collections
from ml_collections import config_dict

from configs import drafting


def get_config() -> ml_collections.ConfigDict:
    """Settings of `experiments.decode`."""
    config = ml_collections.ConfigDict()
    # A folder in Hugging Face's T5 layout; "zoo/..." is a pair that ships with specjax.
    config.target = ml_collections.ConfigDict({"checkpoint": "zoo/repair/target"})
    # The published size whose cost it has, such as t5-v1_1-base, at the same text and
    # acceptance. None: its own. Also of the draft.
    config.target.widen = config_dict.placeholder(str)
    config.draft = drafting.get_settings("zoo/repair/draft")
    config.drafter = "model"  # ngram, parallel, ...: experiments/build_drafter.py
    # token, block, exact_match, coupled, recursive, recursive_distinct, kseq,
    # best_path, traversal; all but the first two also judge trees. Knowingly lossy, of
    # chains: lenient, typical.
    config.verifier = "token"
    config.lenient = ml_collections.ConfigDict()
    config.lenient.lenience = config_dict.placeholder(float)  # None: 0.5
    config.typical = ml_collections.ConfigDict()
    config.typical.epsilon = config_dict.placeholder(float)  # None: 0.3
    config.typical.delta = config_dict.placeholder(float)  # None: 0.09
    # The parent of each node of a tree of drafts, root first: -1,0,0,1,1,2. Empty: a
    # chain. "auto" measures, and picks a tree of at most so many nodes, for the last
    # of the runs.
    config.tree = config_dict.placeholder(object)
    config.tree = ""
    config.tree_nodes = config_dict.placeholder(int)  # None: 16
    # independent, paths, distinct or chosen; empty: as the verifier needs them.
    config.siblings = ""
    # Tokens drafted per target call. "auto" measures, and may decide for plain
    # decoding. None: 7, or the depth of the tree.
    config.gamma = config_dict.placeholder(object)
    config.runs = ("greedy", "sampled")
    # Of the sampled run. None is off; the draft's default to the target's.
    config.sampling = _sampling()
    config.sampling.temperature = 1.0
    config.draft_sampling = _sampling()
    config.controls = _controls()
    config.samples = 1  # of each line, side by side, in the sampled run
    config.input = str(pathlib.Path(__file__).with_name("demo_repair.txt"))
    config.task_prefix = "repair: "  # put before each line
    config.decoder_prefix = ""  # what every output begins with
    # Texts that end an output, which keeps them, spelled as at a word's start or within
    # one; several with commas between.
    config.stop = ()
    config.buckets = (64, 128, 256, 512)  # source lengths that are padded to
    config.max_length = 96  # decoder tokens, start token and EOS included
    config.batch_size = 1
    # Devices, by the axes that split rows (data) and the target's heads, hidden units
    # and vocabulary (model): data=2,model=4. Empty: one device.
    config.mesh = ""
    config.dtype = "float32"  # float32, bfloat16
    config.seed = 0
    config.repeats = 3  # timed passes; the median counts
    return config


def _sampling() -> ml_collections.ConfigDict:
    sampling = ml_collections.ConfigDict()
    sampling.temperature = config_dict.placeholder(float)
    sampling.top_k = config_dict.placeholder(int)
    sampling.top_p = config_dict.placeholder(float)
    return sampling


def _controls() -> ml_collections.ConfigDict:
    """Of every run, on both models; `specjax.controls` says what each does."""
    controls = ml_collections.ConfigDict()
    # Decoder tokens, counted as max_length.
    controls.min_length = config_dict.placeholder(int)
    controls.banned_ids = ()
    # As the tokenizer spells them at a word's start: mail,server.
    controls.banned_words = ()
    controls.repetition_penalty = config_dict.placeholder(float)  # above 1: against
    controls.frequency_penalty = config_dict.placeholder(float)  # per occurrence
    controls.presence_penalty = config_dict.placeholder(float)
    controls.no_repeat_ngram = config_dict.placeholder(int)
    return controls
