"""Calls that cannot go well are refused before anything compiles, by name."""

from __future__ import annotations

import inspect
from typing import ClassVar

import jax
import jax.numpy as jnp
import pytest
from flax import struct

from specjax import (
    InputError,
    ModelDrafter,
    NgramDrafter,
    Sampling,
    Verifier,
    autoregressive_generate,
    checks,
    speculative_generate,
    token_verify,
)
from specjax.verify import token_rule
from tests.helpers import hash_pair, row_keys

TARGET, DRAFT = hash_pair()
INPUTS, MASK = jnp.ones((2, 3), jnp.int32), jnp.ones((2, 3), bool)


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch):
    """A refused call reaches neither loop."""

    def reached(*_, **__):
        raise AssertionError("the call was not refused")

    monkeypatch.setattr("specjax.decoding._speculative_loop", reached)
    monkeypatch.setattr("specjax.decoding._autoregressive_loop", reached)


COMMON = [
    ({"sampling": Sampling(top_p=0.0)}, r"sampling\.top_p is 0\.0: .* \(0, 1\]"),
    ({"sampling": Sampling(top_k=0)}, r"sampling\.top_k is 0: .* at least 1"),
    ({"sampling": Sampling(temperature=-1.0)}, r"sampling\.temperature is -1\.0"),
    ({"sampling": Sampling(temperature=jnp.ones(3))}, r"temperature has shape \(3,\)"),
    ({"sampling": Sampling(num_tokens=0)}, r"sampling\.num_tokens is 0"),
    ({"budget": -1}, r"budget is -1: .* from 0"),
    ({"budget": jnp.array([3, -2])}, r"budget is .*-2.*: .* from 0"),
    ({"budget": jnp.array([3, 2, 1])}, r"budget has shape \(3,\): .*one per row \(2\)"),
    ({"max_length": 1}, "max_length is 1 and the prefix has 1 columns"),
    (
        {"max_length": 4, "prefix": jnp.zeros((2, 4), jnp.int32)},
        "max_length is 4 and the prefix has 4 columns",
    ),
    (
        {"prefix": jnp.zeros((2, 2), jnp.int32), "prefix_length": jnp.array([0, 1])},
        r"prefix_length is \[0, 1\]: .* 1\.\.2",
    ),
    (
        {"prefix": jnp.zeros((2, 2), jnp.int32), "prefix_length": jnp.array([3, 1])},
        r"prefix_length is \[3, 1\]: .* 1\.\.2",
    ),
    ({"stop": jnp.array([[-1, 4]])}, "stop has shape .* padded with -1 on the right"),
    (
        {"stop": jnp.array([[5, -1, 4]])},
        "stop has shape .* padded with -1 on the right",
    ),
    ({"stop": jnp.zeros((0, 2), jnp.int32)}, r"stop has shape \(0, 2\)"),
    ({"sampling": Sampling(temperature=1e38)}, r"temperature is 1e\+38: .* to 1e\+30"),
]


@pytest.mark.parametrize("speculative", [False, True])
@pytest.mark.parametrize(("options", "message"), COMMON)
def test_refused_by_both_ways_to_decode(speculative, options, message):
    keys = row_keys(0, 2)
    with pytest.raises(InputError, match=message):
        if speculative:
            speculative_generate(
                TARGET, ModelDrafter(DRAFT), INPUTS, MASK, keys, **options
            )
        else:
            autoregressive_generate(TARGET, INPUTS, MASK, keys, **options)


@struct.dataclass
class Silent(NgramDrafter):
    """A drafter whose blocks carry no law."""

    has_law: ClassVar[bool] = False


WRONG_IDS = [
    (dict(inputs=INPUTS.at[0, 1].set(99)), r"inputs\[0, 1\] is 99: .* ids 0 to"),
    (dict(inputs=INPUTS.at[1, 0].set(-1)), r"inputs\[1, 0\] is -1"),
    (dict(prefix=jnp.array([[0, 3], [0, 99]])), r"prefix\[1, 1\] is 99"),
    (
        dict(budget=jnp.float32(2.7)),
        r"budget is 2\.7.*: new tokens per row",
    ),
    (dict(budget=2**40), "budget is 1099511627776"),
    (dict(sampling=Sampling(top_k=10**10)), "top_k is 10000000000"),
]


@pytest.mark.parametrize(("changed", "message"), WRONG_IDS)
def test_ids_and_counts_that_would_be_clamped(changed, message):
    arguments = dict(inputs=INPUTS, mask=MASK, keys=row_keys(0, 2)) | changed
    with pytest.raises(InputError, match=message):
        autoregressive_generate(TARGET, **arguments)


def test_ids_are_whole_numbers():
    with pytest.raises(InputError, match="inputs are of type float32"):
        checks.check_ids(
            jnp.ones((1, 2)),
            jnp.ones((1, 2), bool),
            jnp.zeros((1, 1), int),
            jnp.ones(1, int),
            10,
        )


def test_ids_outside_the_mask_and_the_prefix_are_not_read():
    checks.check_ids(
        jnp.array([[3, 99]]),
        jnp.array([[True, False]]),
        jnp.array([[0, 99]]),
        jnp.array([1]),
        10,
    )


SPECULATIVE = [
    ({"gamma": 0}, "gamma is 0: .* >= 1"),
    ({"gamma": -3}, "gamma is -3"),
    ({"drafter": DRAFT}, r"the drafter is a HashModel, .* ModelDrafter\(model\)"),
    (
        {"drafter": NgramDrafter(), "draft_sampling": Sampling()},
        "draft_sampling is set and NgramDrafter draws nothing",
    ),
    ({"drafter": Silent()}, "token_rule reads the draft's law and Silent has none"),
    (
        {"draft_sampling": Sampling(temperature=-2.0)},
        r"draft_sampling\.temperature is -2\.0",
    ),
    ({"draft_sampling": Sampling(top_k=jnp.ones(5, int))}, r"top_k has shape \(5,\)"),
]


@pytest.mark.parametrize(("options", "message"), SPECULATIVE)
def test_refused_by_speculation(options, message):
    drafter = options.pop("drafter", ModelDrafter(DRAFT))
    with pytest.raises(InputError, match=message):
        speculative_generate(TARGET, drafter, INPUTS, MASK, row_keys(0, 2), **options)


def test_a_rule_without_need_of_a_law_takes_a_drafter_without_one():
    verifier = Verifier(token_rule, needs_law=False)
    checks.check_speculation(Silent(), verifier, Sampling(), None, 4, 2)


def test_gamma_must_be_whole():
    for wrong in (2.5, True):
        with pytest.raises(InputError, match=f"gamma is {wrong}"):
            # Not through the public function, whose annotation already refuses it.
            checks.check_speculation.__wrapped__(
                NgramDrafter(), token_verify, Sampling(), None, wrong, 2
            )


def test_max_ngram_must_be_positive():
    with pytest.raises(InputError, match="max_ngram is 0"):
        NgramDrafter(max_ngram=0).init(
            TARGET,
            TARGET.encode(INPUTS, MASK),
            INPUTS,
            MASK,
            INPUTS[:, :1],
            jnp.ones(2, jnp.int32),
            8,
        )


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_another_kind(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 2)
    with pytest.raises(InputError, match=f"keys are of kind .*{impl}.*threefry"):
        checks.check_keys(keys, 2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (lambda: jax.random.PRNGKey(0), "not typed keys: .*random.split"),
        (lambda: jax.random.key(0), r"keys have shape \(\): one per row"),
        (lambda: row_keys(0, 3), r"keys have shape \(3,\): one per row.* 2\)"),
    ],
)
def test_keys_of_another_shape(keys, message):
    with pytest.raises(InputError, match=message):
        checks.check_keys(keys(), 2)


def test_this_is_why_other_keys_are_refused():
    """Under vmap, rbg draws every row's numbers from the first key."""

    def drawn(impl: str) -> jax.Array:
        keys = jax.random.split(jax.random.key(0, impl=impl), 2)
        changed = keys.at[0].set(jax.random.key(7, impl=impl))
        both = [jax.vmap(jax.random.uniform)(k)[1] for k in (keys, changed)]
        return both[0] == both[1]

    assert drawn("threefry2x32") and not drawn("rbg")


def test_shapes():
    def check(inputs=INPUTS, mask=MASK, prefix=None) -> None:
        prefix = jnp.zeros((2, 1), jnp.int32) if prefix is None else prefix
        checks.check_arguments(
            inputs,
            mask,
            row_keys(0, 2),
            Sampling(),
            8,
            3,
            prefix,
            jnp.array([1, 1]),
            1,
        )

    check()
    with pytest.raises(InputError, match=r"inputs have shape \(3,\)"):
        check(inputs=INPUTS[0], mask=MASK[0])
    with pytest.raises(InputError, match=r"inputs have shape \(2, 0\)"):
        check(inputs=INPUTS[:, :0], mask=MASK[:, :0])
    with pytest.raises(
        InputError, match=r"mask has shape \(2, 2\) and inputs \(2, 3\)"
    ):
        check(mask=MASK[:, :2])
    with pytest.raises(InputError, match=r"prefix has shape \(3, 1\).*\[2, P\]"):
        check(prefix=jnp.zeros((3, 1), jnp.int32))
    with pytest.raises(InputError, match=r"prefix has shape \(2, 0\)"):
        check(prefix=jnp.zeros((2, 0), jnp.int32))


def test_the_draft_shares_the_targets_dead_rows():
    """The target's num_tokens rules the draft too, unless it has its own."""

    def settled(draft: Sampling | None) -> Sampling:
        sampling = Sampling(num_tokens=60)
        drafter = ModelDrafter(DRAFT)
        return checks.check_speculation(drafter, token_verify, sampling, draft, 4, 2)

    assert settled(None) == Sampling(num_tokens=60)
    assert settled(Sampling(temperature=0.5)).num_tokens == 60
    assert settled(Sampling(num_tokens=50)).num_tokens == 50


def test_types_that_the_signatures_rule_out_where_they_are_not_checked():
    def eos(eos_id):
        prefix, ones = jnp.zeros((2, 1), jnp.int32), jnp.ones(2, jnp.int32)
        checks.check_arguments(
            INPUTS, MASK, row_keys(0, 2), Sampling(), 8, 3, prefix, ones, eos_id
        )

    with pytest.raises(InputError, match=r"eos_id is \[1 2\]: one whole number"):
        eos(jnp.array([1, 2]))
    with pytest.raises(InputError, match=r"eos_id is 1\.0: one whole number"):
        eos(jnp.array(1.0))
    with pytest.raises(InputError, match="stop is of type float32"):
        checks.check_stop(jnp.array([[3.5]]))
    unchecked = inspect.unwrap(checks.check_speculation)
    with pytest.raises(InputError, match="the verifier is a function, not a Verifier"):
        unchecked(ModelDrafter(DRAFT), token_rule, Sampling(), None, 3, 2)


def test_traced_settings_pass():
    """Inside a caller's own jit there is nothing to look at: no check, no crash."""

    @jax.jit
    def run(temperature, budget):
        checks.check_arguments(
            INPUTS,
            MASK,
            row_keys(0, 2),
            Sampling(temperature=temperature),
            8,
            budget,
            jnp.zeros((2, 1), jnp.int32),
            jnp.ones(2, jnp.int32),
            1,
        )
        return temperature

    assert run(0.5, 3) == 0.5


def test_stop_sequences_pass_as_int32():
    assert checks.check_stop(None) is None
    stop = checks.check_stop(jnp.array([[5, 6, -1], [7, -1, -1]]))
    assert stop.dtype == jnp.int32 and stop.shape == (2, 3)
    # Room for a second sequence, so that one more needs no other program.
    assert checks.check_stop(jnp.array([[5], [-1]])).shape == (2, 1)
