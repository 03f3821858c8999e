"""Beam search with the target alone: a baseline that is no sample of its law.

Of each source the `beams` likeliest texts so far are kept, one token per target pass.
Speculation verifies a single text against its law, so that the two do not combine.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax import checks
from specjax.controls import by_row
from specjax.errors import InputError, is_whole
from specjax.models.base import Cache, Encoded, EncoderDecoder
from specjax.sampling import Sampling
from specjax.types import Prefix

_ALPHA = 0.6  # of T5's translations and summaries (Raffel et al. 2020, section 3.1.2)


@struct.dataclass
class BeamOutput:
    """The texts of a beam search, the best first: whole ones, then those that were cut.

    Attributes:
        tokens: ``int32[B, K, max_length]`` prefix, then output, EOS included, then pad.
        length: ``int32[B, K]`` valid tokens.
        score: ``float32[B, K]`` log-probability over the length penalty; -inf: there
            were fewer texts than beams.
        finished: ``bool[B, K]`` whether the text ended by itself.
        target_calls: ``int32[B]`` target passes while the row was unfinished, each over
            K texts.
    """

    tokens: Int[Array, "B K L"]
    length: Int[Array, "B K"]
    score: Float[Array, "B K"]
    finished: Bool[Array, "B K"]
    target_calls: Int[Array, " B"]


@struct.dataclass
class _Texts:
    """K texts of each row, the best first; those of score -inf are none."""

    tokens: Int[Array, "B K L"]
    length: Int[Array, "B K"]
    score: Float[Array, "B K"]


@struct.dataclass
class _State:
    """The loop's carry; texts that go on are all of one length in a row.

    Attributes:
        going: texts that go on, by log-probability.
        whole: texts that ended, by log-probability over the length penalty.
        cache: of the texts that go on, row by row; it holds all but their last token.
        done: rows that have ended.
        target_calls: of each row.
    """

    going: _Texts
    whole: _Texts
    cache: Cache
    done: Bool[Array, " B"]
    target_calls: Int[Array, " B"]


def beam_generate(
    target: EncoderDecoder,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    *,
    beams: int = 4,
    alpha: float | int | Array = _ALPHA,
    sampling: Sampling = Sampling(temperature=None),  # noqa: B008 (a frozen record)
    max_length: int = 128,
    budget: int | Array | None = None,
    prefix: Int[Array, "B P"] | None = None,
    prefix_length: Int[Array, " B"] | None = None,
    eos_id: int = 1,
) -> BeamOutput:
    """Searches for the texts of the highest length-normalised probability.

    At every step the 2 K best continuations of the K texts are ranked. Those of the
    first K that end are whole and leave; the first K that do not end go on. A row ends
    with K whole texts, or for want of budget. One beam is greedy decoding.

    Args:
        target: the model.
        inputs: source ids, padded on the right.
        mask: True at real source tokens.
        beams: K, texts that are kept (static).
        alpha: of the length penalty ``((5 + n) / 6) ** alpha`` that the log-probability
            of n new tokens, EOS included, is divided by; 0: none. Above 0 it is for
            longer texts.
        sampling: greedy; its controls and dead rows hold in every text.
        max_length: as of `autoregressive_generate`, like all that follows.
        budget: new tokens after the prefix, one number or one per row.
        prefix: decoder tokens that stand already; default: the start token 0.
        prefix_length: real tokens of each prefix; default: all.
        eos_id: ends a text.

    Raises:
        InputError: before anything compiles, for settings that mean nothing.

    Source: Wu et al. 2016 (GNMT, arXiv:1609.08144), section 7, for the penalty. GNMT's
    coverage penalty is left out, as in T5.
    """
    if not (is_whole(beams) or isinstance(beams, np.integer)) or beams < 1:
        raise InputError(f"beams is {beams}: a whole number of texts, at least 1")
    if not isinstance(alpha, jax.core.Tracer) and not np.isfinite(alpha):
        raise InputError(f"alpha is {alpha}: a finite number; 0 is no length penalty")
    if sampling.temperature is not None or sampling.top_k or sampling.top_p:
        raise InputError(
            "sampling draws tokens and beam search draws none: leave temperature, "
            "top_k and top_p out (Sampling(temperature=None))"
        )
    arguments = checks.decode_arguments(
        target,
        inputs,
        mask,
        None,
        sampling,
        max_length,
        budget,
        prefix,
        prefix_length,
        eos_id,
    )
    del arguments["keys"]
    return _beam_loop(
        target,
        **arguments,
        beams=int(beams),
        alpha=jnp.asarray(alpha, jnp.float32),
    )


@functools.partial(jax.jit, static_argnames=("beams", "max_length"))
def _beam_loop(
    target: EncoderDecoder,
    *,
    inputs: Array,
    mask: Array,
    beams: int,
    alpha: Array,
    sampling: Sampling,
    max_length: int,
    budget: Array,
    prefix: Array,
    prefix_length: Array,
    eos_id: Array,
) -> BeamOutput:
    batch = inputs.shape[0]
    encoded = target.encode(inputs, mask)
    # The inner minimum keeps a huge budget from overflowing.
    limit = jnp.minimum(prefix_length + jnp.minimum(budget, max_length), max_length)
    state = _init(target, encoded, prefix, prefix_length, limit, beams, max_length)
    step = functools.partial(
        _step,
        target,
        jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), encoded),
        sampling=sampling.replace(
            controls=tuple(by_row(own, batch, beams) for own in sampling.controls)
        ),
        alpha=alpha,
        start=prefix_length,
        limit=limit,
        eos_id=eos_id,
    )
    state = jax.lax.while_loop(lambda state: jnp.any(~state.done), step, state)

    # Whole texts, then the best of those that the budget cut.
    new = state.going.length - prefix_length[:, None]
    cut = state.going.replace(score=state.going.score / _penalty(new, alpha))
    count = jnp.sum(state.whole.score > -jnp.inf, axis=1, dtype=jnp.int32)[:, None]
    rank = jnp.arange(beams, dtype=jnp.int32)[None]
    order = jnp.where(rank < count, rank, beams + rank - count)
    texts = _chosen(_joined(state.whole, cut), order)
    return BeamOutput(
        tokens=texts.tokens,
        length=texts.length,
        score=texts.score,
        finished=rank < count,
        target_calls=state.target_calls,
    )


def _init(
    target: EncoderDecoder,
    encoded: Encoded,
    prefix: Array,
    prefix_length: Array,
    limit: Array,
    beams: int,
    size: int,
) -> _State:
    """One text that goes on, the prefix, and no other yet."""
    batch, given = prefix.shape
    cache = target.init_cache(batch, size)
    if given > 1:
        _, fed = target.decode(prefix, cache, encoded)
        assert fed is not None  # only teacher forcing keeps nothing
        cache = fed
    cache = cache.replace(length=prefix_length - 1)
    real = jnp.arange(given)[None] < prefix_length[:, None]
    tokens = jnp.zeros((batch, size), jnp.int32)
    tokens = tokens.at[:, :given].set(jnp.where(real, prefix, 0))
    none = jnp.full((batch, beams), -jnp.inf, jnp.float32)
    texts = _Texts(
        tokens=jnp.repeat(tokens[:, None], beams, axis=1),
        length=jnp.repeat(prefix_length[:, None], beams, axis=1),
        score=none,
    )
    return _State(
        going=texts.replace(score=none.at[:, 0].set(0.0)),
        whole=texts,
        cache=jax.tree.map(lambda x: jnp.repeat(x, beams, axis=0), cache),
        done=limit <= prefix_length,
        target_calls=jnp.zeros(batch, jnp.int32),
    )


def _step(
    target: EncoderDecoder,
    encoded: Encoded,
    state: _State,
    *,
    sampling: Sampling,
    alpha: Array,
    start: Array,
    limit: Array,
    eos_id: Array,
) -> _State:
    """One target pass over all texts that go on, and the choice of the next ones."""
    batch, beams, size = state.going.tokens.shape
    place = state.going.length[:, :1]  # where the next token goes
    flat = state.going.tokens.reshape(batch * beams, size)
    length = state.going.length.reshape(-1, 1)
    last = jnp.take_along_axis(flat, length - 1, axis=1)
    output, cache = target.decode(last, state.cache, encoded)
    assert cache is not None  # only teacher forcing keeps nothing
    logits = sampling.edited(output.logits, Prefix(tokens=flat, length=length))
    gains = jax.nn.log_softmax(logits[:, 0], axis=-1).reshape(batch, beams, -1)
    vocab_size = gains.shape[-1]
    scores = (state.going.score[..., None] + gains).reshape(batch, -1)
    # At most one continuation of each text ends it: K others are among them.
    score, index = jax.lax.top_k(scores, 2 * beams)
    token, above = index % vocab_size, index // vocab_size

    found = _chosen(state.going, above)
    column = jnp.arange(size, dtype=jnp.int32)[None, None]
    found = _Texts(
        tokens=jnp.where(column == place[..., None], token[..., None], found.tokens),
        length=found.length + 1,
        score=score,
    )
    ends = token == eos_id
    leaves = ends & (jnp.arange(ends.shape[1])[None] < beams)
    ended = jnp.where(
        leaves, score / _penalty(found.length - start[:, None], alpha), -jnp.inf
    )
    whole = _best(_joined(state.whole, found.replace(score=ended)), beams)[0]
    going, kept = _best(found.replace(score=jnp.where(ends, -jnp.inf, score)), beams)
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * beams
    came = (rows + jnp.take_along_axis(above, kept, axis=1)).reshape(-1)

    # A row that has ended stays as it is.
    going, whole = jax.tree.map(
        lambda new, old: jnp.where(
            state.done.reshape((-1,) + (1,) * (new.ndim - 1)), old, new
        ),
        (going, whole),
        (state.going, state.whole),
    )
    full = jnp.all(whole.score > -jnp.inf, axis=1)
    cache = jax.tree.map(lambda x: x[came], cache)
    return _State(
        going=going,
        whole=whole,
        cache=cache.replace(length=going.length.reshape(-1) - 1),
        done=state.done | full | (going.length[:, 0] >= limit),
        target_calls=state.target_calls + (~state.done).astype(jnp.int32),
    )


def _penalty(new: Int[Array, "B K"], alpha: Array) -> Float[Array, "B K"]:
    return ((5.0 + new.astype(jnp.float32)) / 6.0) ** alpha


def _joined(one: _Texts, other: _Texts) -> _Texts:
    return jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), one, other)


def _chosen(texts: _Texts, order: Int[Array, "B K"]) -> _Texts:
    return _Texts(
        tokens=jnp.take_along_axis(texts.tokens, order[..., None], axis=1),
        length=jnp.take_along_axis(texts.length, order, axis=1),
        score=jnp.take_along_axis(texts.score, order, axis=1),
    )


def _best(texts: _Texts, count: int) -> tuple[_Texts, Int[Array, "B K"]]:
    """The best so many of some texts, in order, and where they stood."""
    order = jax.lax.top_k(texts.score, count)[1]
    return _chosen(texts, order), order
