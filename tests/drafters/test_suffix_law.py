"""The joint law of what is written behind a draft that copies from a learned table."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import Sampling, Verifier, speculative_generate
from specjax.drafters.suffix import Finished, SuffixDrafter
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import joint_law, table_model
from tests.helpers import row_keys
from tests.twins import RIGHT_RULES, right_rule


@struct.dataclass
class Reported:
    """Drafts as `inner` does; a wrong twin says that it drew with less certainty."""

    inner: Any
    probs: jax.Array

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = False
    trees: ClassVar[bool] = False

    def nodes(self, gamma):
        return gamma

    def init(self, *arguments):
        return self.inner.init(*arguments)

    def draft(self, *arguments, **options):
        block, state = self.inner.draft(*arguments, **options)
        law = block.law.replace(probs=block.law.probs * self.probs)
        return block.replace(law=law), state

    def commit(self, state, committed):
        return self.inner.commit(state, committed)


@pytest.mark.slow
def test_joint_law():
    """Whatever was learned, right or wrong, the output's law is the target's."""
    rows, vocab_size, tokens = 100_000, 4, 4
    target = table_model(0, vocab_size, tokens - 1, zeros=0.2)
    texts = np.random.default_rng(1).integers(0, vocab_size, (8, 5))
    drafter = SuffixDrafter(finished=Finished.empty(40), max_match=3, offset=1.0)
    drafter = drafter.learn(jnp.asarray(texts, jnp.int32), jnp.full(8, 5))
    inputs = jnp.asarray(
        np.random.default_rng(3).integers(0, vocab_size, (rows, 6)), jnp.int32
    )

    def run(number: int, probs: float) -> float:
        output = speculative_generate(
            target,
            Reported(drafter, jnp.float32(probs)),
            inputs,
            jnp.ones(inputs.shape, bool),
            row_keys(number, rows),
            verifier=Verifier(right_rule, params=jnp.int32(number)),
            sampling=Sampling(temperature=jnp.ones(rows)),
            gamma=3,
            max_length=tokens + 1,
            eos_id=-1,
        )
        accepted = output.stats.accepted.sum() / output.stats.drafted.sum()
        assert 0.05 < accepted < 0.9
        written = np.asarray(output.tokens)[:, 1:]
        return chi_square_p(written, joint_law(target, tokens))

    numbers = range(len(RIGHT_RULES))
    assert min(run(number, 1.0) for number in numbers) > 1e-3
    assert max(run(number, 0.7) for number in numbers) < 1e-6
