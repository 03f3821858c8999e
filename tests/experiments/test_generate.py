"""`experiments.generate` writes in order, goes on after a stop, and mixes nothing."""

import json
import pathlib
import shutil

import pytest

from experiments import baseline, generate
from specjax.data import pairs as text_pairs
from specjax.data import tokenizer as tokenizers
from tests import pairs

CONFIG = pairs.ROOT / "configs" / "repair_generate.py"


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("sources") / "train.jsonl"
    lines = [text_pairs.Pair(line, line.upper()) for line in pairs.LINES]
    text_pairs.save_pairs(path, lines)
    return path


def run_generate(folders, sources, workdir, *settings) -> pairs.Run:
    return pairs.run(
        generate.main,
        workdir,
        f"--config={CONFIG}",
        f"--config.target.checkpoint={folders.target}",
        f"--config.buckets={pairs.BUCKET}",
        f"--config.max_length={pairs.MAX_LENGTH}",
        "--config.batch_size=3",
        "--config.chunk=2",
        f"--input={sources}",
        f"--workdir={workdir}",
        *settings,
        define=generate._define,
    )


@pytest.mark.slow
def test_in_order_and_again_after_a_stop(folders, decoded, sources, tmp_path):
    run = run_generate(folders, sources, tmp_path)
    assert run.code == 0, run.err
    path = tmp_path / "generated.jsonl"
    whole = path.read_bytes()
    tokenizer = tokenizers.load_tokenizer(folders.target)
    # What the target writes when it decodes each line alone.
    expected = []
    for line, record in zip(pairs.LINES, decoded.decodes, strict=True):
        expected.append({"source": line, "target": tokenizer.decode(record["tokens"])})
        if record["tokens"][-1] != tokenizer.eos_id:
            expected[-1]["finished"] = False
    assert run.read("generated.jsonl") == expected
    assert 0 < sum("finished" in line for line in expected) < len(expected)
    assert run.effective["input"] == str(sources)

    # A stop in the middle of the fourth line; what stands is not written again.
    lines = whole.splitlines(keepends=True)
    edited = json.dumps({"source": pairs.LINES[0], "target": "kept"}).encode() + b"\n"
    path.write_bytes(edited + b"".join(lines[1:3]) + lines[3][:9])
    assert run_generate(folders, sources, tmp_path).code == 0
    assert path.read_bytes() == edited + b"".join(lines[1:])
    # All is there: nothing is decoded.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baseline, "decode", None)
        assert run_generate(folders, sources, tmp_path).code == 0
    assert path.read_bytes() == edited + b"".join(lines[1:])


@pytest.mark.parametrize(
    "line", ['{"source": "another", "target": "a"}', "[]", "no JSON", "{}"]
)
def test_another_input_is_refused(folders, sources, tmp_path, line):
    path = tmp_path / "generated.jsonl"
    path.write_text(line + "\n")
    run = run_generate(folders, sources, tmp_path)
    assert run.code == 2 and f"{path}, line 1 is of another input" in run.err
    assert path.read_text() == line + "\n"
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("setting", ["seed=3", "sampling.temperature=0.5"])
def test_another_way_of_drawing_is_refused(folders, sources, tmp_path, setting):
    assert run_generate(folders, sources, tmp_path, "--config.limit=2").code == 0
    before = (tmp_path / "generated.jsonl").read_bytes()
    run = run_generate(folders, sources, tmp_path, f"--config.{setting}")
    name = setting.partition("=")[0].partition(".")[0]
    assert run.code == 2 and f"made with config.{name} = " in run.err
    assert (tmp_path / "generated.jsonl").read_bytes() == before
    # More lines of the same run are welcome.
    assert run_generate(folders, sources, tmp_path).code == 0
    assert (tmp_path / "generated.jsonl").read_bytes().startswith(before)
    (tmp_path / "manifest.json").unlink()
    run = run_generate(folders, sources, tmp_path)
    assert run.code == 2 and "it is not known how the lines" in run.err


def test_other_weights_under_the_same_name_are_refused(folders, sources, tmp_path):
    target = tmp_path / "target"
    shutil.copytree(folders.target, target)
    settings = ("--config.limit=2", f"--config.target.checkpoint={target}")
    workdir = tmp_path / "run"
    assert run_generate(folders, sources, workdir, *settings).code == 0
    # A card beside the weights says nothing of them.
    (target / "README.md").write_text("A card.")
    assert run_generate(folders, sources, workdir, *settings).code == 0
    before = (workdir / "generated.jsonl").read_bytes()

    def train_further(tensors):
        tensors["lm_head.weight"][3, 3] += 1e-3

    pairs.edit_weights(target, train_further)
    run = run_generate(folders, sources, workdir, *settings)
    assert run.code == 2 and "made with other weights or another tokenizer" in run.err
    assert (workdir / "generated.jsonl").read_bytes() == before


def test_more_lines_than_inputs_are_refused(folders, sources, tmp_path):
    lines = [json.dumps({"source": line, "target": "a"}) for line in pairs.LINES]
    (tmp_path / "generated.jsonl").write_text("\n".join(lines) + "\n")
    run = run_generate(folders, sources, tmp_path, "--config.limit=3")
    assert run.code == 2 and "has 7 lines and the input 3" in run.err


SETTINGS = {
    "limit=-1": "config.limit is -1",
    "chunk=0": "config.chunk is 0",
    "max_length=1": "config.max_length is 1",
    "seed=-1": "config.seed is -1",
    "sampling.top_k=3": "config.sampling has top_k or top_p but no temperature",
    "dtype=float16": "config.dtype is 'float16'",
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_bad_settings(folders, sources, tmp_path, setting):
    workdir = tmp_path / "new"
    run = run_generate(folders, sources, workdir, f"--config.{setting}")
    assert run.code == 2 and SETTINGS[setting] in run.err, run.err
    assert run.err.count("\n") == 1 and not workdir.exists()


def test_too_long_a_source_is_named(folders, tmp_path):
    path = tmp_path / "long.jsonl"
    long = " ".join(pairs.LINES)
    text_pairs.save_pairs(path, [text_pairs.Pair(long, "a")])
    run = run_generate(folders, path, tmp_path / "new")
    assert run.code == 2 and f"--input={path}, line 1 has" in run.err
    run = run_generate(folders, "", tmp_path / "new")
    assert run.code == 2 and "--input is missing" in run.err
