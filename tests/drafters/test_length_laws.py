"""Drafts that end early leave the target's joint law as it is, whatever ends them.

All rules in one program, each in rows of its own; the wrong twin throws away the token
after which a draft was ended, and the same statistic rejects it: for rules that look
at the token. (What others read is known before it is drawn.)
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import ModelDrafter, Sampling, Verifier, speculative_generate
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import joint_law, table_model
from tests.helpers import row_keys
from tests.lengths import LOOKING, Dropping, Each, Seeing, rules
from tests.twins import RIGHT_RULES, right_rule

VOCAB, TOKENS, GAMMA, ROWS = 4, 4, 3, 40_000
TARGET = table_model(0, VOCAB, TOKENS - 1, zeros=0.2)
DRAFT = table_model(1, VOCAB, TOKENS - 1, zeros=0.15, like=TARGET, mix=0.5)
RULES = rules(VOCAB)
BATCH = ROWS * len(RULES)


def decode(verifier: str, drops: bool, draft_sampling=None):
    which = jnp.repeat(jnp.arange(len(RULES), dtype=jnp.int32), ROWS)
    rule = Each(tuple(RULES.values()), which)
    return speculative_generate(
        TARGET,
        Dropping(ModelDrafter(Seeing(DRAFT), rule), jnp.array(drops)),
        jnp.zeros((BATCH, 1), jnp.int32),
        jnp.ones((BATCH, 1), bool),
        row_keys(RIGHT_RULES.index(verifier), BATCH),
        verifier=Verifier(right_rule, params=jnp.int32(RIGHT_RULES.index(verifier))),
        draft_sampling=draft_sampling,
        gamma=GAMMA,
        max_length=TOKENS + 1,
        eos_id=-1,
    )


def by_rule(output) -> dict[str, float]:
    law = joint_law(TARGET, TOKENS)
    texts = np.asarray(output.tokens[:, 1:]).reshape(len(RULES), ROWS, TOKENS)
    return {
        name: chi_square_p(own, law) for name, own in zip(RULES, texts, strict=True)
    }


@pytest.mark.slow
@pytest.mark.parametrize("verifier", RIGHT_RULES)
@pytest.mark.parametrize("greedy", [False, True])
def test_joint_law(verifier, greedy):
    """Of drawn drafts, and of argmax drafts in front of a target that is sampled."""
    own = Sampling(temperature=None) if greedy else None
    output = decode(verifier, False, own)
    values = by_rule(output)
    assert min(values.values()) > 1e-3, values
    drafted = np.asarray(output.stats.drafted).reshape(len(RULES), ROWS, GAMMA)
    calls = np.asarray(output.stats.target_calls).reshape(len(RULES), ROWS)
    for name, depths, made in zip(RULES, drafted.sum(1), calls.sum(1), strict=True):
        assert depths[0] == made  # no block is empty
        assert depths[0] > depths[1] > 0 or name == "fixed", (name, depths)
    if not greedy:
        dropped = by_rule(decode(verifier, True))
        biased = {name: dropped[name] for name in LOOKING}
        assert max(biased.values()) < 1e-6, dropped
