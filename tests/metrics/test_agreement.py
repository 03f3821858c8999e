"""Alpha against laws that are known exactly."""

from __future__ import annotations

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import metrics
from specjax.decoding import speculative_generate
from specjax.drafters.model import ModelDrafter
from specjax.drafters.ngram import NgramDrafter
from specjax.errors import InputError
from specjax.metrics import agreement
from specjax.models.t5 import T5
from specjax.models.t5_config import T5Config
from specjax.proof.tables import TableModel, table_model
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Law, Noise
from tests.helpers import row_keys

VOCABULARY, DEPTH = 4, 3


@struct.dataclass
class Table(TableModel):
    """A table model that also decodes without memory."""

    def decode(
        self, tokens, cache, encoded, *, parents=None, taps=(), dropout_key=None
    ):
        assert parents is None, "it decodes chains"
        kept = self.init_cache(*tokens.shape) if cache is None else cache
        output, kept = super().decode(tokens, kept, encoded, taps=taps)
        output = output.replace(features=(output.logits,) * len(taps))
        return output, None if cache is None else kept


@struct.dataclass
class Echo:
    """Drafts from the target's law of one place earlier, which it gets as a feature."""

    taps: ClassVar[tuple[int, ...]] = (-1,)
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    def nodes(self, gamma):
        return gamma

    def init(self, target, encoded, inputs, mask, prefix, length, size):
        batch = inputs.shape[0]
        return jnp.zeros((batch, VOCABULARY)), jnp.zeros(batch, jnp.int32)

    def draft(self, target, noise, state, tokens, length, *, gamma, sampling):
        logits, known = state
        law = sampling.law(logits[:, None])
        return DraftBlock(tokens=tokens[:, :1], length=known, law=law), state

    def commit(self, state, committed):
        rows = jnp.arange(committed.length.shape[0])
        logits = committed.features[0][rows, committed.num_accepted]
        return logits, jnp.ones_like(committed.length)


def table(seed, vocab_size=VOCABULARY, **settings) -> Table:
    model = table_model(seed, vocab_size, DEPTH, **settings)
    return Table(logits=model.logits, depth=model.depth)


def text(seed, rows, size=DEPTH + 2):
    """Random sources and outputs: start token 0, then any tokens."""
    generator = np.random.default_rng(seed)
    tokens = generator.integers(0, VOCABULARY, (rows, size)).astype(np.int32)
    tokens[:, 0] = 0
    return (
        jnp.ones((rows, 2), jnp.int32),
        jnp.ones((rows, 2), bool),
        jnp.asarray(tokens),
    )


def row_of(model, tokens, place, temperature=1.0) -> np.ndarray:
    """The law of what follows ``tokens[: place + 1]``, read off the table."""
    index = 0
    for token in tokens[1 : place + 1][: model.depth]:
        index = index * model.vocab_size + int(token) + 1
    probs = np.exp(np.asarray(model.logits[index], np.float64) / temperature)
    return probs / probs.sum()


def test_beta_and_entropy_are_those_of_the_tables():
    target, draft = table(1, zeros=0.3), table(2, zeros=0.3)
    inputs, mask, tokens = text(0, rows=6)
    length = jnp.array([5, 5, 4, 3, 2, 1])
    result = metrics.teacher_forced_alpha(target, draft, inputs, mask, tokens, length)
    assert result.beta.shape == (6, 4)
    expected, entropies = [], []
    for row in range(6):
        for place in range(4):
            p = row_of(target, tokens[row], place)
            q = row_of(draft, tokens[row], place)
            beta = np.minimum(p, q).sum()
            assert float(result.beta[row, place]) == pytest.approx(beta, abs=1e-6)
            assert bool(result.valid[row, place]) == (place + 1 < length[row])
            if place + 1 < length[row]:
                expected.append(beta)
                entropies.append(-(p[p > 0] * np.log(p[p > 0])).sum())
    assert len(expected) == 4 + 4 + 3 + 2 + 1
    assert metrics.alpha(result) == pytest.approx(np.mean(expected), abs=1e-6)
    assert metrics.mean_entropy(result) == pytest.approx(np.mean(entropies), abs=1e-6)
    # A mean over padding too would be another number.
    assert metrics.alpha(result) != pytest.approx(float(result.beta.mean()), abs=1e-4)


def test_batches_weigh_by_their_prefixes():
    target, draft = table(1), table(2)
    inputs, mask, tokens = text(0, rows=3)
    length = jnp.array([5, 2, 1])
    whole = metrics.teacher_forced_alpha(target, draft, inputs, mask, tokens, length)
    parts = [
        metrics.teacher_forced_alpha(
            target, draft, *(x[i : i + 1] for x in (inputs, mask, tokens, length))
        )
        for i in range(3)
    ]
    assert metrics.alpha(*parts) == pytest.approx(metrics.alpha(whole), abs=1e-6)
    assert math.isnan(metrics.alpha(parts[2]))
    assert math.isnan(metrics.alpha())


def test_given_prefix_tokens_are_not_counted():
    target, draft = table(1), table(2)
    inputs, mask, tokens = text(0, rows=2)
    result = metrics.teacher_forced_alpha(
        target,
        draft,
        inputs,
        mask,
        tokens,
        jnp.array([5, 4]),
        prefix_length=jnp.array([2, 3]),
    )
    assert result.valid.tolist() == [
        [False, True, True, True],
        [False, False, True, False],
    ]


def test_greedy_laws_agree_or_do_not():
    target, draft = table(1), table(2, like=table(1), mix=0.6)
    inputs, mask, tokens = text(3, rows=8)
    length = jnp.full(8, 5)
    greedy = Sampling(temperature=None)
    both = metrics.teacher_forced_alpha(
        target, draft, inputs, mask, tokens, length, sampling=greedy
    )
    mixed = metrics.teacher_forced_alpha(
        target, draft, inputs, mask, tokens, length, draft_sampling=greedy
    )
    for row in range(8):
        for place in range(4):
            p = row_of(target, tokens[row], place)
            best = row_of(draft, tokens[row], place).argmax()
            assert float(both.beta[row, place]) == float(p.argmax() == best)
            assert float(mixed.beta[row, place]) == pytest.approx(p[best], abs=1e-6)
    assert 0 < metrics.alpha(both) < 1
    assert metrics.mean_entropy(both) == 0.0


@pytest.mark.parametrize("draft_rows", [3, 6])
def test_settings_of_each_side_and_vocabularies_of_other_width(draft_rows):
    target, draft = table(1), table(2, vocab_size=draft_rows)
    inputs, mask, tokens = text(0, rows=4)
    tokens = jnp.minimum(tokens, 2)
    result = metrics.teacher_forced_alpha(
        target,
        draft,
        inputs,
        mask,
        tokens,
        jnp.full(4, 5),
        sampling=Sampling(temperature=0.5, num_tokens=3),
        draft_sampling=Sampling(temperature=jnp.array([0.7, 1.0, 1.3, 2.0])),
    )
    for row, heat in enumerate([0.7, 1.0, 1.3, 2.0]):
        for place in range(4):
            p = row_of(target, tokens[row], place, 0.5)[:3]
            q = row_of(draft, tokens[row], place, heat)[:3]
            beta = np.minimum(p / p.sum(), q / q.sum()).sum()
            assert float(result.beta[row, place]) == pytest.approx(beta, abs=1e-5)


def test_overlap_of_sparse_laws():
    p = jnp.array([[0.5, 0.3, 0.2, 0.0]])
    dense = Law(probs=p)
    sparse = Law(probs=jnp.array([[0.6, 0.4]]), ids=jnp.array([[2, 0]]))
    spread = Law(probs=sparse.dense(4))
    assert metrics.overlap(dense, sparse).tolist() == pytest.approx([0.6])
    assert metrics.overlap(sparse, dense).tolist() == pytest.approx([0.6])
    assert metrics.overlap(dense, spread).tolist() == pytest.approx([0.6])
    assert metrics.overlap(sparse, sparse).tolist() == pytest.approx([1.0])
    assert metrics.overlap(dense, dense).tolist() == pytest.approx([1.0])


def test_alpha_is_the_acceptance_probability_of_a_decode():
    """Laws that ignore the prefix, gamma 1: accepted / drafted estimates alpha."""
    target = Table(logits=jnp.log(jnp.array([[0.4, 0.3, 0.2, 0.1]])), depth=0)
    draft = Table(logits=jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]])), depth=0)
    inputs, mask, _ = text(0, rows=2000)
    output = speculative_generate(
        target,
        ModelDrafter(draft),
        inputs,
        mask,
        row_keys(5, 2000),
        gamma=1,
        max_length=9,
        eos_id=-1,
    )
    result = metrics.teacher_forced_alpha(
        target, draft, inputs, mask, output.tokens, output.length
    )
    assert metrics.alpha(result) == pytest.approx(0.6, abs=1e-6)
    calls = int(output.stats.target_calls.sum())
    error = math.sqrt(0.6 * 0.4 / calls)
    assert abs(metrics.acceptance_rate(output.stats) - 0.6) < 4 * error


def test_asking_the_drafter_step_by_step_gives_the_same():
    target, draft = table(1, zeros=0.2), table(2, zeros=0.2)
    inputs, mask, tokens = text(4, rows=5)
    length = jnp.array([5, 4, 3, 2, 1])
    for settings in ({}, {"draft_sampling": Sampling(temperature=None)}):
        one_pass = metrics.teacher_forced_alpha(
            target, draft, inputs, mask, tokens, length, **settings
        )
        by_step = metrics.drafter_alpha(
            target, ModelDrafter(draft), inputs, mask, tokens, length, **settings
        )
        np.testing.assert_allclose(by_step.beta, one_pass.beta, atol=1e-6)
        np.testing.assert_allclose(by_step.kept, one_pass.kept, atol=1e-5)
        assert 0 < float(jnp.mean(one_pass.kept)) < 1
        np.testing.assert_allclose(by_step.entropy, one_pass.entropy, atol=1e-6)
        assert jnp.array_equal(by_step.valid, one_pass.valid)


def test_a_drafter_gets_the_features_of_its_own_place():
    target = table(1)
    inputs, mask, tokens = text(6, rows=3)
    result = metrics.drafter_alpha(
        target, Echo(), inputs, mask, tokens, jnp.array([5, 5, 3])
    )
    for row in range(3):
        assert float(result.beta[row, 0]) == 0.0  # nothing to echo yet
        for place in range(1, 4):
            p = row_of(target, tokens[row], place)
            q = row_of(target, tokens[row], place - 1)
            beta = np.minimum(p, q).sum()
            assert float(result.beta[row, place]) == pytest.approx(beta, abs=1e-6)


def test_alpha_of_copied_drafts():
    target = table(1)
    drafter = NgramDrafter(max_ngram=2)
    inputs = jnp.array([[2, 3, 1], [3, 3, 0]])
    mask = jnp.array([[True, True, True], [True, True, False]])
    tokens = jnp.array([[0, 2, 3, 2, 1], [0, 1, 2, 3, 3]])
    result = metrics.drafter_alpha(
        target, drafter, inputs, mask, tokens, jnp.array([5, 5])
    )
    empty = 0
    state = drafter.init(
        target,
        target.encode(inputs, mask),
        inputs,
        mask,
        tokens[:, :1],
        jnp.ones(2, jnp.int32),
        5,
    )
    for place in range(4):
        block, _ = drafter.draft(
            target,
            Noise(keys=row_keys(0, 2), start=jnp.full(2, place)),
            state,
            tokens,
            jnp.full(2, place + 1),
            gamma=1,
            sampling=Sampling(),
        )
        for row in range(2):
            copied = int(block.tokens[row, 0])
            expected = row_of(target, tokens[row], place)[copied]
            if int(block.length[row]) == 0:
                expected, empty = 0.0, empty + 1
            assert float(result.beta[row, place]) == pytest.approx(expected, abs=1e-6)
    assert empty > 0
    # The first draft is the source's own beginning.
    assert float(result.beta[0, 0]) == pytest.approx(row_of(target, tokens[0], 0)[2])


def test_t5_agrees_with_itself_and_one_program_serves_all_settings():
    config = T5Config(
        vocab_size=24,
        d_model=8,
        d_kv=4,
        num_heads=2,
        d_ff=16,
        num_encoder_layers=1,
        num_decoder_layers=1,
    )
    model, other = (T5(config, jax.random.key(seed)) for seed in (0, 1))
    inputs = jnp.arange(1, 13).reshape(2, 6)
    mask = inputs < 11
    tokens = jnp.arange(16).reshape(2, 8).at[:, 0].set(0)
    length = jnp.array([8, 5])

    def run(draft, temperature):
        return metrics.teacher_forced_alpha(
            model,
            draft,
            inputs,
            mask,
            tokens,
            length,
            sampling=Sampling(temperature=temperature),
        )

    before = agreement._teacher_forced._cache_size()
    assert metrics.alpha(run(model, 1.0)) == pytest.approx(1.0, abs=1e-5)
    assert metrics.alpha(run(other, 1.0)) < 0.999
    assert metrics.alpha(run(model, 0.3)) == pytest.approx(1.0, abs=1e-5)
    assert agreement._teacher_forced._cache_size() == before + 1


def test_what_does_not_fit_is_named():
    target, draft = table(1), table(2)
    inputs, mask, tokens = text(0, rows=2)
    length = jnp.array([5, 5])

    def run(tokens=tokens, length=length, **settings):
        metrics.teacher_forced_alpha(
            target, draft, inputs, mask, tokens, length, **settings
        )

    with pytest.raises(InputError, match="tokens have 1 column"):
        run(tokens=tokens[:, :1])
    with pytest.raises(InputError, match="length is"):
        run(length=jnp.array([5, 6]))
    with pytest.raises(InputError, match="prefix_length"):
        run(prefix_length=jnp.array([0, 1]))
    with pytest.raises(InputError, match="draft_sampling.top_p"):
        run(draft_sampling=Sampling(top_p=0.0))


def test_a_drafter_without_a_law_has_no_alpha():
    class Mute(NgramDrafter):
        has_law = False

    inputs, mask, tokens = text(0, rows=2)
    with pytest.raises(InputError, match="Mute has none"):
        metrics.drafter_alpha(table(1), Mute(), inputs, mask, tokens, jnp.array([5, 5]))
