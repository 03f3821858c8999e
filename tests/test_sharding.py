"""A mesh of eight devices decodes what one does, and moves no more than needed.

The devices are virtual: eight of the CPU's, in one process (see `conftest`).
"""

from __future__ import annotations

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from experiments.compiled_text import Program
from specjax import (
    ModelDrafter,
    Sampling,
    autoregressive_generate,
    decoding,
    speculative_generate,
)
from specjax.drafters.quantized import quantize
from specjax.errors import InputError
from specjax.sharding import (
    DATA,
    DECODING,
    MODEL,
    REPLICATED,
    TRAINING,
    check_heads,
    make_mesh,
    padded_rows,
    place,
    place_rows,
    shardings,
    spec_of,
)
from tests.helpers import perturbed, ragged_sources, row_keys, tiny_t5

MESHES = ("data=8", "data=4,model=2", "data=2,model=4", "model=8")
VOCAB, WIDTH, LAYERS, GAMMA, ROWS = 64, 32, 2, 3, 8
SAMPLINGS = {"greedy": Sampling(temperature=None), "sampled": Sampling(temperature=1.0)}


@functools.cache
def models():
    target = tiny_t5(d_model=WIDTH, num_heads=8)
    return target, perturbed(target, 1, 0.3)


def arguments(rows=ROWS):
    inputs, mask = ragged_sources(3, rows, 12)
    budget = jnp.asarray(np.arange(rows) % 5 + 8, jnp.int32)
    return inputs, mask, row_keys(0, rows), budget


def decode(target, drafter, rows, sampling, **options):
    inputs, mask, keys, budget = rows
    options = {"sampling": sampling, "budget": budget, "max_length": 14, **options}
    if drafter is None:
        return autoregressive_generate(target, inputs, mask, keys, **options)
    return speculative_generate(
        target, drafter, inputs, mask, keys, gamma=GAMMA, **options
    )


@functools.cache
def alone(name, drafted):
    target, draft = models()
    drafter = ModelDrafter(draft) if drafted else None
    return decode(target, drafter, arguments(), SAMPLINGS[name], log_probs=True)


@pytest.mark.parametrize("drafted", [True, False], ids=["speculative", "plain"])
@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("text", MESHES)
def test_a_mesh_writes_what_one_device_writes(text, name, drafted):
    mesh = make_mesh(text)
    target, draft = models()
    drafter = ModelDrafter(place(draft, mesh)) if drafted else None
    with jax.set_mesh(mesh):
        output = decode(
            place(target, mesh),
            drafter,
            place_rows(arguments(), mesh),
            SAMPLINGS[name],
            log_probs=True,
        )
    known = alone(name, drafted)
    assert len(output.tokens.sharding.device_set) == 8
    np.testing.assert_array_equal(output.tokens, known.tokens)
    np.testing.assert_array_equal(output.length, known.length)
    jax.tree.map(np.testing.assert_array_equal, output.stats, known.stats)
    np.testing.assert_allclose(output.log_probs, known.log_probs, atol=1e-5)
    if drafted:
        accepted, tried = known.stats.accepted.sum(), known.stats.drafted.sum()
        assert 0 < accepted < tried  # else drafts would not have mattered


def test_rows_that_a_mesh_does_not_divide_are_filled_up():
    mesh = make_mesh("data=4,model=2")
    target, draft = models()
    rows = arguments(5)
    assert padded_rows(5, mesh) == 8 and padded_rows(8, mesh) == 8
    with pytest.raises(InputError, match=r"data=4 does not divide the 5 rows.*to 8"):
        place_rows(rows, mesh)
    inputs, mask, keys, budget = rows
    filled = (
        jnp.pad(inputs, ((0, 3), (0, 0))),
        jnp.pad(mask, ((0, 3), (0, 0))),
        jnp.concatenate([keys, keys[:3]]),
        jnp.pad(budget, (0, 3)),
    )
    with jax.set_mesh(mesh):
        output = decode(
            place(target, mesh),
            ModelDrafter(place(draft, mesh, REPLICATED)),
            place_rows(filled, mesh),
            SAMPLINGS["sampled"],
        )
    own = decode(target, ModelDrafter(draft), rows, SAMPLINGS["sampled"])
    np.testing.assert_array_equal(output.tokens[:5], own.tokens)
    np.testing.assert_array_equal(output.length, [*own.length, 1, 1, 1])


def exchanges(text, layout=REPLICATED, sampling="sampled", rows=ROWS, devices=None):
    """What the devices of a mesh say to each other in a decode, its loop included."""
    mesh = make_mesh(text, devices)
    target, draft = models()
    inputs, mask, keys, budget = place_rows(arguments(rows), mesh)
    with jax.set_mesh(mesh):
        compiled = decoding._speculative_loop.lower(
            place(target, mesh),
            ModelDrafter(place(draft, mesh, layout)),
            inputs=inputs,
            mask=mask,
            keys=keys,
            verifier=decoding.token_verify,
            sampling=decoding.with_arrays(SAMPLINGS[sampling]),
            draft_sampling=decoding.with_arrays(SAMPLINGS[sampling]),
            gamma=GAMMA,
            max_length=14,
            budget=budget,
            prefix=jnp.zeros((rows, 1), jnp.int32),
            prefix_length=jnp.ones(rows, jnp.int32),
            eos_id=jnp.int32(1),
            stop=None,
            log_probs=False,
            trace=False,
        ).compile()
    return Program.parse(compiled.as_text()).collectives()


@pytest.mark.parametrize("size", [2, 4, 8])
def test_rows_on_more_devices_cost_one_word_a_round(size):
    """Weak scaling: all that is said is whether some row is not yet done."""
    found = exchanges(f"data={size}", rows=size, devices=jax.devices()[:size])
    assert found == Counter({("all-reduce", ()): 1})


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("layout", [REPLICATED, DECODING], ids=["whole", "split"])
def test_no_weights_and_no_laws_are_gathered(layout, name):
    """Products are added up; of the vocabulary, each device tells its own best."""
    size = 8
    found = exchanges(f"model={size}", layout, name)
    assert not any(VOCAB in dims for _, dims in found), found
    numbers = size * ROWS * (GAMMA + 1)  # one of each device at each position
    others = [dims for op, dims in found if op != "all-reduce"]
    assert all(np.prod(dims) <= numbers for dims in others), found
    # Two for a layer of an encoder, three of a decoder, and one for an embedding. A
    # draft's decoder stands there twice: its first pass, and the scan of the others.
    products = sum(
        count
        for (op, dims), count in found.items()
        if op == "all-reduce" and dims and dims[-1] == WIDTH
    )
    encoders = 1 if layout is REPLICATED else 2
    decoders = 1 if layout is REPLICATED else 3
    wanted = (2 * encoders + 3 * decoders) * LAYERS + encoders + decoders
    assert products == wanted, found


def test_a_gathered_weight_would_be_seen():
    """The twin: an embedding that all devices need as a whole."""
    mesh = make_mesh("model=8")
    target, _ = models()
    rows = jnp.arange(4, dtype=jnp.int32)
    whole = jax.NamedSharding(mesh, PartitionSpec())

    def gathered(table):
        return jax.lax.with_sharding_constraint(table, whole)[rows]

    text = jax.jit(gathered).lower(place(target, mesh).embedding[...]).compile()
    assert any(VOCAB in dims for _, dims in Program.parse(text.as_text()).collectives())


@pytest.mark.parametrize(
    "changes",
    [{}, {"tied_head": True}, {"gated": False}, {"bias_per_layer": True}],
    ids=["1.1", "tied", "ungated", "umT5"],
)
def test_every_matrix_has_a_rule(changes):
    """A parameter that no rule names would be on every device, unseen."""
    model = tiny_t5(num_heads=8, **changes)
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    for at, leaf in leaves:
        path = jax.tree_util.keystr(at)
        spec = spec_of(path, leaf.shape, TRAINING)
        if leaf.ndim == 1:
            assert spec == PartitionSpec(), path
        elif ".bias" in path:
            assert spec == PartitionSpec(None, MODEL), path
        else:
            assert {*spec} - {None} == {DATA, MODEL}, path


def test_numbers_of_a_quantized_weight_lie_with_their_scales():
    mesh = make_mesh("model=8")
    target, _ = models()
    placed = shardings(quantize(target), mesh)
    specs = {
        jax.tree_util.keystr(path): own.spec
        for path, own in jax.tree_util.tree_flatten_with_path(placed)[0]
    }
    qkv = {path: spec for path, spec in specs.items() if ".qkv" in path}
    assert qkv
    for path, spec in qkv.items():
        assert spec[1] == MODEL, path


@pytest.mark.parametrize(
    "text, message",
    [
        ("data=3", "takes 3 devices, and there are 8 .cpu.*such as data=8"),
        ("data=2,tensor=4", "'tensor=4' is no part"),
        ("data=2,data=4", "'data=4' is no part"),
        ("data=0,model=8", "'data=0' is no part"),
        ("model", "'model' is no part"),
        ("", "'' is no part"),
    ],
)
def test_meshes_that_cannot_be(text, message):
    with pytest.raises(InputError, match=message):
        make_mesh(text)


def test_units_that_a_mesh_does_not_divide():
    mesh = make_mesh("data=2,model=4")
    with pytest.raises(InputError, match="heads of the target: take one of 1, 2, 3, 6"):
        check_heads(6, mesh.shape)
    check_heads(8, mesh.shape)
    with pytest.raises(
        InputError, match=r"model=4 does not divide the 66 units of .*embedding"
    ):
        place(tiny_t5(vocab_size=66), mesh)
