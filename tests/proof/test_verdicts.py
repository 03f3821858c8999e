"""The kit accepts right rules and drafters, and catches biased twins of them."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import block_verify, token_verify, verify
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.proof import grid, verdicts
from specjax.proof.grid import Cut, Finding, Way
from specjax.verify import Verifier
from tests.twins import FLAWS, RIGHT_RULES, WRONG_RULES, TwinDrafter, chosen_rule

SLOW = pytest.mark.slow
PAIRS = grid.make_pairs()
CELLS = grid.cells(kinds=("soft",), settings=("T=1", "T=2", "zeros in q"))
ROWS = 40_000


def twin(rule: str, flaw: str) -> verdicts.Subject:
    """A rule of `tests.twins` with one of its drafters; all share one program."""

    def make(model, rows):
        number = jnp.int32(FLAWS.index(flaw))
        return TwinDrafter(inner=ModelDrafter(model), flaw=number, keys=rows.keys)

    number = (*RIGHT_RULES, *WRONG_RULES).index(rule)
    verifier = Verifier(chosen_rule, params=jnp.int32(number))
    return verdicts.Subject(f"{rule}, {flaw}", verifier, Way(grid.CHAIN, None), make)


def line_of(subject: verdicts.Subject, rows: int = ROWS) -> verdicts.Line:
    proof = verdicts.prove(subject, PAIRS, CELLS, rows, 1)
    (line,) = verdicts.lines([proof], [None])
    return line


@pytest.mark.parametrize(
    ("rule", "flaw"),
    [
        pytest.param("token_rule", "none", marks=SLOW),
        pytest.param("block_rule", "none", marks=SLOW),
        pytest.param("token_rule", "keep", marks=SLOW),
        pytest.param("block_rule", "keep", marks=SLOW),
        pytest.param("token_rule", "position", marks=SLOW),  # biased for block alone
    ],
)
def test_right_ones_pass(rule, flaw):
    assert line_of(twin(rule, flaw)).faults == []


@pytest.mark.parametrize(
    ("rule", "flaw"),
    [
        ("raw_last_block", "none"),
        *(
            pytest.param(rule, flaw, marks=SLOW)
            for rule in RIGHT_RULES
            for flaw in ("drop", "before_top_k", "argmax")
        ),
        pytest.param("block_rule", "position", marks=SLOW),
        *(
            pytest.param(rule, "none", marks=SLOW)
            for rule in WRONG_RULES
            if rule != "raw_last_block"
        ),
    ],
)
def test_biased_twins_are_caught(rule, flaw):
    line = line_of(twin(rule, flaw))
    assert line.joint_p < verdicts.LEVEL and not line.good
    assert any("do not follow the target's law at" in own for own in line.faults)
    assert line.independent


def test_a_drafter_with_laws_of_its_own_is_proved_by_its_tokens_alone():
    """Its drafts are not the tables', so that their number is not enumerated."""

    def subject(enumerated):
        return verdicts.Subject(
            "copies",
            token_verify,
            Way(grid.CHAIN, None),
            lambda model, rows: NgramDrafter(),
            enumerated=enumerated,
        )

    line = line_of(subject(False), 4_000)
    assert line.z is None and line.accepted_p is None and line.faults == []
    (fault,) = line_of(subject(True), 4_000).faults
    assert "accepts another number of drafts than enumeration says" in fault


@SLOW
@pytest.mark.parametrize("lenient", [0.95, 1.0])
def test_a_control_that_is_not_caught_is_a_fault(lenient):
    subject = twin("token_rule", "none")
    rule = verify.lenient(lenient)
    subject = dataclasses.replace(subject, verifier=rule)
    line = line_of(subject)
    caught = lenient < 1
    assert line.good == caught and (line.joint_p < verdicts.LEVEL) == caught
    if not caught:
        assert "was not caught" in line.faults[0]


def finding(setting="T=1", joint_p=0.5, z=1.0, accepted_p=0.5) -> Finding:
    cell = grid.Cell("soft", setting, 0, Cut(), Cut())
    return Finding(cell, joint_p, z, accepted_p)


def proof(verifier, *rounds, independent=True) -> verdicts.Proof:
    (subject,) = verdicts.subjects("mine", verifier)
    return verdicts.Proof(subject, rounds, independent)


def test_faults_name_setting_round_and_p_value():
    fair = (finding(), finding("T=2"))
    wrong = (finding(), finding("T=2", joint_p=1e-7, z=9.0, accepted_p=1e-8))
    found = verdicts.lines([proof(token_verify, fair, wrong)], [False])
    (line,) = found
    assert (line.where, line.raw_p, line.z) == ("T=2, round 2", 1e-7, 9.0)
    np.testing.assert_allclose(line.joint_p, 4e-7)  # four p-values
    law, accepted, greedy = line.faults
    assert "at T=2, round 2 (p = 1e-07, corrected 4e-07)" in law
    assert "at T=2, round 2 (|z| = 9.0" in accepted and "other tokens" in greedy
    (line,) = verdicts.lines(
        [proof(block_verify, fair, fair, independent=False)], [True]
    )
    assert line.faults == ["a row's tokens depend on other rows"]
    (line,) = verdicts.lines([proof(block_verify, fair, fair)], [True])
    assert line.good and line.joint_p == 1.0


def test_p_values_are_corrected_over_all_lossless_rules_together():
    seen = (finding(joint_p=4e-4),)
    alone = verdicts.lines([proof(token_verify, seen)], [True])
    assert not alone[0].good
    both = verdicts.lines(
        [
            proof(token_verify, seen),
            proof(block_verify, (finding(),), (finding(),)),
            proof(verify.typical(), (finding(joint_p=2e-4, z=None, accepted_p=None),)),
        ],
        [True, True, None],
    )
    assert both[0].good and both[0].joint_p == pytest.approx(3 * 4e-4)
    # The control at the same bar: three p-values are claimed.
    assert both[2].joint_p == pytest.approx(6e-4) and both[2].good
    assert both[2].z is None and both[2].accepted_p is None


def test_layouts():
    def layouts(rule):
        return [(way.tree, way.siblings) for way in grid.ways(rule)]

    assert layouts(token_verify) == [(grid.CHAIN, None)]
    assert layouts(verify.best_path_verify) == [(grid.PATHS, "paths")]
    assert layouts(verify.kseq_verify) == [(grid.TREE, "independent")]
    assert layouts(verify.exact_match_verify) == [
        (grid.TREE, "distinct"),
        (grid.TREE, "chosen"),
    ]
    names = [own.name for own in verdicts.subjects("coupled", verify.coupled_verify)]
    assert names == ["coupled", "coupled, chosen"]
