"""What every drafter promises: the law that it reports, and a memory kept in step."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from specjax import ModelDrafter, NgramDrafter, Sampling
from specjax.drafters.base import Committed
from specjax.drafters.cascade import CascadeDrafter
from specjax.drafters.lengths import Confidence
from specjax.drafters.suffix import Finished, SuffixDrafter
from specjax.drafters.tables import count_tables
from specjax.proof.statistics import chi_square_p
from specjax.proof.tables import table_model
from specjax.training.draft_init import draft_from_target
from specjax.types import Noise
from tests.helpers import (
    hash_pair,
    perturbed,
    quick_compile,  # noqa: F401
    row_keys,
    tiny_t5,
)
from tests.twins import FLAWS, TwinDrafter

GAMMA = 3
PLAIN = Sampling()
CUT = Sampling(temperature=0.6, top_k=3, top_p=0.95)
GREEDY = Sampling(temperature=None)


@struct.dataclass
class Sharing:
    """A table model that takes what it knows of the source from the target alone."""

    model: Any

    shares_encoder: ClassVar[bool] = True

    @property
    def vocab_size(self):
        return self.model.vocab_size

    def encode_shared(self, encoded):
        return encoded

    def init_cache(self, batch_size, size):
        return self.model.init_cache(batch_size, size)

    def decode(self, tokens, cache, encoded, **options):
        return self.model.decode(tokens, cache, encoded, **options)


def drafters(model):
    """Every drafter of the package, with each way to sample that it knows."""
    vocab_size = getattr(model, "vocab_size", 4)
    texts = np.random.default_rng(3).integers(0, vocab_size, (20, 6))
    bigram = count_tables(texts[:, 1:], vocab_size, successors=3)
    suffix = SuffixDrafter(finished=Finished.empty(100), max_match=3, offset=2.0)
    suffix = suffix.learn(jnp.asarray(texts, jnp.int32), jnp.full(20, 6))
    return {
        "model": (ModelDrafter(model), PLAIN),
        "model, cut law": (ModelDrafter(model), CUT),
        "model, greedy": (ModelDrafter(model), GREEDY),
        "model, shared encoder": (ModelDrafter(Sharing(model)), PLAIN),
        "model, unsure": (ModelDrafter(model, Confidence(0.3)), PLAIN),
        "model, unsure, greedy": (ModelDrafter(model, Confidence(0.5)), GREEDY),
        "ngram": (NgramDrafter(), PLAIN),
        "unigram": (bigram.unigram, PLAIN),
        "bigram": (bigram, PLAIN),
        "bigram, cut law": (bigram, CUT),
        "bigram, greedy": (bigram, GREEDY),
        "suffix": (SuffixDrafter(max_match=3, offset=2.0), PLAIN),
        "suffix, table": (suffix, PLAIN),
        "cascade": (CascadeDrafter(model, NgramDrafter(), 2), PLAIN),
    }


NAMES = list(drafters(None))


def lawful(block, vocab_size: int) -> float:
    """The worst p-value of the drafted tokens under the reported rows.

    Rows of a batch that share the tokens before a place must report one law there, and
    their tokens must follow it.
    """
    tokens = np.asarray(block.tokens)
    laws = np.asarray(block.law.dense(vocab_size))
    values = []
    for depth in range(tokens.shape[1]):
        before = np.zeros(len(tokens), int)
        for place in range(depth):
            before = before * vocab_size + tokens[:, place]
        for group in np.unique(before):
            rows = (before == group) & (np.asarray(block.length) > depth)
            if rows.sum() < 500:
                continue
            own = laws[rows, depth]
            np.testing.assert_allclose(own, own[:1].repeat(len(own), 0), atol=1e-6)
            np.testing.assert_allclose(own[0].sum(), 1, atol=1e-5)
            values.append(chi_square_p(tokens[rows, depth][:, None], own[0]))
    assert len(values) >= 2
    return min(values) * len(values)  # Bonferroni


def draft_once(drafter, sampling, target, rows: int):
    """A block for `rows` copies of one text, each with its own noise."""
    inputs = jnp.tile(jnp.array([2, 0, 3, 1, 2]), (rows, 1))
    mask = jnp.ones(inputs.shape, bool)
    tokens = jnp.zeros((rows, 12), jnp.int32).at[:, :3].set(jnp.array([0, 2, 3]))
    length = jnp.full(rows, 3)

    return _draft_once(drafter, sampling, target, inputs, mask, tokens, length)


@jax.jit
def _draft_once(drafter, sampling, target, inputs, mask, tokens, length):
    encoded = target.encode(inputs, mask)
    state = drafter.init(target, encoded, inputs, mask, tokens[:, :3], length, 12)
    noise = Noise(keys=row_keys(1, len(tokens)), start=length - 1)
    block, _ = drafter.draft(
        target, noise, state, tokens, length, gamma=GAMMA, sampling=sampling
    )
    return block


@pytest.mark.parametrize(
    "name",
    [pytest.param(own, marks=pytest.mark.slow) if "," in own else own for own in NAMES],
)
def test_reported_law_is_the_law_drawn_from(name):
    target, model = table_model(0, 4, 5), table_model(1, 4, 5)
    drafter, sampling = drafters(model)[name]
    block = draft_once(drafter, sampling, target, 50_000)
    assert block.tokens.shape == (50_000, GAMMA) and block.tokens.dtype == jnp.int32
    assert ((0 <= block.length) & (block.length <= GAMMA)).all()
    assert lawful(block, 4) > 1e-2
    real = jnp.arange(GAMMA)[None] < block.length[:, None]
    assert (~real | (block.law.at(block.tokens) > 0)).all()


def test_a_false_report_is_found_out():
    target, model = table_model(0, 4, 5), table_model(1, 4, 5)
    for flaw in ("argmax", "before_top_k"):
        flaw = jnp.int32(FLAWS.index(flaw))
        twin = TwinDrafter(
            inner=ModelDrafter(model), flaw=flaw, keys=row_keys(9, 50_000)
        )
        one = Sampling(temperature=jnp.ones(()))
        assert lawful(draft_once(twin, one, target, 50_000), 4) < 1e-6


@jax.jit
def fed_features(drafter, target, encoded, block, tokens, length):
    """What the target's layers say of the last committed and the drafted tokens."""
    if not drafter.taps:
        return ()
    rows = jnp.arange(len(tokens))[:, None]
    places = length[:, None] + jnp.arange(block.tokens.shape[1] + 1)[None] - 1
    text = tokens.at[rows, places[:, 1:]].set(block.tokens)
    output, _ = target.decode(text, None, encoded, taps=drafter.taps)
    return tuple(part[rows, places] for part in output.features)


def commit_and_draft(drafter, sampling, target, vocab_size: int, atol: float) -> None:
    """After any verdict, the next draft is that of a fresh start on the same text."""
    rows, size, steps = 5, 24, 4
    generator = np.random.default_rng(0)
    inputs = jnp.asarray(generator.integers(2, vocab_size, (rows, 6)), jnp.int32)
    mask = jnp.arange(6)[None] < jnp.array([[6], [3], [1], [5], [6]])
    encoded = jax.jit(lambda model: model.encode(inputs, mask))(target)
    # Verdicts: all accepted, none, then by row.
    verdicts = [[3] * rows, [0] * rows, [3, 0, 1, 2, 3], [0, 1, 2, 3, 0]]

    @jax.jit
    def draft(drafter, state, noise, tokens, length):
        return drafter.draft(
            target, noise, state, tokens, length, gamma=GAMMA, sampling=sampling
        )

    @jax.jit
    def fresh(drafter, tokens, length):
        return drafter.init(target, encoded, inputs, mask, tokens, length, size)

    tokens = jnp.zeros((rows, size), jnp.int32)
    tokens = tokens.at[:, 1:3].set(inputs[:, :2])
    length = jnp.array([1, 2, 3, 1, 2])
    state = fresh(drafter, tokens, length)
    place = jnp.arange(size)[None]
    for step in range(steps):
        noise = Noise(keys=row_keys(step, rows), start=length - 1)
        kept = jnp.where(place < length[:, None], tokens, 0)
        block, after = draft(drafter, state, noise, tokens, length)
        anew, _ = draft(drafter, fresh(drafter, kept, length), noise, kept, length)
        real = jnp.arange(GAMMA)[None] < block.length[:, None]
        np.testing.assert_array_equal(block.length, anew.length)
        np.testing.assert_array_equal(
            jnp.where(real, block.tokens, 0), jnp.where(real, anew.tokens, 0)
        )
        laws = (block.law.dense(vocab_size), anew.law.dense(vocab_size))
        one, two = (jnp.where(real[..., None], law, 0) for law in laws)
        np.testing.assert_allclose(one, two, atol=atol)

        features = fed_features(drafter, target, encoded, block, tokens, length)
        accepted = jnp.minimum(jnp.array(verdicts[step]), block.length)
        offset = jnp.arange(GAMMA + 1)[None]
        drafted = jnp.pad(block.tokens, ((0, 0), (0, 1)))
        next_token = jnp.asarray(
            generator.integers(2, vocab_size, (rows, 1)), jnp.int32
        )
        new = jnp.where(offset < accepted[:, None], drafted, next_token)
        where = jnp.where(offset <= accepted[:, None], length[:, None] + offset, size)
        tokens = tokens.at[jnp.arange(rows)[:, None], where].set(new, mode="drop")
        length = length + accepted + 1
        committed = Committed(
            tokens=tokens, length=length, num_accepted=accepted, features=features
        )
        state = drafter.commit(after, committed)


@pytest.mark.parametrize("name", NAMES)
def test_commit_keeps_the_memory_in_step(name):
    target, model = hash_pair()
    drafter, sampling = drafters(model)[name]
    commit_and_draft(drafter, sampling, target, 64, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True])
def test_t5_commit_keeps_the_memory_in_step(shared):
    target = tiny_t5(0)
    model = draft_from_target(target, (), (0, 1)) if shared else target
    drafter = ModelDrafter(perturbed(model, 1, 0.1))
    commit_and_draft(drafter, GREEDY, target, 64, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_interface(name):
    """The names that decoding reads, and a frozen pytree."""
    drafter, _ = drafters(table_model(0, 4, 1))[name]
    assert isinstance(drafter.taps, tuple)
    assert isinstance(drafter.has_law, bool) and isinstance(drafter.samples, bool)
    leaves, tree = jax.tree.flatten(drafter)
    again = jax.tree.unflatten(tree, leaves)
    assert type(again) is type(drafter) and jax.tree.structure(again) == tree
    with pytest.raises(AttributeError):
        drafter.max_ngram = 2
