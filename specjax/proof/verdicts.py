"""From samples to verdicts: a rule is proved, fails, or is caught as the lossy one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from specjax.proof import grid, statistics
from specjax.proof.grid import Cell, Finding, MakeDrafter, Pairs, Way
from specjax.verify import Verifier

# The chance that anything at all is found wrong where nothing is.
LEVEL = 1e-3


@dataclasses.dataclass(frozen=True)
class Subject:
    """A rule with drafts to judge.

    Attributes:
        name: of both.
        verifier: the rule.
        way: how its drafts are laid out.
        make: makes the drafter of a model and rows.
        enumerated: the drafts follow the draft's tables, so that how many stand can be
            enumerated too; False: of a drafter that has laws of its own.
    """

    name: str
    verifier: Verifier
    way: Way
    make: MakeDrafter
    enumerated: bool = True


def subjects(name: str, verifier: Verifier) -> list[Subject]:
    """A rule on every layout that it takes."""
    found = []
    for way in grid.ways(verifier):
        full = f"{name}, chosen" if way.siblings == "chosen" else name
        found.append(Subject(full, verifier, way, grid.drafter_of(way)))
    return found


@dataclasses.dataclass(frozen=True)
class Proof:
    """What was seen of one subject.

    Attributes:
        subject: the rule and its drafts.
        findings: of each round, cell by cell.
        independent: rows wrote the same in another order, among other rows.
    """

    subject: Subject
    findings: tuple[tuple[Finding, ...], ...]
    independent: bool


def prove(
    subject: Subject,
    pairs: Pairs,
    cells: Sequence[Cell],
    rows: int,
    rounds: int,
    seed: int = 0,
) -> Proof:
    """Samples a subject and compares it with what is exact, all in one program.

    Args:
        subject: the rule and its drafts.
        pairs: tables to decode with.
        cells: kinds of draft and settings.
        rows: per cell and round.
        rounds: one or more, each with keys of its own.
        seed: of the keys.
    """
    joint = grid.joint_laws(pairs, cells)
    accepted: Sequence[list[float] | None] = [None] * len(cells)
    if subject.enumerated:
        accepted = grid.accepted_laws(pairs, cells, subject.verifier, subject.way)
    # Another seed makes other keys in every round.
    seeds = np.random.SeedSequence(seed).generate_state(rounds + 1)
    *batches, others = [grid.make_rows(cells, rows, int(own)) for own in seeds]
    outputs = [
        grid.decode(pairs, subject.verifier, subject.make, batch) for batch in batches
    ]
    return Proof(
        subject=subject,
        findings=tuple(
            tuple(grid.judge(cells, output, joint, accepted)) for output in outputs
        ),
        independent=grid.rows_independent(
            pairs, subject.verifier, subject.make, batches[0], outputs[0], others
        ),
    )


@dataclasses.dataclass(frozen=True)
class Line:
    """The verdict on one subject with one kind of draft.

    Attributes:
        name: of the subject.
        kind: of draft.
        lossless: what the rule claims.
        joint_p: least corrected p-value of the tokens' joint law.
        where: its setting and round.
        raw_p: the same, uncorrected.
        z: largest distance of accepted drafts from their expectation, in standard
            errors; None: not enumerated.
        accepted_p: least corrected p-value of it.
        accepted_where: its setting and round.
        greedy: greedy decoding wrote the same with drafts as without; None: no claim.
        independent: rows did not depend on one another.
    """

    name: str
    kind: str
    lossless: bool
    joint_p: float
    where: str
    raw_p: float
    z: float | None
    accepted_p: float | None
    accepted_where: str
    greedy: bool | None
    independent: bool

    @property
    def good(self) -> bool:
        """Whether all is as it must be: a lossy rule must be caught."""
        return not self.faults

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words."""
        if not self.lossless:
            if self.joint_p < LEVEL:
                return []
            return [
                f"it is lossy and was not caught (p = {self.joint_p:.2g}): too few rows"
            ]
        found = []
        if self.joint_p < LEVEL:
            found.append(
                f"its tokens do not follow the target's law at {self.where} "
                f"(p = {self.raw_p:.2g}, corrected {self.joint_p:.2g})"
            )
        if self.accepted_p is not None and self.accepted_p < LEVEL:
            found.append(
                f"it accepts another number of drafts than enumeration says at "
                f"{self.accepted_where} (|z| = {self.z:.1f}, corrected "
                f"p = {self.accepted_p:.2g})"
            )
        if self.greedy is False:
            found.append("greedily it writes other tokens than the target alone")
        if not self.independent:
            found.append("a row's tokens depend on other rows")
        return found


def lines(proofs: Sequence[Proof], greedy: Sequence[bool | None]) -> list[Line]:
    """Verdicts by subject and kind of draft.

    p-values of all lossless subjects are corrected together (Holm 1979), those of lossy
    ones for the same number.

    Args:
        proofs: of all subjects.
        greedy: whether each decodes greedily as the target alone; None: no claim.
    """
    # Subject, round, cell.
    flat = [
        (number, turn, finding)
        for number, proof in enumerate(proofs)
        for turn, findings in enumerate(proof.findings, start=1)
        for finding in findings
    ]
    lossless = [proofs[number].subject.verifier.lossless for number, _, _ in flat]
    joint = _corrected([own.joint_p for _, _, own in flat], lossless)
    accepted = _corrected(
        [1.0 if own.accepted_p is None else own.accepted_p for _, _, own in flat],
        lossless,
    )
    found = []
    for number, proof in enumerate(proofs):
        kinds = dict.fromkeys(own.cell.kind for own in proof.findings[0])
        for kind in kinds:
            places = [
                place
                for place, (owner, _, own) in enumerate(flat)
                if owner == number and own.cell.kind == kind
            ]

            def where(place: int) -> str:
                _, turn, own = flat[place]
                return f"{own.cell.setting}, round {turn}"

            worst = min(places, key=lambda place: flat[place][2].joint_p)
            furthest = max(places, key=lambda place: flat[place][2].z or 0.0)
            enumerated = flat[furthest][2].z is not None
            verifier = proof.subject.verifier
            least = min(places, key=lambda place: accepted[place])
            found.append(
                Line(
                    name=proof.subject.name,
                    kind=kind,
                    lossless=verifier.lossless,
                    joint_p=float(joint[worst]),
                    where=where(worst),
                    raw_p=flat[worst][2].joint_p,
                    z=flat[furthest][2].z,
                    accepted_p=float(accepted[least]) if enumerated else None,
                    accepted_where=where(least),
                    greedy=greedy[number],
                    independent=proof.independent,
                )
            )
    return found


def _corrected(p_values: Sequence[float], lossless: Sequence[bool]) -> np.ndarray:
    given, claimed = np.asarray(p_values), np.asarray(lossless)
    found = np.minimum(given * max(int(claimed.sum()), 1), 1.0)
    if claimed.any():
        found[claimed] = statistics.holm(given[claimed])
    return found
