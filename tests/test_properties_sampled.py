"""Whatever the batch: sampling writes and counts what the slow reference does.

Both are handed the same random numbers, so that they must agree token by token.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from specjax import (
    ModelDrafter,
    Sampling,
    Verifier,
    speculative_generate,
    token_verify,
)
from specjax.decode_state import DRAFT, VERIFY, DecodeOutput
from specjax.sampling import clock_speeds
from tests import reference_decoder
from tests.helpers import (
    HashModel,
    quick_compile,  # noqa: F401
    row_keys,
)
from tests.made_up import (
    BATCHES,
    CALLS,
    FIXED,
    GAMMA,
    HASHES,
    LENGTH,
    MANY,
    ROWS,
    VOCAB,
    Batch,
    differences,
    rejects,
)
from tests.reference_decoder import Written, hash_law
from tests.twins import RIGHT_RULES, WRONG_RULES, chosen_rule


@dataclasses.dataclass(frozen=True)
class Sampled(Batch):
    """As `Batch`, and temperature, top-k and top-p of each row for each model."""

    target: tuple[np.ndarray, np.ndarray, np.ndarray]
    draft: tuple[np.ndarray, np.ndarray, np.ndarray]


def _of(*values: float, dtype: Any = np.float32) -> st.SearchStrategy:
    return arrays(dtype, (ROWS,), elements=st.sampled_from(values))


SETTINGS = st.tuples(
    _of(1.0, 0.0, 0.25, 0.5, 2.0),
    _of(VOCAB, 1, 2, 3, dtype=np.int32),
    _of(1.0, 0.25, 0.5, 0.75),
)
SAMPLED = st.builds(
    lambda batch, target, draft: Sampled(**vars(batch), target=target, draft=draft),
    BATCHES,
    SETTINGS,
    SETTINGS,
)


@jax.jit
def numbers(keys: jax.Array) -> dict[str, jax.Array]:
    """All random numbers of a decode, by row, call and node, from the keys' rule.

    Returns:
        Coins, and the speeds of every id's clock where the next token or a draft is
        drawn; node 0 is the next token's.
    """

    def at(key, purpose, call, node):
        for number in (purpose, call, node):
            key = jax.random.fold_in(key, number)
        return key

    def of(purpose, draw):
        calls, nodes = jnp.arange(CALLS), jnp.arange(GAMMA + 1)
        each = jax.vmap(lambda k, r, n: draw(at(k, purpose, r, n)), (None, None, 0))
        each = jax.vmap(jax.vmap(each, (None, 0, None)), (0, None, None))
        return each(keys, calls, nodes)

    def speeds(key):
        return clock_speeds(key, jnp.ones(VOCAB))

    return {
        "coins": of(VERIFY, lambda key: jax.random.uniform(key, dtype=jnp.float32)),
        "next": of(VERIFY, speeds),
        "draft": of(DRAFT, speeds),
    }


@struct.dataclass
class CutDrafter:
    """Drafts of a model, of lengths by script.

    Attributes:
        inner: what drafts.
        length: ``int32[B, R]`` so many tokens of each call's draft are kept.
    """

    inner: ModelDrafter
    length: jax.Array

    taps = ()
    has_law = True
    samples = True
    trees = False

    def nodes(self, gamma):
        return gamma

    def init(self, target, encoded, inputs, mask, prefix, length, size):
        inner = self.inner.init(target, encoded, inputs, mask, prefix, length, size)
        return inner, jnp.zeros(inputs.shape[0], jnp.int32)

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        inner, call = state
        block, inner = self.inner.draft(
            target, noise, inner, tokens, length, gamma=gamma, sampling=sampling
        )
        call_ = jnp.minimum(call, self.length.shape[1] - 1)[:, None]
        kept = jnp.take_along_axis(self.length, call_, axis=1)[:, 0]
        return block.replace(length=kept), (inner, call)

    def commit(self, state, committed):
        return self.inner.commit(state[0], committed), state[1] + 1


def sampled(batch: Sampled, verifier: Verifier) -> tuple[DecodeOutput, list[Written]]:
    """The decoder's output and the reference's.

    Half of the draft's laws are the target's own, and some tokens are impossible.
    """
    generator = batch.generator
    table = 1.5 * generator.normal(size=(HASHES, VOCAB))
    other = table + generator.normal(size=table.shape) * generator.integers(
        0, 2, (HASHES, 1)
    )
    for own in (table, other):
        dead = generator.random(own.shape) < 0.15
        dead[np.arange(HASHES), generator.integers(0, VOCAB, HASHES)] = False
        own[dead] = -np.inf
    table, other = table.astype(np.float32), other.astype(np.float32)

    def laws(row: int, table: np.ndarray, settings: tuple) -> Any:
        temperature, top_k, top_p = (own[row] for own in settings)
        return hash_law(
            table,
            batch.source(row),
            temperature=float(temperature),
            top_k=int(top_k),
            top_p=float(top_p),
        )

    keys = row_keys(batch.seed % 2**31, ROWS)
    given = jax.tree.map(np.asarray, numbers(keys))

    def by_row(row: int, **ends: Any) -> Written:
        coins, after, drawn = (given[name][row] for name in ("coins", "next", "draft"))
        draft_law = laws(row, other, batch.draft)

        def pick(call: int, depth: int | None, law: np.ndarray) -> int:
            speeds = after[call, 0] if depth is None else drawn[call, depth + 1]
            return int(np.argmax(law * speeds))

        return reference_decoder.decode(
            batch.start(row),
            target=laws(row, table, batch.target),
            draft=lambda text, call, depth: draft_law(text),
            draft_length=lambda call: batch.drafted[row, call],
            coin=lambda call, depth: coins[call, depth + 1],
            pick=pick,
            gamma=GAMMA,
            **ends,
        )

    endless = [by_row(r, room=LENGTH - len(batch.start(r))).text for r in range(ROWS)]
    eos_id, stop = batch.endings(endless)
    target, draft = (
        Sampling(temperature=own[0], top_k=own[1], top_p=own[2])
        for own in (jax.tree.map(jnp.asarray, x) for x in (batch.target, batch.draft))
    )
    output = speculative_generate(
        HashModel(jnp.asarray(table)),
        CutDrafter(
            ModelDrafter(HashModel(jnp.asarray(other))), jnp.asarray(batch.drafted)
        ),
        jnp.asarray(batch.inputs),
        jnp.asarray(batch.mask),
        keys,
        verifier=verifier,
        sampling=target,
        draft_sampling=draft,
        gamma=GAMMA,
        **batch.arguments(eos_id, stop),
    )
    return output, [
        by_row(r, room=batch.room(r), eos_id=eos_id, stop=stop) for r in range(ROWS)
    ]


def sampled_is_the_reference(batch: Sampled) -> None:
    assert differences(*sampled(batch, token_verify)) == []


test_sampled_decoding_is_that_of_the_reference = FIXED(
    hypothesis.given(SAMPLED)(sampled_is_the_reference)
)
test_sampled_decoding_of_many_batches = pytest.mark.slow(
    MANY(hypothesis.given(SAMPLED)(sampled_is_the_reference))
)


def test_wrong_rules_are_found_out():
    """Twins that the tests of exact laws have; block verification is another rule."""

    def found(rule: str) -> bool:
        number = (*RIGHT_RULES, *WRONG_RULES).index(rule)
        verifier = Verifier(chosen_rule, params=jnp.int32(number))
        return rejects(SAMPLED, lambda batch: differences(*sampled(batch, verifier)))

    assert not found("token_rule")
    assert all(found(rule) for rule in ("block_rule", *WRONG_RULES))
