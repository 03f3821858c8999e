"""Training on a mesh: the same losses, each matrix split, and any mesh goes on."""

from __future__ import annotations

import re

import jax
import numpy as np
import pytest

from experiments import train
from specjax import errors
from specjax.sharding import DATA, MODEL
from tests import tiny_run

pytestmark = pytest.mark.usefixtures("standard_promotion")  # as optax has it


def config(folder, mesh="", steps=8, **optimizer):
    own = tiny_run.tiny_config(folder)
    own.update(mesh=mesh)
    own.optimizer.update(steps=steps, **optimizer)
    own.model.update(vocab_size=208)  # padded to what meshes divide
    own.data.update(multiple_of=4)
    own.evaluate.update(batch_size=4)
    return own


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("alone")
    with jax.numpy_dtype_promotion("standard"):
        train.train(config(folder), workdir, show=lambda line: None)
    return tiny_run.lines(workdir)


def assert_alike(found, known):
    assert len(found) == len(known)
    for own, other in zip(found, known, strict=True):
        assert own.keys() == other.keys()
        np.testing.assert_allclose(
            [own[name] for name in own], [other[name] for name in own], rtol=1e-3
        )


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["data=4,model=2", "data=2,model=4"])
def test_a_mesh_learns_the_same(folder, alone, tmp_path, mesh):
    state = train.train(config(folder, mesh), tmp_path, show=lambda line: None)
    assert_alike(tiny_run.lines(tmp_path), alone)
    leaves = jax.tree_util.tree_flatten_with_path((state.model, state.opt_state))[0]
    split = 0
    for path, leaf in leaves:
        name = jax.tree_util.keystr(path)
        if leaf.ndim >= 2 and not re.search(r"\.bias\b", name):
            assert {*leaf.sharding.spec} - {None} == {DATA, MODEL}, name
            split += leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    assert split > 20  # matrices and both their moments


@pytest.mark.slow
def test_another_mesh_goes_on(folder, alone, tmp_path):
    def show(line):
        shown.append(line)

    shown = []
    train.train(config(folder, "data=4,model=2", steps=4), tmp_path, show)
    train.train(config(folder, "data=2,model=4"), tmp_path, show)
    assert any("resumed at step 4" in line for line in shown)
    found = [line for line in tiny_run.lines(tmp_path) if "loss" in line]
    known = [line for line in alone if "loss" in line]
    assert [line["step"] for line in found] == [line["step"] for line in known]


@pytest.mark.slow
def test_sums_over_an_axis_stay_whole(folder, tmp_path):
    """Adafactor keeps vectors in place of a matrix of squares."""
    own = config(folder, "data=2,model=4", steps=2, name="adafactor")
    own.update(evaluate_every=2)
    train.train(own, tmp_path, show=lambda line: None)
    assert len(tiny_run.losses(tmp_path)) == 2


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(mesh="data=8"), "config.data.multiple_of is 4 and the mesh's data is 8"),
        (dict(mesh="model=8"), "does not divide the 4 attention heads of the model"),
        (dict(mesh="rows=8"), "'rows=8' is no part"),
    ],
)
def test_meshes_that_do_not_fit(folder, tmp_path, changes, message):
    own = config(folder)
    own.update(changes)
    with pytest.raises(errors.InputError, match=message):
        train.train(own, tmp_path, show=lambda line: None)
    assert not (tmp_path / "checkpoints").exists()
