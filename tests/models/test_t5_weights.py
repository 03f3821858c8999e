"""Checkpoints on disk: round trips, hand-made files, and every way to be broken."""

import dataclasses
import json
import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from specjax import errors
from specjax.drafters.quantized import quantize
from specjax.drafters.trimmed import low_rank_head
from specjax.models import t5, t5_weights
from tests.helpers import tiny_t5
from tests.t5_tensors import CONFIGS, TIED, UNTIED, assert_holds, random_tensors

STORED = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
COPIED_BIAS = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


def write_safetensors(path, tensors, stored="F32"):
    """The file format by hand: header length, JSON header, data."""
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in tensors.items():
        raw = np.asarray(array).astype(STORED[stored]).tobytes()
        header[name] = {
            "dtype": stored,
            "shape": list(np.shape(array)),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_checkpoint(directory, config, tensors, stored="F32"):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_json()))
    write_safetensors(directory / "model.safetensors", tensors, stored)
    return directory


def write_shards(directory, config, tensors, stored="F32"):
    """Two shards and their index; the second one holds every other tensor."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config.to_json()))
    names, weight_map = list(tensors), {}
    for i in range(2):
        file = f"model-{i + 1:05d}-of-00002.safetensors"
        part = {name: tensors[name] for name in names[i::2]}
        write_safetensors(directory / file, part, stored)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def leaves(model):
    return [np.asarray(x) for x in jax.tree.leaves(model)]


def assert_same_weights(first, second):
    assert first.config == second.config
    for a, b in zip(leaves(first), leaves(second), strict=True):
        np.testing.assert_array_equal(a, b)


def loaded(directory, factor=1.0):
    """A model of `UNTIED` with weights ``factor * random_tensors(UNTIED)``."""
    tensors = {name: factor * x for name, x in random_tensors(UNTIED).items()}
    return t5_weights.load_t5(write_checkpoint(directory, UNTIED, tensors))


@pytest.fixture(scope="module")
def untied(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("untied"))


@pytest.fixture(scope="module")
def twice(tmp_path_factory):
    return loaded(tmp_path_factory.mktemp("twice"), 2.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_table_covers_each_parameter_once(name):
    config = CONFIGS[name]
    model = jax.eval_shape(lambda: t5.T5(config, jax.random.key(0)))
    covered = {}
    for path, index in t5_weights.tensor_table(config).values():
        covered.setdefault(path, []).append(index)
    flat, _ = jax.tree_util.tree_flatten_with_path(nnx.to_pure_dict(nnx.state(model)))
    shapes = {tuple(key.key for key in path): leaf.shape for path, leaf in flat}
    assert covered.keys() == shapes.keys()
    for path, indices in covered.items():
        whole = [None] if indices == [None] else list(range(shapes[path][0]))
        assert indices == whole, path


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("stored", STORED)
def test_loads_hand_made_file(tmp_path, name, stored):
    config = CONFIGS[name]
    tensors = random_tensors(config)
    rounded = {n: x.astype(STORED[stored]) for n, x in tensors.items()}
    directory = write_checkpoint(tmp_path, config, tensors, stored)
    model = t5_weights.load_t5(directory)
    assert model.config == config
    assert_holds(model, config, {n: x.astype(np.float32) for n, x in rounded.items()})


def test_loads_hand_made_bfloat16_shards(tmp_path):
    tensors = random_tensors(UNTIED)
    rounded = {n: x.astype(ml_dtypes.bfloat16) for n, x in tensors.items()}
    directory = write_shards(tmp_path, UNTIED, tensors, "BF16")
    model = t5_weights.load_t5(str(directory), jnp.bfloat16)
    assert_holds(model, UNTIED, rounded, ml_dtypes.bfloat16)
    model = t5_weights.load_t5(directory, "float32")
    assert_holds(model, UNTIED, {n: x.astype(np.float32) for n, x in rounded.items()})


def test_loaded_model_computes(tmp_path):
    model = loaded(tmp_path)

    @jax.jit
    def run(model, tokens):
        encoded = model.encode(tokens, tokens > 0)
        return model.decode(tokens, None, encoded)[0].logits

    logits = run(model, jnp.array([[3, 4, 5]]))
    assert logits.shape == (1, 3, 40) and bool(jnp.isfinite(logits).all())


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [4000, 10**9])
def test_round_trip(tmp_path, untied, dtype, max_shard_bytes):
    t5_weights.save_t5(
        untied, tmp_path / "new", dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    model = t5_weights.load_t5(tmp_path / "new")
    tensors = random_tensors(UNTIED)
    rounded = {n: x.astype(dtype).astype(np.float32) for n, x in tensors.items()}
    assert_holds(model, UNTIED, rounded)
    files = sorted(path.name for path in (tmp_path / "new").iterdir())
    assert files[0] == "config.json" and not any("partial" in f for f in files)
    assert (len(files) == 2) == (max_shard_bytes == 10**9)
    # Storing what was stored changes nothing more.
    t5_weights.save_t5(model, tmp_path / "again", dtype=dtype)
    assert_same_weights(t5_weights.load_t5(tmp_path / "again"), model)


def test_shards_keep_to_their_limit(tmp_path, untied):
    t5_weights.save_t5(untied, tmp_path, max_shard_bytes=4000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {}
    for name, array in random_tensors(UNTIED).items():
        file = index["weight_map"][name]
        sizes.setdefault(file, []).append(array.nbytes)
    assert index["metadata"]["total_size"] == sum(map(sum, sizes.values()))
    assert len(sizes) > 3
    assert all(sum(s) <= 4000 or len(s) == 1 for s in sizes.values())


def test_keeps_the_model_s_type_by_default(tmp_path, untied):
    t5_weights.save_t5(untied, tmp_path, dtype=jnp.bfloat16)
    half = t5_weights.load_t5(tmp_path, jnp.bfloat16)
    t5_weights.save_t5(half, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert fields["torch_dtype"] == "bfloat16"
    assert_same_weights(t5_weights.load_t5(tmp_path, jnp.bfloat16), half)


def test_saving_over_another_layout_leaves_one_model(tmp_path, untied, twice):
    (tmp_path / "spiece.model").write_text("kept")
    (tmp_path / "model-card.safetensors").write_text("kept")
    t5_weights.save_t5(untied, tmp_path, max_shard_bytes=4000)
    t5_weights.save_t5(twice, tmp_path)
    assert_same_weights(t5_weights.load_t5(tmp_path), twice)
    names = "config.json model-card.safetensors model.safetensors spiece.model"
    assert sorted(path.name for path in tmp_path.iterdir()) == names.split()
    # Whoever may read one file may read them all.
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
    t5_weights.save_t5(untied, tmp_path, max_shard_bytes=4000)
    assert_same_weights(t5_weights.load_t5(tmp_path), untied)


def test_a_save_that_fails_keeps_the_old_model(tmp_path, untied):
    t5_weights.save_t5(untied, tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    # The last tensor cannot be stored, when others already are.
    broken = jax.tree.map(lambda x: x, untied)
    broken.head[...] = broken.head[...].at[0, 0].set(jnp.nan)
    with pytest.raises(errors.InputError, match="lm_head.weight .*NaN"):
        t5_weights.save_t5(broken, tmp_path, max_shard_bytes=4000)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert_same_weights(t5_weights.load_t5(tmp_path), untied)


def test_a_save_killed_between_files_is_not_loaded(
    tmp_path, untied, twice, monkeypatch
):
    """However many of the final moves happen, two models are never mixed."""
    move, outcomes = t5_weights.os.replace, []
    for allowed in range(20):
        t5_weights.save_t5(untied, tmp_path, max_shard_bytes=20_000)
        moved = iter(range(allowed))

        def replace(source, target, moved=moved):
            if next(moved, None) is None:
                raise KeyboardInterrupt
            move(source, target)

        monkeypatch.setattr(t5_weights.os, "replace", replace)
        try:
            t5_weights.save_t5(twice, tmp_path, max_shard_bytes=20_000)
            outcomes.append("done")
        except KeyboardInterrupt:
            with pytest.raises(errors.InputError, match="no config.json"):
                t5_weights.load_t5(tmp_path)
            outcomes.append("refused")
        monkeypatch.setattr(t5_weights.os, "replace", move)
        if outcomes[-1] == "done":
            break
    assert outcomes[-1] == "done" and len(outcomes) > 4
    assert_same_weights(t5_weights.load_t5(tmp_path), twice)


def test_float16_storage_that_overflows_is_refused(tmp_path, untied):
    wide = jax.tree.map(lambda x: x, untied)
    wide.decoder[1].feed_forward.wo[...] *= 1e6
    name = "decoder.block.1.layer.2.DenseReluDense.wo.weight"
    with pytest.raises(errors.InputError, match=f"{name} as float16 hold"):
        t5_weights.save_t5(wide, tmp_path, dtype=jnp.float16)
    t5_weights.save_t5(wide, tmp_path, dtype=jnp.bfloat16)


@pytest.mark.parametrize(
    ("load", "save", "message"),
    [
        ("float16", None, "cannot compute in float16.*65504.*bfloat16"),
        ("int8", None, "computes in float32 or bfloat16, not int8"),
        ("float33", None, "no number type 'float33'"),
        (None, "int8", "stored as float32, float16 or bfloat16, not int8"),
    ],
)
def test_types_that_do_not_work_are_refused(tmp_path, untied, load, save, message):
    with pytest.raises(errors.InputError, match=message):
        if load:
            t5_weights.load_t5(tmp_path, load)
        else:
            t5_weights.save_t5(untied, tmp_path, dtype=save)


@pytest.mark.parametrize("stacks", [["encoder"], ["decoder"], ["encoder", "decoder"]])
@pytest.mark.parametrize("config", [TIED, UNTIED], ids=["tied", "untied"])
def test_names_of_the_embedding(tmp_path, stacks, config):
    tensors = random_tensors(config)
    variant = {n: x for n, x in tensors.items() if n != "shared.weight"}
    for stack in stacks:
        variant[f"{stack}.embed_tokens.weight"] = tensors["shared.weight"]
    if len(stacks) == 2:
        variant["shared.weight"] = tensors["shared.weight"]
    variant[COPIED_BIAS] = np.ones((32, 3), np.float32)
    directory = write_checkpoint(tmp_path, config, variant)
    assert_holds(t5_weights.load_t5(directory), config, tensors)


def test_copies_of_the_embedding_that_differ_are_refused(tmp_path):
    tensors = random_tensors(TIED)
    tensors["decoder.embed_tokens.weight"] = np.zeros((40, 16))
    with pytest.raises(
        errors.InputError,
        match="shared.weight and decoder.embed_tokens.weight .*differ",
    ):
        t5_weights.load_t5(write_checkpoint(tmp_path, TIED, tensors))


def test_a_stored_head_is_separate_whatever_the_config_says(tmp_path):
    directory = write_checkpoint(tmp_path, UNTIED, random_tensors(UNTIED))
    fields = UNTIED.to_json() | {"tie_word_embeddings": True}
    (directory / "config.json").write_text(json.dumps(fields))
    assert_holds(t5_weights.load_t5(directory), UNTIED, random_tensors(UNTIED))


@pytest.mark.parametrize("tied", [True, False])
def test_each_missing_tensor_is_named(tmp_path, tied):
    """For a tied model the embedding alone; the blocks are the same."""
    config = TIED if tied else UNTIED
    config = dataclasses.replace(config, num_encoder_layers=1, num_decoder_layers=1)
    tensors = random_tensors(config)
    for missing in ["shared.weight"] if tied else tensors:
        rest = {n: x for n, x in tensors.items() if n != missing}
        with pytest.raises(errors.InputError, match=missing.replace(".", r"\.")):
            t5_weights.load_t5(write_checkpoint(tmp_path, config, rest))


def broken_checkpoints():
    """name -> (what breaks a good checkpoint, the error that must follow)."""
    wi = "encoder.block.0.layer.1.DenseReluDense.wi_0.weight"
    bias = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    shard = "model-00002-of-00002.safetensors"

    def tensors_with(name, value):
        def break_it(directory):
            tensors = random_tensors(UNTIED) | {name: value}
            write_checkpoint(directory, UNTIED, tensors)

        return break_it

    def shards_then(change):
        def break_it(directory):
            (directory / "model.safetensors").unlink()
            write_shards(directory, UNTIED, random_tensors(UNTIED))
            change(directory)

        return break_it

    def cut(file, keep):
        def break_it(directory):
            path = directory / file
            path.write_bytes(path.read_bytes()[:keep])

        return break_it

    def remove(file):
        return lambda directory: (directory / file).unlink()

    def move_tensor_to(file):
        def break_it(directory):
            path = directory / "model.safetensors.index.json"
            index = json.loads(path.read_text())
            index["weight_map"]["shared.weight"] = file
            path.write_text(json.dumps(index))

        return break_it

    def empty_index(directory):
        (directory / "model.safetensors.index.json").write_text("{}")

    def repeat_tensor(directory):
        part = {"shared.weight": np.zeros((40, 16), np.float32)}
        write_safetensors(directory / shard, random_tensors(UNTIED) | part)

    def integers(directory):
        path = directory / "model.safetensors"
        path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))

    def config_with(**changes):
        def break_it(directory):
            fields = dataclasses.replace(UNTIED, **changes).to_json()
            (directory / "config.json").write_text(json.dumps(fields))

        return break_it

    nan = np.zeros((24, 16), np.float32)
    nan[3, 4] = np.nan
    return {
        "extra tensor": (tensors_with(bias, np.zeros((32, 3))), f"holds.*{bias}"),
        "shape": (tensors_with(wi, nan[:23]), rf"{wi}.*\(23, 16\).*\(24, 16\)"),
        "not finite": (tensors_with(wi, nan), f"{wi}.*NaN"),
        "integers": (integers, "stored as I32; supported are F32, F16, BF16"),
        "wider config": (
            config_with(d_ff=32),
            r"shape \(24, 16\).*config.json asks for \(32",
        ),
        "ungated config": (config_with(gated=False), "lacks.*DenseReluDense.wi.weight"),
        "no config": (remove("config.json"), "has no config.json"),
        "half a config": (cut("config.json", 50), "config.json is not a readable JSON"),
        "no weights": (remove("model.safetensors"), "neither model.safetensors nor"),
        "cut data": (cut("model.safetensors", -3), "model.safetensors is cut short"),
        "cut header": (cut("model.safetensors", 99), "model.safetensors is cut short"),
        "empty file": (cut("model.safetensors", 0), "model.safetensors is cut short"),
        "both layouts": (empty_index, "holds both"),
        "absent shard": (shards_then(remove(shard)), f"shard .*{shard}.*is absent"),
        "cut shard": (shards_then(cut(shard, -1)), f"{shard} is cut short"),
        "wrong index": (
            shards_then(move_tensor_to(shard)),
            f"{shard} lacks .*shared.weight",
        ),
        "empty index": (shards_then(empty_index), "is no shard index"),
        "index outside": (
            shards_then(move_tensor_to("../a")),
            "is no shard index.*outside",
        ),
        "tensor twice": (shards_then(repeat_tensor), f"{shard} holds .*another shard"),
    }


@pytest.mark.parametrize("kind", broken_checkpoints())
def test_broken_checkpoints_are_named(tmp_path, kind):
    break_it, message = broken_checkpoints()[kind]
    directory = write_checkpoint(tmp_path / "c", UNTIED, random_tensors(UNTIED))
    t5_weights.load_t5(directory)
    break_it(directory)
    with pytest.raises(errors.InputError, match=message):
        t5_weights.load_t5(directory)


def test_wrong_paths_are_named(tmp_path, untied):
    with pytest.raises(errors.InputError, match="no checkpoint directory .*absent"):
        t5_weights.load_t5(tmp_path / "absent")
    (file := tmp_path / "file").touch()
    with pytest.raises(errors.InputError, match="no checkpoint directory .*file"):
        t5_weights.load_t5(file)
    with pytest.raises(errors.InputError, match="file is a file"):
        t5_weights.save_t5(untied, file)
    with pytest.raises(errors.InputError, match="max_shard_bytes"):
        t5_weights.save_t5(untied, tmp_path / "new", max_shard_bytes=0)


def test_a_model_that_was_cut_is_not_saved(tmp_path):
    model = tiny_t5()
    for name, made in {
        "Int8": quantize(model),
        "LowRank": low_rank_head(model, 4),
    }.items():
        with pytest.raises(errors.InputError, match=f"is a {name}, which"):
            t5_weights.save_t5(made, tmp_path / "own")
        assert not (tmp_path / "own").exists()
