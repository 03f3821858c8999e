"""What drafters that wrap others are put to: joint laws, false reports, single rows."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax import Sampling, Verifier, speculative_generate
from specjax.models.base import encode_draft
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import joint_law
from specjax.sampling import fit_vocabulary
from specjax.types import Law, Noise
from tests.helpers import row_keys
from tests.twins import RIGHT_RULES, right_rule

TOKENS, GAMMA = 4, 3


@struct.dataclass
class Misreported:
    """Drafts as `inner` does; a wrong twin where it is on, with the law of `model`."""

    inner: Any
    model: Any
    on: jax.Array

    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    @property
    def taps(self):
        return self.inner.taps

    def nodes(self, gamma):
        return gamma

    def init(self, target, encoded, inputs, mask, prefix, length, size):
        own = encode_draft(self.model, encoded, inputs, mask)
        inner = self.inner.init(target, encoded, inputs, mask, prefix, length, size)
        return inner, own

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        inner, own = state
        block, inner = self.inner.draft(
            target, noise, inner, tokens, length, gamma=gamma, sampling=sampling
        )
        places = length[:, None] + jnp.arange(gamma)[None]
        rows = jnp.arange(len(tokens))[:, None]
        text = tokens.at[rows, places].set(block.tokens)
        output, _ = self.model.decode(text, None, own)
        logits = jnp.take_along_axis(output.logits, places[..., None] - 1, axis=1)
        false = sampling.law(fit_vocabulary(logits, target.vocab_size))
        probs = jnp.where(self.on, false.probs, block.law.probs)
        return block.replace(law=Law(probs=probs)), (inner, own)

    def commit(self, state, committed):
        return self.inner.commit(state[0], committed), state[1]


def check_joint_law(
    target,
    table,
    drafter,
    model,
    rows: int,
    inputs=(2, 0, 3),
    sampling: dict[str, Any] | None = None,
) -> Any:
    """Four tokens together have the target's law by both rules; false reports do not.

    Args:
        target: any model.
        table: its laws for this source.
        drafter: of chains with dense laws.
        model: whose law the wrong twin reports.
        rows: samples.
        inputs: the source, or sources, one per row.
        sampling: of both sides, beyond temperature 1; `table` has it already.
    """
    inputs = jnp.asarray(inputs, jnp.int32)
    inputs = jnp.broadcast_to(inputs, (rows, inputs.shape[-1]))
    right, wrong = {}, {}
    for number, rule in enumerate(RIGHT_RULES):
        for on in (False, True):
            output = speculative_generate(
                target,
                Misreported(drafter, model, jnp.array(on)),
                inputs,
                jnp.ones(inputs.shape, bool),
                row_keys(number, rows),
                verifier=Verifier(right_rule, params=jnp.int32(number)),
                sampling=Sampling(temperature=jnp.ones(rows), **(sampling or {})),
                gamma=GAMMA,
                max_length=TOKENS + 1,
                eos_id=-1,
            )
            law = joint_law(table, TOKENS)
            values = wrong if on else right
            values[rule] = chi_square_p(np.asarray(output.tokens)[:, 1:], law)
            if not on:
                accepted = output.stats.accepted.sum() / output.stats.drafted.sum()
                assert 0.1 < accepted < 0.98, accepted
    assert min(right.values()) > 1e-3, right
    assert max(wrong.values()) < 1e-6, wrong


@jax.jit
def _blocks(drafter, target, inputs, mask, tokens, length, keys):
    encoded = target.encode(inputs, mask)
    size = tokens.shape[1]
    state = drafter.init(target, encoded, inputs, mask, tokens[:, :4], length, size)
    noise = Noise(keys=keys, start=length - 1)
    block, _ = drafter.draft(
        target, noise, state, tokens, length, gamma=GAMMA, sampling=Sampling()
    )
    return block


def check_rows(target, drafter, atol: float = 0.0) -> None:
    """A row's block is its own, and finite where the source is empty."""
    rows, vocab_size = 6, target.vocab_size
    generator = np.random.default_rng(7)
    mask = jnp.arange(5)[None] < jnp.array([[5], [0], [2], [1], [4], [3]])
    inputs = jnp.where(
        mask, jnp.asarray(generator.integers(2, vocab_size, (rows, 5))), 0
    )
    tokens = jnp.asarray(generator.integers(2, vocab_size, (rows, 12)), jnp.int32)
    tokens = tokens.at[:, 0].set(0)
    length, keys = jnp.array([1, 2, 3, 4, 2, 1]), row_keys(3, rows)
    arrays = (inputs.astype(jnp.int32), mask, tokens, length, keys)
    whole = _blocks(drafter, target, *arrays)
    laws = np.asarray(whole.law.dense(vocab_size))
    real = np.arange(GAMMA)[None] < np.asarray(whole.length)[:, None]
    np.testing.assert_allclose(laws.sum(-1)[real], 1, atol=1e-5)
    assert ((0 <= whole.tokens) & (whole.tokens < vocab_size)).all()
    # The same rows twice, each now beside others: one program for both.
    order = jnp.array([3, 1, 1, 5, 0, 3])
    other = _blocks(drafter, target, *(x[order] for x in arrays))
    np.testing.assert_array_equal(whole.length[order], other.length)
    np.testing.assert_array_equal(whole.tokens[order], other.tokens)
    np.testing.assert_allclose(
        laws[order], other.law.dense(vocab_size), atol=atol, rtol=0
    )
