"""What cannot be decoded ends in one sentence, before anything is compiled."""

import dataclasses
import os
import shutil

import numpy as np
import pytest

from experiments import baseline, build, input_lines, side_by_side
from specjax import errors, metrics
from specjax.data import tokenizer as tokenizers
from tests import pairs


@pytest.fixture
def refused(folders, tmp_path, monkeypatch):
    """Runs a decode that must end before any work, and returns its sentence."""

    def work(*args, **settings):
        raise AssertionError("decoding began")

    monkeypatch.setattr(baseline, "autoregressive_generate", work)
    monkeypatch.setattr(baseline, "speculative_generate", work)
    monkeypatch.setattr(metrics, "measure_costs", work)
    workdir = tmp_path / "new"

    def run(*settings, **changes):
        own = dataclasses.replace(folders, **changes)
        run = pairs.run_decode(own, workdir, *settings)
        assert run.code == 2, run.out
        assert run.err.startswith("error: ") and run.err.count("\n") == 1, run.err
        assert run.out == "" and not workdir.exists()
        return run.err

    return run


LONG = " ".join(pairs.LINES)
INPUTS = {
    "an empty line": (b"many files\n\nit opens\n", "line 2 is empty"),
    "only spaces": (b"many files\n \t\n", "line 2 is empty"),
    "nothing that shows": ("many files\n\u200b\0\n".encode(), "line 2 is empty"),
    "too long": (f"many files\n{LONG}\n".encode(), "line 2 has"),
    "nothing": (b"", "is empty"),
    "one line end": (b"\n", "line 1 is empty"),
    "not UTF-8": ("Größe\n".encode("latin-1"), "not UTF-8"),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input(refused, tmp_path, name):
    content, expected = INPUTS[name]
    path = tmp_path / "lines.txt"
    path.write_bytes(content)
    sentence = refused(input=path)
    assert expected in sentence and f"--input={path}" in sentence


def test_too_long_a_line_says_what_would_fit(refused, tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text(LONG)
    sentence = refused(input=path)
    assert f"the longest of config.buckets is {pairs.BUCKET}" in sentence


def test_no_input_file(refused, tmp_path):
    assert "no such file" in refused(input=tmp_path / "absent.txt")
    assert "no such file" in refused(input=tmp_path)


def test_lines_may_end_as_on_windows(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_bytes("one\r\ntwo \u2028 2\r3".encode())
    # Nothing else that Python takes for a line's end is one.
    assert input_lines.read_lines(path) == ["one", "two \u2028 2\r3"]


SETTINGS = {
    "gamma=0": "config.gamma is 0: it must be a whole number",
    "gamma=-1": "config.gamma is -1",
    "gamma=1.5": "config.gamma is 1.5",
    "gamma=x": "at least 1, or auto (which may decide for plain decoding)",
    "gamma=True": "config.gamma is True",
    "sampling.top_p=0": "config.sampling.top_p is 0.0: it must be in (0, 1]",
    "sampling.top_p=1.5": "config.sampling.top_p is 1.5",
    "sampling.top_k=0": "config.sampling.top_k is 0: it must be a whole number",
    "sampling.temperature=0": "config.sampling.temperature is 0, which is the greedy",
    "sampling.temperature=-1": "config.sampling.temperature is -1.0",
    "sampling.temperature=nan": "config.sampling.temperature is nan",
    "draft_sampling.top_p=0": "config.draft_sampling.top_p is 0.0",
    "drafter=tree": "config.drafter is 'tree': it must be one of model, ngram",
    "verifier=best": "config.verifier is 'best': it must be one of token, block",
    "verifier=lenient config.lenient.lenience=0": "config.lenient: lenience is 0.0",
    "verifier=typical config.typical.delta=0": "config.typical: epsilon is 0.3 and de",
    "lenient.lenience=0.5": "config.lenient is set and config.verifier is 'token'",
    "siblings=distinct": "config.siblings is 'distinct' and config.tree is empty",
    "dtype=float16": "config.dtype is 'float16': it must be one of float32, bfloat16",
    "dtype=float64": "config.dtype is 'float64'",
    "runs=beam": "config.runs has 'beam': it takes some of greedy, sampled",
    "runs=()": "config.runs is (): it takes some of greedy, sampled",
    "runs=5,5": "config.runs has 5: it takes some of greedy, sampled",
    "seed=-1": "config.seed is -1",
    "seed=4294967296": "config.seed is 4294967296",
    "max_length=1": "config.max_length is 1: at least 2",
    "max_length=0": "config.max_length is 0",
    "batch_size=0": "config.batch_size is 0: at least 1",
    "repeats=0": "config.repeats is 0",
    "buckets=()": "length buckets [] are wrong",
    "buckets=64,32": "length buckets [64, 32] are wrong",
    "buckets=x": "config.buckets is ('x',)",
    "target.checkpoint=": "config.target.checkpoint is empty",
    "target.checkpoint=absent": "config.target.checkpoint is 'absent': no such folder",
    "draft.checkpoint=absent": "config.draft.checkpoint is 'absent': no such folder",
    "draft.checkpoint=zoo/none": "config.draft.checkpoint is 'zoo/none': no model",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(refused, setting):
    flags = [f"--config.{own.removeprefix('config.')}" for own in setting.split()]
    assert SETTINGS[setting] in refused(*flags)


TREE = "tree=-1,0,0,1"
TREES = {
    f"{TREE} verifier=token": "config.tree is set and the verifier 'token' judges",
    f"{TREE} drafter=ngram": "config.tree is set and the drafter 'ngram' drafts chains",
    "tree=x": "config.tree is 'x': it must be the parent of each node",
    "tree=5": "config.tree is 5",
    "tree=-1,0.5": "config.tree is (-1, 0.5)",
    "tree=-1": "config.tree is -1: it must be the parent of each node",
    "tree=-1,2,1": "config.tree: parents[1] is 2: a node stands below one",
    "tree=-1,0,4": "config.tree: parents[2] is 4",
    "tree=-1,0,1,0": "nodes are numbered level by level",
    f"{TREE} gamma=3": "config.gamma is 3 and config.tree is 2 deep: a tree's gamma is",
    f"{TREE} gamma=auto": "config.gamma is 'auto' and config.tree is 2 deep",
    f"{TREE} tree_nodes=4": "config.tree_nodes is 4 and config.tree is not 'auto'",
    "tree=auto gamma=3": "config.gamma is 3 and config.tree 'auto': a tree's gamma",
    "tree=auto tree_nodes=0": "config.tree_nodes is 0: at least 1",
    "tree=auto verifier=block": "the verifier 'block' judges chains",
    f"{TREE} max_length=3": "config.tree has 4 nodes, its root included, and",
    f"{TREE} siblings=any": "config.siblings is 'any': the verifier 'traversal'",
    f"{TREE} siblings=chosen": "is exact for distinct",
    f"{TREE} verifier=exact_match siblings=any": "independent or paths or distinct",
    f"{TREE} runs=greedy siblings=distinct": "config.siblings is set and config.runs",
    f"{TREE} verifier=exact_match siblings=chosen draft_sampling.temperature=0": (
        "config.draft_sampling.temperature is set and config.siblings is 'chosen'"
    ),
    "tree=-1,0,1,1 verifier=best_path": "the tree branches below its root",
    f"tree=-1{',0' * 240} max_length=300": "a node of 240 children and the vocabu",
}


@pytest.mark.parametrize("setting", TREES)
def test_trees(refused, setting):
    given = dict(own.split("=") for own in setting.split())
    settings = {"verifier": "traversal", "gamma": "None"} | given
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    assert TREES[setting] in refused(*flags)


def test_a_drafter_that_draws_nothing_has_no_sampling(refused):
    sentence = refused("--config.drafter=ngram", "--config.draft_sampling.top_k=3")
    assert "config.draft_sampling is set and the drafter 'ngram' draws" in sentence


def test_greedy_drafts_have_no_sampling(refused):
    sentence = refused("--config.runs=greedy", "--config.draft_sampling.top_k=3")
    assert "config.draft_sampling is set and config.runs has no sampled" in sentence


def test_a_config_of_another_command(refused, monkeypatch):
    flags = (f"--config={pairs.ROOT}/configs/bench.py",)
    monkeypatch.setattr(pairs, "pair_flags", lambda folders: flags)
    assert "--config has no setting buckets: this command needs it" in refused()


@pytest.fixture
def copy(folders, tmp_path):
    """The pair's folders, to be damaged."""
    own = pairs.Folders(tmp_path / "target", tmp_path / "draft", folders.input)
    shutil.copytree(folders.target, own.target)
    shutil.copytree(folders.draft, own.draft)
    return own


@pytest.mark.parametrize("role", ["target", "draft"])
def test_half_a_checkpoint(refused, copy, role):
    folder = getattr(copy, role)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    sentence = refused(**{role: folder})
    assert f"{folder}/model.safetensors is cut short" in sentence
    (folder / "model.safetensors").unlink()
    assert f"{folder} has neither model.safetensors" in refused(**{role: folder})


@pytest.mark.parametrize("role", ["target", "draft"])
def test_nan_weights(refused, copy, role):
    folder = getattr(copy, role)

    def spoil(tensors):
        tensors["decoder.final_layer_norm.weight"][3] = np.nan

    pairs.edit_weights(folder, spoil)
    sentence = refused(**{role: folder})
    assert "decoder.final_layer_norm.weight" in sentence and str(folder) in sentence
    assert "NaN" in sentence


def test_no_config_or_tokenizer(refused, copy):
    os.remove(copy.draft / "spiece.model")
    assert f"{copy.draft} holds no tokenizer" in refused(draft=copy.draft)
    os.remove(copy.target / "config.json")
    assert f"{copy.target} has no config.json" in refused(target=copy.target)


def test_a_draft_with_another_tokenizer(refused, copy):
    texts = [text[::-1] for text in pairs.TEXTS]
    model = copy.draft / "spiece.model"
    tokenizers.train_sentencepiece(texts, pairs.PIECES, model)
    sentence = refused(draft=copy.draft)
    assert "draft and target have different tokenizers: id " in sentence
    assert "with the target's tokenizer" in sentence


@pytest.mark.parametrize("role", ["target", "draft"])
def test_a_model_with_fewer_rows_than_its_tokenizer_has_ids(refused, copy, role):
    folder = getattr(copy, role)

    def cut(tensors):
        for name in ("shared.weight", "lm_head.weight"):
            tensors[name] = np.array(tensors[name][:200])

    pairs.edit_weights(folder, cut)
    pairs.edit_config(folder, vocab_size=200)
    sentence = refused(**{role: folder})
    assert f"the {role}'s tokenizer has {pairs.KNOWN} ids and its model 200" in sentence


@pytest.mark.slow
def test_what_was_written_stays(folders, tmp_path, monkeypatch):
    """A run that dies leaves the lines of the batches before."""
    decode_batch, calls = side_by_side.decode_batch, []

    def dies(*args, **settings):
        calls.append(None)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return decode_batch(*args, **settings)

    monkeypatch.setattr(side_by_side, "decode_batch", dies)
    with pairs.costs_are():
        run = pairs.run_decode(folders, tmp_path, "--config.runs=greedy")
    assert run.code == 130 and "what was written stays" in run.err
    written = run.read("decodes.jsonl.partial")
    assert [line["input"] for line in written] == list(pairs.LINES[:2])
    assert run.effective["gamma"] == {"greedy": pairs.GAMMA}
    assert not (tmp_path / "metrics.json").exists()
    # A later mistake in the flags touches nothing.
    assert pairs.run_decode(folders, tmp_path, "--config.gamma=0").code == 2
    assert run.read("decodes.jsonl.partial") == written


def test_names_are_looked_up_with_their_setting():
    from experiments import build_drafter

    with pytest.raises(errors.InputError, match="config.drafter is 'x'.*model, ngram"):
        build.named(build_drafter.DRAFTERS, "x", "drafter")
