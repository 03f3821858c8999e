"""T5s in the formats of PyTorch, Flax and T5X: the same model; damage is named."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
import pathlib
import pickle
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import serialization

from specjax.errors import InputError
from specjax.models import t5_weights
from specjax.models.formats import torch_bin
from tests import foreign
from tests.t5_tensors import CONFIGS, TIED, UNTIED, assert_holds, random_tensors

HEAD, EMBEDDING = "lm_head.weight", "shared.weight"
WO = "decoder.block.1.layer.2.DenseReluDense.wo.weight"
ROOT = pathlib.Path(__file__).resolve().parents[2]
# A checkpoint that T5X itself wrote; a copy lies beside some checkouts.
REAL = pathlib.Path(
    os.environ.get("SPECJAX_T5X_CHECKPOINT")
    or ROOT.parent / "shared" / "data" / "t5x_tiny.checkpoint"
)


def in_file(write, name):
    def into(directory, tensors, config):
        foreign.write_config(directory, config)
        write(directory / name, tensors)

    return into


def t5x(**settings):
    return functools.partial(foreign.write_t5x, **settings)


WRITERS = {
    "zip": in_file(foreign.write_zip, "pytorch_model.bin"),
    "stream": in_file(foreign.write_stream, "pytorch_model.bin"),
    "flax": in_file(foreign.write_flax, "flax_model.msgpack"),
    "t5x": t5x(),
    "t5x_zarr": t5x(chunks=7, heads_apart=True),
    "t5x_scanned": t5x(chunks=10, scanned=True, old_paths=True),
    "t5x_scanned_heads": t5x(scanned=True, heads_apart=True, as_bits=True),
    "t5x_bits": t5x(chunks=11, as_bits=True),
}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_model(tmp_path, kind, name):
    """T5X has no config.json: its shape is read from the tensors."""
    config = CONFIGS[name]
    dtype = ml_dtypes.bfloat16 if kind in ("stream", "t5x_bits") else np.float32
    tensors = {n: x.astype(dtype) for n, x in random_tensors(config).items()}
    WRITERS[kind](tmp_path, tensors, config)
    model = t5_weights.load_t5(tmp_path)
    assert model.config == config
    as_read = {n: x.astype(np.float32) for n, x in tensors.items()}
    assert_holds(model, config, as_read)


@pytest.mark.parametrize("write", [foreign.write_zip, foreign.write_stream])
@pytest.mark.parametrize("dtype", foreign.STORAGES)
def test_types_of_pytorch(tmp_path, write, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    write(tmp_path / "a.bin", {"a": array, "b": array.T, "c": array[:0]})
    found = torch_bin.read_file(tmp_path / "a.bin")
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "int64"}
    for name, expected in {"a": array, "b": array.T, "c": array[:0]}.items():
        assert found[name].dtype == short[dtype]
        assert found[name].shape == expected.shape
        read = found[name].read()
        np.testing.assert_array_equal(read, expected)
        assert read.dtype == expected.dtype and read.base is not None  # not a copy


@pytest.mark.parametrize("kind", ["bin", "msgpack"])
def test_shards(tmp_path, kind):
    tensors = random_tensors(UNTIED)
    foreign.write_config(tmp_path, UNTIED)
    stem = {"bin": "pytorch_model", "msgpack": "flax_model"}[kind]
    write = {"bin": foreign.write_stream, "msgpack": foreign.write_flax}[kind]
    weight_map = {}
    for i in range(2):
        file = f"{stem}-{i + 1:05d}-of-00002.{kind}"
        part = {name: tensors[name] for name in list(tensors)[i::2]}
        write(tmp_path / file, part)
        named = foreign.flax_name if kind == "msgpack" else str
        weight_map |= {named(name): file for name in part}
    index = tmp_path / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_holds(t5_weights.load_t5(tmp_path), UNTIED, tensors)
    (tmp_path / file).unlink()
    with pytest.raises(InputError, match=f"shard .*{file}, named in .* is absent"):
        t5_weights.load_t5(tmp_path)
    write(tmp_path / file, {"shared.weight": tensors["shared.weight"]})
    with pytest.raises(InputError, match=f"{file} lacks the tensors"):
        t5_weights.load_t5(tmp_path)


def test_arrays_that_flax_split(tmp_path, monkeypatch):
    tensors = random_tensors(UNTIED)
    foreign.write_config(tmp_path, UNTIED)
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 300)
    foreign.write_flax(tmp_path / "flax_model.msgpack", tensors)
    assert (
        b"__msgpack_chunked_array__" in (tmp_path / "flax_model.msgpack").read_bytes()
    )
    assert_holds(t5_weights.load_t5(tmp_path), UNTIED, tensors)


def test_a_tied_head_that_pytorch_stored_twice(tmp_path):
    """One storage under two names, or a copy: no head of its own. Another one is."""
    tensors = random_tensors(TIED)
    foreign.write_config(tmp_path, TIED)
    for copy in (EMBEDDING, HEAD, "encoder.embed_tokens.weight"):
        with_copy = tensors | {HEAD: tensors[EMBEDDING], copy: tensors[EMBEDDING]}
        foreign.write_zip(tmp_path / "pytorch_model.bin", with_copy)
        model = t5_weights.load_t5(tmp_path)
        assert model.config == TIED
        assert_holds(model, TIED, tensors)
    # Where the config says that the head is its own, it is, whatever its numbers.
    own = tensors | {HEAD: tensors[EMBEDDING]}
    foreign.write_zip(tmp_path / "pytorch_model.bin", own)
    untied = dataclasses.replace(TIED, tied_head=False, scaled_head=False)
    foreign.write_config(tmp_path, untied)
    assert_holds(t5_weights.load_t5(tmp_path), untied, own)
    foreign.write_config(tmp_path, TIED)
    other = tensors[EMBEDDING].copy()
    other[-1, -1] += 1
    foreign.write_zip(tmp_path / "pytorch_model.bin", tensors | {HEAD: other})
    model = t5_weights.load_t5(tmp_path)
    np.testing.assert_array_equal(model.head[...], other)


def test_views_of_one_storage(tmp_path):
    """Two tensors in one storage, and a view that old files describe in the storage."""
    whole = np.arange(10, dtype=np.float32)
    view = foreign.tuple_of(foreign.text("v"), foreign.number(2), foreign.number(8))
    items = {
        "a": foreign.tensor("0", whole[4:], b"N", offset=4),
        "b": foreign.tensor("0", whole[5:].reshape(1, 5), view, offset=3),
    }
    path = tmp_path / "a.bin"
    foreign.write_stream(path, {"x": whole}, foreign.state_dict(items))
    found = torch_bin.read_file(path)
    np.testing.assert_array_equal(found["a"].read(), whole[4:])
    np.testing.assert_array_equal(found["b"].read(), whole[5:].reshape(1, 5))


def test_the_first_format_counts(tmp_path):
    tensors = random_tensors(UNTIED)
    twice = {name: 2 * x for name, x in tensors.items()}
    foreign.write_config(tmp_path, UNTIED)
    foreign.write_zip(tmp_path / "pytorch_model.bin", tensors)
    foreign.write_flax(tmp_path / "flax_model.msgpack", twice)
    before = t5_weights.fingerprint(tmp_path)
    assert_holds(t5_weights.load_t5(tmp_path), UNTIED, tensors)
    (tmp_path / "pytorch_model.bin").unlink()
    assert_holds(t5_weights.load_t5(tmp_path), UNTIED, twice)
    assert t5_weights.fingerprint(tmp_path) != before


# A file that runs code must be refused before anything of it runs.


class Attack:
    """What a pickle would call while it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(self.path),)


def attacks(path):
    system = foreign.call("os", "system", foreign.text(f"touch {path}"))
    one = foreign.tensor("0", np.ones(2, np.float32))
    stolen = foreign.name("torch._utils", "_rebuild_tensor_v2")
    return {
        "system": b"\x80\x02" + system + b".",
        "within": foreign.state_dict({"a": one, "b": system}),
        "object": pickle.dumps(Attack(path), 2),
        "protocol 4": pickle.dumps(Attack(path), 4),
        "INST": b"(" + foreign.text(f"touch {path}") + b"ios\nsystem\n.",
        "OBJ": b"(" + foreign.name("os", "system") + foreign.text("true") + b"o.",
        "NEWOBJ": foreign.name("subprocess", "Popen") + foreign.tuple_of() + b"\x81.",
        "builtin": foreign.call("builtins", "eval", foreign.text("1")) + b".",
        "attribute": foreign.name("torch._utils", "os.system") + b")R.",
        "called tensor": one + foreign.tuple_of() + b"R.",
        "called dict": stolen + foreign.tuple_of(foreign.text("a")) + b"R.",
        "extension": b"\x82\x01.",
    }


@pytest.mark.parametrize("kind", attacks("x"))
@pytest.mark.parametrize("write", [foreign.write_zip, foreign.write_stream])
def test_pickles_that_run_code_are_refused(tmp_path, kind, write):
    path = tmp_path / "ran"
    foreign.write_config(tmp_path, UNTIED)
    evil = attacks(path)[kind]
    write(tmp_path / "pytorch_model.bin", {"a": np.ones(2, np.float32)}, evil)
    expected = "nothing of it was run" if "called dict" != kind else "cut short or no"
    with pytest.raises(InputError, match=f"pytorch_model.bin .*{expected}"):
        t5_weights.load_t5(tmp_path)
    assert not path.exists()


def test_the_attack_would_have_worked(tmp_path):
    pickle.loads(attacks(tmp_path / "ran")["object"])
    assert (tmp_path / "ran").exists()


FILES = {
    "zip": "pytorch_model.bin",
    "stream": "pytorch_model.bin",
    "flax": "flax_model.msgpack",
    "t5x": "checkpoint",
}


@pytest.mark.parametrize("kind", FILES)
def test_cut_files_are_named(tmp_path, kind):
    config = dataclasses.replace(UNTIED, num_encoder_layers=1, num_decoder_layers=1)
    WRITERS[kind](tmp_path, random_tensors(config), config)
    path = tmp_path / FILES[kind]
    good = path.read_bytes()
    for keep in (0, 1, 2, 20, 99, 300, len(good) // 2, len(good) - 1):
        path.write_bytes(good[:keep])
        with pytest.raises(InputError, match=f"{path.name} is cut short"):
            t5_weights.load_t5(tmp_path)
    path.write_bytes(np.random.default_rng(0).bytes(3000))
    with pytest.raises(InputError, match=f"{path.name} is cut short or no"):
        t5_weights.load_t5(tmp_path)


@pytest.mark.parametrize("kind", WRITERS)
def test_wrong_tensors_are_named(tmp_path, kind):
    tensors = random_tensors(UNTIED)
    foreign.write_config(tmp_path, UNTIED)
    nan = tensors[WO].copy()
    nan[2, 3] = np.nan
    wrong = {
        f"{WO} in .* has shape": tensors | {WO: tensors[WO][:-1]},
        f"{WO} in .* hold NaN": tensors | {WO: nan},
        f"lacks the tensor {WO}": {n: x for n, x in tensors.items() if n != WO},
    }
    for message, own in wrong.items():
        if "scanned" in kind and "hold NaN" not in message:
            continue  # its layers cannot differ
        WRITERS[kind](tmp_path, own, UNTIED)
        with pytest.raises(InputError, match=message):
            t5_weights.load_t5(tmp_path)


def test_unknown_tensors_are_named(tmp_path):
    extra = {"encoder.adapter.weight": np.ones((2, 2), np.float32)}
    for kind in ("zip", "flax"):
        WRITERS[kind](tmp_path / kind, random_tensors(UNTIED) | extra, UNTIED)
        with pytest.raises(InputError, match="holds the tensor encoder.adapter.weight"):
            t5_weights.load_t5(tmp_path / kind)
    tree = {"target": {"token_embedder": {"embedding": np.ones((4, 2), np.float32)}}}
    packed = serialization.msgpack_serialize({"optimizer": tree})
    (tmp_path / "checkpoint").write_bytes(packed)
    with pytest.raises(InputError, match="cannot be told .*put its config.json there"):
        t5_weights.load_t5(tmp_path)
    integers = {EMBEDDING: np.ones((40, 16), np.int64)}
    WRITERS["zip"](tmp_path / "zip", random_tensors(UNTIED) | integers, UNTIED)
    with pytest.raises(InputError, match="stored as int64; supported are F32, F16"):
        t5_weights.load_t5(tmp_path / "zip")


def test_damaged_zarr_folders_are_named(tmp_path):
    foreign.write_t5x(tmp_path / "good", random_tensors(UNTIED), UNTIED, chunks=7)
    folder = "target.decoder.layers_1.mlp.wo.kernel"
    rng = np.random.default_rng(1)

    def check(change, message):
        path = tmp_path / "broken"
        shutil.copytree(tmp_path / "good", path)
        change(path / folder)
        with pytest.raises(InputError, match=message):
            t5_weights.load_t5(path)
        shutil.rmtree(path)

    chunk = rf"{folder}/1\.0"
    check(lambda own: (own / "1.0").unlink(), f"chunk .*{chunk} is absent or empty")
    check(lambda own: (own / "1.0").write_bytes(b""), f"{chunk} is absent or empty")
    check(
        lambda own: (own / "1.0").write_bytes((own / "1.0").read_bytes()[:-9]),
        f"{folder} has a damaged chunk .*1.0",
    )
    check(
        lambda own: (own / "1.0").write_bytes(rng.bytes(40)),
        f"{folder} has a damaged chunk",
    )
    check(lambda own: (own / ".zarray").write_text("{"), ".zarray is damaged")
    check(lambda own: (own / ".zarray").unlink(), "it has no .zarray")
    check(shutil.rmtree, f"{folder} is absent")


def test_t5x_with_a_config(tmp_path):
    """What no shape tells is the user's word: beside the checkpoint, or in Python."""
    config = dataclasses.replace(UNTIED, activation="relu", max_distance=64)
    foreign.write_t5x(tmp_path, random_tensors(config), config)
    assert t5_weights.load_t5(tmp_path).config == UNTIED
    assert t5_weights.load_t5(tmp_path, config=config).config == config
    foreign.write_config(tmp_path, config)
    assert t5_weights.load_t5(tmp_path).config == config
    with pytest.raises(InputError, match="the given shape asks for"):
        t5_weights.load_t5(tmp_path, config=dataclasses.replace(config, d_ff=32))


@pytest.mark.skipif(not REAL.is_file(), reason=f"no checkpoint of T5X at {REAL}")
def test_a_checkpoint_that_t5x_wrote(tmp_path):
    (tmp_path / "checkpoint").symlink_to(REAL)
    model = t5_weights.load_t5(tmp_path)
    target = serialization.msgpack_restore(REAL.read_bytes())["optimizer"]["target"]
    config = model.config
    assert (config.vocab_size, config.d_model, config.d_ff) == (32128, 8, 16)
    assert (config.num_heads, config.d_kv, config.gated) == (4, 3, True)
    assert (config.num_encoder_layers, config.num_decoder_layers) == (2, 2)
    assert not config.tied_head and not config.scaled_head
    block, own = model.decoder[1], target["decoder"]["layers_1"]
    for array, expected in (
        (model.embedding[...], target["token_embedder"]["embedding"]),
        (model.head[...], target["decoder"]["logits_dense"]["kernel"].T),
        (block.attention.qkv[1], own["self_attention"]["key"]["kernel"].T),
        (block.cross.kv[1], own["encoder_decoder_attention"]["value"]["kernel"].T),
        (block.feed_forward.wi[1], own["mlp"]["wi_1"]["kernel"].T),
        (
            model.encoder[0].attention.bias[...],
            target["encoder"]["relpos_bias"]["rel_embedding"].T,
        ),
    ):
        np.testing.assert_array_equal(array, expected)


@pytest.mark.parity
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "stream"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_files_that_torch_wrote(tmp_path, zipped, dtype):
    torch = importlib.import_module("torch")
    tensors = random_tensors(TIED)
    state = {n: torch.tensor(x).to(getattr(torch, dtype)) for n, x in tensors.items()}
    state[HEAD] = state["encoder.embed_tokens.weight"] = state[EMBEDDING]
    state[WO] = torch.nn.Parameter(state[WO].T.contiguous().T)
    foreign.write_config(tmp_path, TIED)
    torch.save(
        state,
        tmp_path / "pytorch_model.bin",
        _use_new_zipfile_serialization=zipped,
    )
    model = t5_weights.load_t5(tmp_path)
    assert model.config == TIED
    rounded = {n: x.astype(dtype).astype(np.float32) for n, x in tensors.items()}
    assert_holds(model, TIED, rounded)


def test_bfloat16_and_computing(tmp_path):
    WRITERS["t5x_scanned"](tmp_path, random_tensors(UNTIED), UNTIED)
    model = t5_weights.load_t5(tmp_path, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype(jnp.bfloat16)}
