"""Kinds of draft and settings of sampling, as rows of one batch for any rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Int, Key

from specjax.decoding import (
    DecodeOutput,
    autoregressive_generate,
    speculative_generate,
)
from specjax.drafters.base import Committed, Drafter, DraftState
from specjax.drafters.tree import chain_or_tree
from specjax.models.base import EncoderDecoder
from specjax.proof import expected, statistics, tables
from specjax.proof.tables import TableModel
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise
from specjax.verify import Verifier

VOCAB = 4
TOKENS = 3  # whose joint law is looked at
GAMMA = 2
CHAIN = (-1, 0, 1)
TREE = (-1, 0, 0, 1, 1, 2)
PATHS = (-1, 0, 0, 0, 1, 2, 3)
_CUT = 2  # nodes that a tree ends early by
_GREEDY_LENGTH = 9


@dataclasses.dataclass(frozen=True)
class Cut:
    """How logits become a law: the settings of `tables.reference_law`.

    Attributes:
        temperature: 0 is greedy.
        top_k: None: off.
        top_p: None: off.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None


@dataclasses.dataclass(frozen=True)
class Cell:
    """Rows that are drawn alike, and judged together.

    Attributes:
        kind: of draft, one of `KINDS`.
        setting: one of `SETTINGS`.
        table: number of the pair of tables.
        target: the target's sampling.
        draft: the draft's.
    """

    kind: str
    setting: str
    table: int
    target: Cut
    draft: Cut


KINDS = ("soft", "one-hot", "sharpened", "varying")
# Pair of tables, and the target's and the draft's sampling.
SETTINGS = {
    "greedy": (0, Cut(temperature=0.0), Cut()),
    "T=0.3": (0, Cut(temperature=0.3), Cut(temperature=0.3)),
    "T=1": (0, Cut(), Cut()),
    "T=2": (0, Cut(temperature=2.0), Cut(temperature=2.0)),
    "top-k": (0, Cut(top_k=2), Cut(top_k=2)),
    "top-p": (0, Cut(top_p=0.6), Cut(top_p=0.6)),
    "other settings": (
        0,
        Cut(temperature=0.7, top_k=3, top_p=0.8),
        Cut(temperature=1.5, top_k=2, top_p=0.9),
    ),
    "zeros in q": (1, Cut(), Cut()),
    "p = q": (2, Cut(), Cut()),
    "p = q in bfloat16": (3, Cut(), Cut()),
}


def cells(
    kinds: Sequence[str] = KINDS, settings: Sequence[str] = tuple(SETTINGS)
) -> list[Cell]:
    """Every kind of draft under every setting.

    Args:
        kinds: soft: the draft's own law. one-hot: its most probable token. sharpened:
            at half of its temperature. varying: see `Ending`.
        settings: names of `SETTINGS`.
    """
    sharper = {"one-hot": 0.0, "sharpened": 0.5}
    found = []
    for kind in kinds:
        for setting in settings:
            table, target, draft = SETTINGS[setting]
            heat = draft.temperature * sharper.get(kind, 1.0)
            draft = dataclasses.replace(draft, temperature=heat)
            found.append(Cell(kind, setting, table, target, draft))
    return found


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Pairs of tables, by number.

    Attributes:
        targets: one model each.
        drafts: as many.
    """

    targets: tuple[TableModel, ...]
    drafts: tuple[TableModel, ...]


def make_pairs() -> Pairs:
    """Laws that differ much; a draft with holes; the same laws; rounded ones."""
    target = tables.table_model(11, VOCAB, TOKENS - 1)
    holed = tables.table_model(0, VOCAB, TOKENS - 1, zeros=0.15)
    rounded = jnp.asarray(jnp.asarray(target.logits, jnp.bfloat16), jnp.float32)
    return Pairs(
        targets=(target, holed, target, target),
        drafts=(
            tables.table_model(21, VOCAB, TOKENS - 1),
            tables.table_model(1, VOCAB, TOKENS - 1, zeros=0.3, like=holed, mix=0.3),
            target,
            target.replace(logits=rounded),
        ),
    )


@struct.dataclass
class Rows:
    """A batch, of which every array can be permuted by row.

    Attributes:
        inputs: ``int32[B, 1]`` number of the pair of tables.
        sampling: of the target, by row.
        draft_sampling: of the draft, by row.
        ends: ``bool[B]`` rows whose blocks end early.
        keys: one per row.
    """

    inputs: Int[Array, "B S"]
    sampling: Sampling
    draft_sampling: Sampling
    ends: Bool[Array, " B"]
    keys: Key[Array, " B"]


def make_rows(cells: Sequence[Cell], rows: int, seed: int) -> Rows:
    """A batch with `rows` rows per cell, one cell after the other."""

    def each(values: Sequence[Any], dtype: Any) -> Array:
        return jnp.asarray(np.repeat(np.asarray(values), rows), dtype)

    def sampling(cuts: Sequence[Cut]) -> Sampling:
        return Sampling(
            temperature=each([cut.temperature for cut in cuts], jnp.float32),
            top_k=each([cut.top_k or VOCAB for cut in cuts], jnp.int32),
            top_p=each([cut.top_p or 1.0 for cut in cuts], jnp.float32),
        )

    return Rows(
        inputs=each([cell.table for cell in cells], jnp.int32)[:, None],
        sampling=sampling([cell.target for cell in cells]),
        draft_sampling=sampling([cell.draft for cell in cells]),
        ends=each([cell.kind == "varying" for cell in cells], bool),
        keys=jax.random.split(
            jax.random.key(seed, impl="threefry2x32"), rows * len(cells)
        ),
    )


@struct.dataclass
class Ending:
    """A drafter whose blocks end early in some rows.

    A chain ends with its own first token 0, which is verified; a tree after the
    committed token 0 lacks its last nodes. After the vocabulary's last id nothing is
    drafted.

    Attributes:
        inner: drafts blocks of full length.
        ends: ``bool[B]`` rows whose blocks end early.
    """

    inner: Any
    ends: Bool[Array, " B"]

    @property
    def taps(self) -> tuple[int, ...]:
        """As the inner one."""
        return self.inner.taps

    @property
    def trees(self) -> bool:
        """As the inner one."""
        return self.inner.trees

    @property
    def siblings(self) -> str | None:
        """As the inner one; None of chains."""
        return getattr(self.inner, "siblings", None)

    @property
    def has_law(self) -> bool:
        """As the inner one."""
        return self.inner.has_law

    @property
    def samples(self) -> bool:
        """As the inner one."""
        return self.inner.samples

    def nodes(self, gamma: int) -> int:
        """As the inner one."""
        return self.inner.nodes(gamma)

    def init(self, *arguments: Any) -> DraftState:
        """As the inner one."""
        return self.inner.init(*arguments)

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: DraftState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, DraftState]:
        """Drafts a whole block, of which no more than the first nodes count."""
        block, state = self.inner.draft(
            target, noise, state, tokens, length, gamma=gamma, sampling=sampling
        )
        last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
        nodes = block.tokens.shape[1]
        if self.trees:
            kept = jnp.where(last == 0, nodes - _CUT, nodes)
        else:
            going = jnp.cumprod((block.tokens != 0).astype(jnp.int32), axis=1)
            kept = jnp.minimum(jnp.sum(going, axis=1) + 1, nodes)
        kept = jnp.where(last == target.vocab_size - 1, 0, kept)
        shorter = jnp.where(self.ends, kept, block.length)
        return block.replace(length=shorter), state

    def commit(self, state: DraftState, committed: Committed) -> DraftState:
        """As the inner one."""
        return self.inner.commit(state, committed)


@dataclasses.dataclass(frozen=True)
class Way:
    """How drafts are laid out for a rule.

    Attributes:
        tree: parents of the nodes.
        siblings: how children are drawn, one of `types.SIBLINGS`; None: a chain.
    """

    tree: tuple[int, ...]
    siblings: str | None


def ways(verifier: Verifier) -> list[Way]:
    """The layouts that a rule is proved on: a chain, or a tree for rules of trees.

    A rule that reads no law also takes children that were chosen, not drawn.
    """
    if not verifier.trees:
        return [Way(CHAIN, None)]
    drawn = verifier.usual_siblings
    found = [Way(PATHS if drawn == "paths" else TREE, drawn)]
    if not verifier.needs_law and (
        verifier.siblings is None or "chosen" in verifier.siblings
    ):
        found.append(Way(TREE, "chosen"))
    return found


MakeDrafter = Callable[[TableModel, Rows], Drafter]


def drafter_of(way: Way) -> MakeDrafter:
    """What makes the drafter of a layout, of a model and rows."""

    def make(model: TableModel, rows: Rows) -> Drafter:
        return Ending(chain_or_tree(model, way.tree, way.siblings), rows.ends)

    return make


def decode(
    pairs: Pairs, verifier: Verifier, make: MakeDrafter, rows: Rows
) -> DecodeOutput:
    """Writes `TOKENS` tokens in every row, with a trace."""
    drafter = make(tables.stacked(pairs.drafts), rows)
    return speculative_generate(
        tables.stacked(pairs.targets),
        drafter,
        rows.inputs,
        jnp.ones(rows.inputs.shape, bool),
        rows.keys,
        verifier=verifier,
        sampling=rows.sampling,
        draft_sampling=rows.draft_sampling if drafter.samples else None,
        gamma=GAMMA,
        max_length=TOKENS + 1,
        eos_id=-1,
        trace=True,
    )


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one cell's samples say.

    Attributes:
        cell: the rows.
        joint_p: p-value of the tokens under the target's exact joint law.
        z: of the drafts that the first block had accepted, in standard errors from what
            enumeration says; None: the rule is not enumerated.
        accepted_p: its p-value.
    """

    cell: Cell
    joint_p: float
    z: float | None
    accepted_p: float | None


def joint_laws(pairs: Pairs, cells: Sequence[Cell]) -> list[np.ndarray]:
    """The target's exact law of the first `TOKENS` tokens, by cell."""
    known: dict[str, Any] = {}
    for cell in cells:
        if cell.setting not in known:
            known[cell.setting] = tables.joint_law(
                tables.transformed(
                    pairs.targets[cell.table], **dataclasses.asdict(cell.target)
                ),
                TOKENS,
            )
    return [known[cell.setting] for cell in cells]


def accepted_laws(
    pairs: Pairs, cells: Sequence[Cell], verifier: Verifier, way: Way
) -> list[list[float] | None]:
    """The exact law of the first block's accepted drafts, by cell."""

    def law(cell: Cell) -> list[float] | None:
        draft, tree = cell.draft, way.tree
        if way.siblings == "chosen":
            draft = dataclasses.replace(draft, temperature=1.0)
        varying = cell.kind == "varying"
        if varying and way.siblings is not None:
            tree = tree[:-_CUT]  # what stands before the first block is token 0
        p, q = (
            expected.laws_of(tables.transformed(own, **dataclasses.asdict(cut)))
            for own, cut in (
                (pairs.targets[cell.table], cell.target),
                (pairs.drafts[cell.table], draft),
            )
        )
        return expected.accepted_law(
            verifier,
            p,
            q,
            tree,
            way.siblings or "distinct",
            lambda prefix: varying and way.siblings is None and 0 in prefix,
        )

    return [law(cell) for cell in cells]


def judge(
    cells: Sequence[Cell],
    output: DecodeOutput,
    joint: Sequence[np.ndarray],
    accepted: Sequence[list[float] | None],
) -> list[Finding]:
    """Compares each cell's rows with what is exact.

    Args:
        cells: of the rows of `output`, as `make_rows` lays them out.
        output: of `decode`.
        joint: of `joint_laws`.
        accepted: of `accepted_laws`.
    """
    assert output.trace is not None
    tokens = np.asarray(output.tokens[:, 1:]).reshape(len(cells), -1, TOKENS)
    first = np.asarray(output.trace.num_accepted[:, 0]).reshape(len(cells), -1)
    found = []
    for cell, texts, counts, law, own in zip(
        cells, tokens, first, joint, accepted, strict=True
    ):
        apart = None if own is None else statistics.mean_of_counts(counts, own)
        found.append(
            Finding(
                cell=cell,
                joint_p=statistics.chi_square_p(texts, law),
                z=apart and apart.z,
                accepted_p=apart and apart.p,
            )
        )
    return found


def rows_independent(
    pairs: Pairs,
    verifier: Verifier,
    make: MakeDrafter,
    rows: Rows,
    output: DecodeOutput,
    other: Rows,
) -> bool:
    """Whether rows write the same bits in another order and among other rows.

    Args:
        rows: of `output`.
        output: of `decode` of `rows`.
        other: as many rows, one in two of which takes the place of one of `rows`.
    """
    number = len(rows.ends)
    order = np.random.default_rng(0).permutation(number)
    kept = np.arange(number) % 2 == 0
    mixed = jax.tree.map(
        lambda own, new: jnp.concatenate([own[order[kept]], new[order[~kept]]]),
        rows,
        other,
    )
    again = decode(pairs, verifier, make, mixed)
    count = int(kept.sum())
    same = jax.tree.map(
        lambda one, two: bool((one[:count] == two[order[kept]]).all()),
        (again.tokens, again.stats),
        (output.tokens, output.stats),
    )
    return all(jax.tree.leaves(same))


def greedy_identical(pairs: Pairs, verifier: Verifier, make: MakeDrafter) -> bool:
    """Whether the greedy program writes what greedy decoding alone writes.

    Every kind of draft on every pair of tables: no two rows may differ in a token.
    """
    plain = tuple(name for name, (_, _, cut) in SETTINGS.items() if cut == Cut())
    rows = make_rows(cells(settings=plain), 1, 0)
    target = tables.stacked(pairs.targets)
    common = (rows.inputs, jnp.ones(rows.inputs.shape, bool), rows.keys)
    options: dict[str, Any] = dict(
        sampling=Sampling(temperature=None), max_length=_GREEDY_LENGTH, eos_id=-1
    )
    alone = autoregressive_generate(target, *common, **options)
    drafter = make(tables.stacked(pairs.drafts), rows)
    output = speculative_generate(
        target,
        drafter,
        *common,
        verifier=verifier,
        draft_sampling=rows.draft_sampling if drafter.samples else None,
        gamma=GAMMA,
        **options,
    )
    return bool((output.tokens == alone.tokens).all())
