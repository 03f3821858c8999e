"""Checkpoints: exact, whole or skipped, and named when they do not fit."""

import dataclasses
import errno
import pathlib
import shutil
import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import checkpoints, errors, sharding
from specjax.models import t5, t5_config
from specjax.training import optimizer, step

CONFIG = t5_config.T5Config(
    vocab_size=16,
    d_model=8,
    d_kv=4,
    num_heads=2,
    d_ff=8,
    num_encoder_layers=1,
    num_decoder_layers=1,
)


def make_state(seed: int, config: t5_config.T5Config = CONFIG) -> step.TrainState:
    model = t5.T5(config, jax.random.key(seed))
    state = step.init_state(
        model, optimizer.OptimizerConfig(), jax.random.key(seed + 1)
    )
    return state.replace(step=jnp.array(seed, jnp.int32), index=jnp.array(3, jnp.int32))


def equal(a: step.TrainState, b: step.TrainState) -> bool:
    def bits(leaf: jax.Array) -> np.ndarray:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    same = jax.tree.map(
        lambda x, y: x.dtype == y.dtype and np.array_equal(bits(x), bits(y)), a, b
    )
    return jax.tree.all(same)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """Checkpoints 1 to 4, of which the last 3 are kept."""
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    for number in range(1, 5):
        checkpoints.save(
            directory, number, make_state(number), {"seed": number}, keep=3
        )
    return directory


def copy_of(saved: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    return pathlib.Path(shutil.copytree(saved, tmp_path / "checkpoints"))


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    files = (path for path in folder.rglob("*") if path.is_file())
    return max(files, key=lambda path: path.stat().st_size)


def test_round_trip_is_exact_and_keeps_the_newest(saved):
    assert checkpoints.steps(saved) == [2, 3, 4]
    restored = checkpoints.restore(saved, make_state(9))
    assert (restored.step, restored.config, restored.skipped) == (4, {"seed": 4}, ())
    assert equal(restored.state, make_state(4))
    assert not equal(restored.state, make_state(3))
    older = checkpoints.restore(saved, make_state(9), step=2)
    assert equal(older.state, make_state(2))


def test_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints.save("run/1", 7, make_state(7), {})
    assert (tmp_path / "run" / "1" / "7").is_dir()
    assert equal(checkpoints.restore("./run/1", make_state(0)).state, make_state(7))


def test_nothing_there(tmp_path):
    assert checkpoints.steps(tmp_path / "absent") == []
    assert checkpoints.restore(tmp_path / "absent", make_state(0)) is None
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("damage", ["cut", "bit", "gone"])
def test_damaged_newest_falls_back_and_says_so(saved, tmp_path, damage):
    directory = copy_of(saved, tmp_path)
    victim = largest_file(directory / "4")
    content = bytearray(victim.read_bytes())
    if damage == "cut":
        victim.write_bytes(content[: len(content) // 2])
    elif damage == "bit":
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    else:
        victim.unlink()
    with pytest.warns(UserWarning, match="checkpoint 4 in .* cannot be read"):
        restored = checkpoints.restore(directory, make_state(0))
    assert (restored.step, restored.skipped) == (3, (4,))
    assert equal(restored.state, make_state(3))


def test_unfinished_checkpoint_is_not_one(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    (directory / "4").rename(directory / "4.orbax-checkpoint-tmp")
    assert checkpoints.steps(directory) == [2, 3]
    assert checkpoints.restore(directory, make_state(0)).step == 3


def test_without_its_hashes_it_is_damaged(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    (directory / "4" / "sha256.json").unlink()
    with pytest.warns(UserWarning, match="checkpoint 4 in .* cannot be read"):
        assert checkpoints.restore(directory, make_state(0)).step == 3


def test_what_is_set_aside_makes_room(saved, tmp_path):
    """Twice, as a disk that goes on failing would have it."""
    directory = copy_of(saved, tmp_path)
    for _ in range(2):
        largest_file(directory / "4").unlink()
        with pytest.warns(UserWarning, match="cannot be read"):
            restored = checkpoints.restore(directory, make_state(0))
        checkpoints.set_aside(directory, restored.skipped)
        assert checkpoints.steps(directory)[-1] == 3
        checkpoints.save(directory, 4, make_state(4), {})
        assert checkpoints.restore(directory, make_state(0)).step == 4
    assert (directory / "4.damaged").is_dir()


def test_none_readable(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    for number in checkpoints.steps(directory):
        largest_file(directory / str(number)).unlink()
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(errors.InputError, match="no readable checkpoint"),
    ):
        checkpoints.restore(directory, make_state(0))


def test_other_shapes_are_named(saved):
    wide = dataclasses.replace(CONFIG, d_ff=12)
    with pytest.raises(errors.InputError, match=r"feed_forward/w[io] has shape"):
        checkpoints.restore(saved, make_state(0, wide))
    deep = dataclasses.replace(CONFIG, num_decoder_layers=2)
    with pytest.raises(errors.InputError, match=r"lacks model/decoder/1"):
        checkpoints.restore(saved, make_state(0, deep))
    tied = dataclasses.replace(CONFIG, tied_head=True)
    with pytest.raises(errors.InputError, match=r"holds model/head|holds opt_state"):
        checkpoints.restore(saved, make_state(0, tied))


def test_same_step_twice(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    with pytest.raises(errors.InputError, match="checkpoint 4 .* not written"):
        checkpoints.save(directory, 4, make_state(4), {})


def test_pure_dict_paths():
    pure = checkpoints.to_pure_dict(make_state(1))
    assert set(pure) == {"model", "opt_state", "step", "key", "epoch", "index"}
    assert pure["model"]["decoder"]["0"]["cross"]["kv"].shape == (2, 8, 8)
    assert pure["key"].dtype == np.uint32
    assert equal(checkpoints.from_pure_dict(make_state(2), pure), make_state(1))


LOW, HIGH = (checkpoints.Best("score", largest) for largest in (False, True))


@pytest.mark.parametrize(
    ("best", "expected"), [(None, [4, 5]), (LOW, [2, 4, 5]), (HIGH, [3, 4, 5])]
)
def test_the_best_stays(tmp_path, best, expected):
    # Not a number is no best; the newest of equals is.
    for number, score in enumerate([0.5, 0.5, 0.9, float("nan"), None], start=1):
        metrics = {} if score is None else {"score": score}
        checkpoints.save(
            tmp_path, number, {"a": jnp.ones(1)}, {}, metrics, keep=2, best=best
        )
    assert checkpoints.steps(tmp_path) == expected
    if best is not None:
        assert checkpoints.best_step(tmp_path, best) == expected[0]
    absent = checkpoints.Best("other", largest=True)
    assert checkpoints.best_step(tmp_path, absent) is None
    assert {path.name for path in tmp_path.iterdir()} == set(map(str, expected))


@partial(jax.jit, donate_argnums=0)
def add_one(tree):
    return jax.tree.map(lambda leaf: leaf + jnp.ones((), leaf.dtype), tree)


def test_in_the_background_the_state_is_that_of_its_step(tmp_path, monkeypatch):
    """Whose buffers belong to the next steps before a byte is written."""
    go_on, write = threading.Event(), checkpoints._save

    def wait_and_write(*arguments):
        assert go_on.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoints, "_save", wait_and_write)
    state = {"a": jnp.full((300, 300), 7.0), "b": jnp.full(3, 7, jnp.bfloat16)}
    like = jax.tree.map(jnp.zeros_like, state)
    held = state["a"]
    writing = checkpoints.save_in_background(tmp_path, 1, state, {})
    for _ in range(3):
        state = jax.block_until_ready(add_one(state))
    assert held.is_deleted() and not writing.done()
    assert checkpoints.steps(tmp_path) == []
    go_on.set()
    assert writing.exception() is None
    restored = checkpoints.restore(tmp_path, like).state
    for name, leaf in restored.items():
        assert leaf.dtype == like[name].dtype and (leaf == 7).all(), name


@pytest.mark.parametrize("at", ["_hashes", "_write_json", "orbax"])
def test_a_full_disk_leaves_the_earlier_ones(saved, tmp_path, monkeypatch, at):
    directory = copy_of(saved, tmp_path)

    def full(*arguments, **settings):
        raise OSError(errno.ENOSPC, "No space left on device")

    async def full_later(*arguments, **settings):
        full()

    handler = checkpoints.ocp.StandardCheckpointHandler
    with monkeypatch.context() as patch:
        if at == "orbax":
            patch.setattr(handler, "async_save", full_later)
        else:
            patch.setattr(checkpoints, at, full)
        writing = checkpoints.save_in_background(directory, 5, make_state(5), {})
        assert "No space left on device" in str(writing.exception())
    assert sorted(path.name for path in directory.iterdir()) == ["2", "3", "4"]
    assert equal(checkpoints.restore(directory, make_state(0)).state, make_state(4))
    # The next attempt needs nothing mended.
    checkpoints.save(directory, 6, make_state(6), {})
    assert checkpoints.steps(directory) == [3, 4, 6]


def test_what_a_kill_left_is_cleared(saved, tmp_path):
    directory = copy_of(saved, tmp_path)
    shutil.copytree(directory / "4", directory / "5.partial")
    assert checkpoints.restore(directory, make_state(0)).step == 4
    checkpoints.save(directory, 5, make_state(5), {})
    assert sorted(path.name for path in directory.iterdir()) == ["3", "4", "5"]


@pytest.mark.parametrize("saved_on, read_on", [(8, 1), (8, 2), (8, 4), (1, 8), (2, 8)])
def test_a_mesh_reads_what_another_wrote(tmp_path, saved_on, read_on):
    """Weights, moments, key and data position, straight to their shards."""

    def on(count: int, state: step.TrainState) -> step.TrainState:
        if count == 1:
            return state
        shape = f"data={count // 2},model=2"
        mesh = sharding.make_mesh(shape, jax.devices()[:count])
        return state.replace(
            model=sharding.place(state.model, mesh, sharding.TRAINING),
            opt_state=sharding.place(state.opt_state, mesh, sharding.TRAINING),
        )

    state = make_state(7)
    checkpoints.save(tmp_path, 7, on(saved_on, state), {})
    restored = checkpoints.restore(tmp_path, on(read_on, make_state(0)))
    assert restored is not None and equal(restored.state, state)
    places = jax.tree.map(lambda x: len(x.sharding.device_set), restored.state)
    assert {*jax.tree.leaves((places.model, places.opt_state))} == {read_on}
