"""The joint law of what speculation writes, against the target's exact joint law.

Models of known tables, 200,000 rows, chi-square on the first four tokens together.
Every claim has wrong twins that the same statistic rejects.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    ModelDrafter,
    NgramDrafter,
    Sampling,
    Verifier,
    autoregressive_generate,
    block_verify,
    speculative_generate,
    token_verify,
)
from specjax.decoding import DecodeOutput
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import (
    as_table,
    joint_law,
    num_prefixes,
    table_model,
    transformed,
)
from tests.helpers import per_row, quick_programs, row_keys  # noqa: F401
from tests.twins import (
    FLAWS,
    RIGHT_RULES,
    WRONG_RULES,
    TwinDrafter,
    chosen_rule,
    right_rule,
)

ROWS = 200_000
VOCAB = 4
TOKENS = 4
GAMMA = 3
TARGET = table_model(0, VOCAB, TOKENS - 1, zeros=0.2)
DRAFT = table_model(1, VOCAB, TOKENS - 1, zeros=0.15, like=TARGET, mix=0.5)
VERIFIERS = {"token": token_verify, "block": block_verify}


def settings(values: dict | None, cut: bool) -> Sampling:
    """Sampling by row, with top-k and top-p in the program only where they are wanted.

    On a CPU the sort costs more than all the rest of these small decodes.
    """
    if cut:
        return per_row(ROWS, **(values or {}))
    temperature = jnp.asarray((values or {}).get("temperature", 1.0), jnp.float32)
    return Sampling(temperature=jnp.broadcast_to(temperature, ROWS))


def decode(
    drafter,
    verifier,
    *,
    gamma=2,
    target=TARGET,
    on_target=None,
    on_draft=None,
    cut=False,
    seed=0,
    eos_id=-1,
) -> DecodeOutput:
    """One run; sampling settings are `{temperature, top_k, top_p}` for each side."""
    generator = np.random.default_rng(3)
    inputs = jnp.asarray(generator.integers(0, VOCAB, (ROWS, 6)), jnp.int32)
    if isinstance(on_draft, dict):
        on_draft = settings(on_draft, cut)
    return speculative_generate(
        target,
        drafter,
        inputs,
        jnp.ones(inputs.shape, bool),
        row_keys(seed, ROWS),
        verifier=verifier,
        sampling=settings(on_target, cut),
        draft_sampling=on_draft,
        gamma=gamma,
        max_length=TOKENS + 1,
        eos_id=eos_id,
    )


def p_value(output: DecodeOutput, model, rows=slice(None), **law) -> float:
    written = np.asarray(output.tokens)[rows, 1:]
    return chi_square_p(written, joint_law(model, TOKENS, **law))


def acceptance(output: DecodeOutput) -> float:
    return float(output.stats.accepted.sum() / output.stats.drafted.sum())


# For each side: temperature, top-k, top-p.
TEMPERATURES = {
    "plain": ({}, {}),
    "cold": ({"temperature": 0.3}, {"temperature": 0.3}),
    "hot": ({"temperature": 2.0}, {"temperature": 2.0}),
    "cold draft": ({}, {"temperature": 0.3}),
    "greedy draft": ({}, {"temperature": 0.0}),
}
CUTS = {
    "top-k on the target": ({"top_k": 2}, {}),
    "top-k of 1 on the draft": ({}, {"top_k": 1}),
    "top-p on the target": ({"top_p": 0.6}, {}),
    "top-p on the draft": ({}, {"top_p": 0.6}),
    "all on both": (
        {"temperature": 0.7, "top_k": 3, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 2, "top_p": 0.9},
    ),
}
GAMMAS = [2, pytest.param(3, marks=pytest.mark.slow)]
# With gamma 3 every case is tried; otherwise all but these.
ONLY_SLOW = ("hot", "greedy draft", "top-k of 1 on the draft", "top-p on the target")


def cases(table: dict, gamma: int) -> dict:
    return {name: v for name, v in table.items() if gamma > 2 or name not in ONLY_SLOW}


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize(
    "name", ["token", pytest.param("block", marks=pytest.mark.slow)]
)
def test_cut_laws(name, gamma):
    """Top-k and top-p on either side."""
    values = {}
    for case, (on_target, on_draft) in cases(CUTS, gamma).items():
        output = decode(
            ModelDrafter(DRAFT),
            VERIFIERS[name],
            gamma=gamma,
            on_target=on_target,
            on_draft=on_draft,
            cut=True,
        )
        assert 0.05 < acceptance(output) < 0.99, case
        values[case] = p_value(output, transformed(TARGET, **on_target))
    assert min(values.values()) > 1e-3, values
    assert p_value(output, TARGET) < 1e-6


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize(
    "name", ["block", pytest.param("token", marks=pytest.mark.slow)]
)
def test_temperatures_and_supports(name, gamma):
    """Temperatures on either side and by row; p = q; disjoint supports; EOS."""
    verifier, drafter, values = VERIFIERS[name], ModelDrafter(DRAFT), {}

    def run(drafter=drafter, on_draft=None, **more) -> DecodeOutput:
        on_draft = {} if on_draft is None else on_draft
        return decode(drafter, verifier, gamma=gamma, on_draft=on_draft, **more)

    for case, (on_target, on_draft) in cases(TEMPERATURES, gamma).items():
        output = run(on_target=on_target, on_draft=on_draft)
        assert 0.05 < acceptance(output) < 0.99, case
        values[case] = p_value(output, transformed(TARGET, **on_target))
        assert output.tokens.min() >= 0 and output.tokens.max() < VOCAB
    # The statistic tells the laws apart that it should.
    assert p_value(output, DRAFT) < 1e-6
    assert p_value(output, transformed(TARGET, temperature=0.95)) < 1e-6

    # Temperature by row: each half follows its own law.
    half = jnp.where(jnp.arange(ROWS) < ROWS // 2, 0.3, 2.0)
    output = run(on_target={"temperature": half})
    for rows, temperature in ((slice(ROWS // 2), 0.3), (slice(ROWS // 2, ROWS), 2.0)):
        law = transformed(TARGET, temperature=temperature)
        values[f"row by row, {temperature}"] = p_value(output, law, rows)
    assert p_value(output, law, slice(ROWS // 2)) < 1e-6

    # A draft that is the target: everything is accepted.
    output = run(ModelDrafter(TARGET), seed=1)
    assert (output.stats.accepted == output.stats.drafted).all()
    values["p = q"] = p_value(output, TARGET)

    # A draft that never says what the target could say: nothing is.
    generator = np.random.default_rng(5)
    even, odd = generator.dirichlet([1, 1], (2, num_prefixes(VOCAB, TOKENS - 1)))
    zero = np.zeros_like(even)
    low = as_table(np.concatenate([even, zero], 1), TOKENS - 1)
    high = as_table(np.concatenate([zero, odd], 1), TOKENS - 1)
    output = run(ModelDrafter(high), target=low)
    assert output.stats.accepted.sum() == 0
    values["disjoint"] = p_value(output, low)

    # Rows that end early: pad after the first EOS.
    output = run(eos_id=1)
    values["eos"] = p_value(output, TARGET, eos_id=1)
    assert p_value(output, TARGET, eos_id=2) < 1e-6

    assert min(values.values()) > 1e-3, values


@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize(
    "kind", ["ngram", pytest.param("greedy", marks=pytest.mark.slow)]
)
def test_one_hot_draft(kind, gamma):
    """Copied drafts and argmax drafts have a one-hot law."""
    values = {}
    drafter, on_draft = NgramDrafter(), None
    if kind == "greedy":
        drafter, on_draft = ModelDrafter(DRAFT), Sampling(temperature=None)
    for name in VERIFIERS:
        verifier = Verifier(right_rule, params=jnp.int32(name == "block"))
        for on_target in ({}, {"temperature": 0.5}):
            output = decode(
                drafter, verifier, gamma=gamma, on_target=on_target, on_draft=on_draft
            )
            assert 0.1 < acceptance(output) < 0.9
            law = transformed(TARGET, **on_target)
            values[name, str(on_target)] = p_value(output, law)
    assert min(values.values()) > 1e-3, values
    assert p_value(output, TARGET) < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("gamma", GAMMAS)
def test_varying_length_and_wrong_twins(gamma):
    """Drafts that stop by their own tokens are exact; each known fault is found out."""

    def run(rule: str, flaw: str, draft=DRAFT, **more) -> DecodeOutput:
        drafter = TwinDrafter(
            inner=ModelDrafter(draft),
            flaw=jnp.int32(FLAWS.index(flaw)),
            keys=row_keys(99, ROWS),
        )
        number = (*RIGHT_RULES, *WRONG_RULES).index(rule)
        verifier = Verifier(chosen_rule, params=jnp.int32(number))
        return decode(drafter, verifier, gamma=gamma, on_draft={}, **more)

    # Laws without zeros that differ much: here noise by position shows most.
    far = dict(
        target=table_model(11, VOCAB, TOKENS - 1),
        draft=table_model(21, VOCAB, TOKENS - 1),
    )
    values, cold = {}, {"temperature": 0.5}
    for rule in RIGHT_RULES:
        output = run(rule, "keep")
        at_depth = output.stats.drafted.sum(0)
        assert output.stats.target_calls.sum() > at_depth[0] > at_depth[1] > 0
        values[rule, "keep"] = p_value(output, TARGET)
        output = run(rule, "none", on_target=cold, seed=4)
        values[rule, "none"] = p_value(output, transformed(TARGET, **cold))
    # Noise by position is harmless to the token rule alone.
    output = run("token_rule", "position", **far)
    values["token_rule", "position"] = p_value(output, far["target"])
    assert min(values.values()) > 1e-3, values

    wrong = {rule: p_value(run(rule, "none"), TARGET) for rule in WRONG_RULES}
    for rule in RIGHT_RULES:
        for flaw in ("drop", "argmax", "before_top_k"):
            wrong[rule, flaw] = p_value(run(rule, flaw), TARGET)
    output = run("block_rule", "position", **far)
    wrong["block_rule", "position"] = p_value(output, far["target"])
    assert max(wrong.values()) < 1e-6, wrong


def test_autoregressive_baseline():
    """The baseline that everything else is compared with follows the same law."""
    inputs, mask = jnp.zeros((ROWS, 1), jnp.int32), jnp.ones((ROWS, 1), bool)
    for values in ({}, {"temperature": 0.5, "top_k": 3, "top_p": 0.9}):
        output = autoregressive_generate(
            TARGET,
            inputs,
            mask,
            row_keys(2, ROWS),
            sampling=per_row(ROWS, **values),
            max_length=TOKENS + 1,
            eos_id=-1,
        )
        assert p_value(output, transformed(TARGET, **values)) > 1e-3
    assert p_value(output, TARGET) < 1e-6
