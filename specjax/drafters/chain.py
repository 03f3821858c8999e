"""The loop that all drafters share that write one token after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.base import Committed, node_keys
from specjax.rows import put
from specjax.sampling import Sampling, draw_law, fit_vocabulary
from specjax.types import DraftBlock, Law, Noise, Prefix


class Pass(NamedTuple):
    """What one pass of a drafting model gives, of the one token that counts.

    Attributes:
        logits: ``float32[B, V]`` after the token that was fed last.
        hidden: ``[B, D]`` what the logits were made of; None: not asked for.
        memory: what the next pass needs, any pytree.
    """

    logits: Float[Array, "B V"]
    hidden: Float[Array, "B D"] | None
    memory: Any


class Signal(NamedTuple):
    """What a rule may read after a token was drafted.

    Attributes:
        depth: of the token, from 1.
        token: ``int32[B]``.
        probs: ``float32[B, V]`` the law that the token was drawn from; of a greedy
            draft, whose law is a point, that of temperature 1.
        hidden: ``[B, D]`` what the law was made of; None where no rule asks.
    """

    depth: Int[Array, ""]
    token: Int[Array, " B"]
    probs: Float[Array, "B V"]
    hidden: Float[Array, "B D"] | None

    @property
    def confidence(self) -> Float[Array, " B"]:
        """The draft's probability of its token."""
        return jnp.take_along_axis(self.probs, self.token[:, None], axis=1)[:, 0]


class LengthRule(Protocol):
    """When a row stops drafting: a frozen pytree, whose state ends with the call.

    A row keeps the token after which it stopped: dropping it would bias the output. The
    loop of passes ends when all rows have stopped; verification has a width of gamma
    all the same. Those of the package are in `drafters.lengths`.
    """

    @property
    def reads_hidden(self) -> bool:
        """Whether `go_on` wants `Signal.hidden`."""
        ...

    def init(self, batch: int) -> Any:
        """The state before the first block; B first in every array."""
        ...

    def begin(self, state: Any, gamma: int) -> tuple[Int[Array, " B"], Any]:
        """Most tokens that each row drafts in this block, 1 .. gamma."""
        ...

    def go_on(self, state: Any, signal: Signal) -> tuple[Bool[Array, " B"], Any]:
        """Whether each row drafts one more token after the one of `signal`.

        A row that has stopped is asked again while others go on; its answer and its
        part of the state are not kept.
        """
        ...

    def commit(
        self,
        state: Any,
        drafted: Int[Array, " B"],
        num_accepted: Int[Array, " B"],
    ) -> Any:
        """Learns from the verdict on a block of `drafted` tokens."""
        ...


@struct.dataclass
class LengthState:
    """A rule's memory between blocks, and what it waits to hear of.

    Attributes:
        rule: the rule's own.
        drafted: ``int32[B]`` tokens of the block that is being judged.
        ended: ``bool[B]`` rows whose drafts nobody reads.
    """

    rule: Any
    drafted: Int[Array, " B"]
    ended: Bool[Array, " B"]


def init_length(rule: LengthRule | None, batch: int) -> LengthState | None:
    """The state of a rule before the first block; None without a rule."""
    if rule is None:
        return None
    return LengthState(
        rule=rule.init(batch),
        drafted=jnp.zeros(batch, jnp.int32),
        ended=jnp.zeros(batch, bool),
    )


def commit_length(
    rule: LengthRule | None, state: LengthState | None, committed: Committed
) -> LengthState | None:
    """Tells the rule what became of its block."""
    if rule is None:
        return None
    assert state is not None  # of `init_length`
    learnt = rule.commit(state.rule, state.drafted, committed.num_accepted)
    return state.replace(
        rule=where_rows(~state.ended, learnt, state.rule),
        ended=state.ended if committed.done is None else committed.done,
    )


def draft_chain(
    first: Pass,
    advance: Callable[[Int[Array, " B"], Any], Pass],
    *,
    noise: Noise,
    tokens: Int[Array, "B L"],
    length: Int[Array, " B"],
    gamma: int,
    sampling: Sampling,
    vocab_size: int,
    rule: LengthRule | None = None,
    state: LengthState | None = None,
) -> tuple[DraftBlock, Any, LengthState | None]:
    """Draws up to gamma tokens, each from the pass after the one before.

    Args:
        first: of the last committed token.
        advance: feeds the drafted tokens; called gamma - 1 times at most.
        noise: the token at depth d is drawn with ``noise.key(d, d)``.
        tokens: the committed text.
        length: its valid tokens.
        gamma: most tokens of a row.
        sampling: of the draft.
        vocab_size: the target's ids, which the logits are fitted to.
        rule: ends a row's draft early; None: all rows draft gamma tokens.
        state: from `init_length`.

    Returns:
        the block, the memory after the last pass, and the state to commit.
    """

    def choose(
        logits: Array, buffer: Array, depth: int | Array
    ) -> tuple[Array, Array, Law, Array | None]:
        prefix = Prefix(tokens=buffer, length=(length + depth - 1)[:, None])
        logits = fit_vocabulary(logits[:, None], vocab_size)
        law = sampling.law(logits, prefix)
        chosen = jax.vmap(lambda key, own: draw_law(key, own, 0, vocab_size))(
            node_keys(noise, depth, depth), law
        )
        if sampling.controls:  # they read the drafted tokens too
            buffer = put(buffer, length + depth - 1, chosen)
        soft = None
        if rule is not None:
            soft = softened(sampling).law(logits, prefix).probs[:, 0]
        return chosen, buffer, law, soft

    if rule is not None:
        assert state is not None  # of `init_length`
        return _draft_ruled(first, advance, choose, tokens, gamma, rule, state)
    token, buffer, law, _ = choose(first.logits, tokens, 1)

    def step(carry: Any, depth: Array) -> tuple[Any, Any]:
        token, buffer, memory = carry
        after = advance(token, memory)
        token, buffer, law, _ = choose(after.logits, buffer, depth)
        return (token, buffer, after.memory), (token, law)

    (_, _, memory), (more, laws) = jax.lax.scan(
        step,
        (token, buffer, first.memory),
        jnp.arange(2, gamma + 1, dtype=jnp.int32),
    )
    # Scanned outputs have depth first and a position axis of one.
    laws = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), laws)
    block = DraftBlock(
        tokens=jnp.concatenate([token[:, None], more.T], axis=1),
        length=jnp.full_like(length, gamma),
        law=jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), law, laws),
    )
    return block, memory, None


def softened(sampling: Sampling) -> Sampling:
    """The same with a temperature of 1 where it is greedy."""
    if sampling.temperature is None:
        return sampling.replace(temperature=1.0)
    temperature = jnp.asarray(sampling.temperature, jnp.float32)
    return sampling.replace(temperature=jnp.where(temperature > 0, temperature, 1.0))


def _draft_ruled(
    first: Pass,
    advance: Callable[[Array, Any], Pass],
    choose: Callable[[Array, Array, Array], tuple[Array, Array, Law, Any]],
    tokens: Array,
    gamma: int,
    rule: LengthRule,
    state: LengthState,
) -> tuple[DraftBlock, Any, LengthState]:
    """The rest of `draft_chain` where rows may stop: a pass only while one goes on.

    What a row did not draft is zeros, so that no row's block tells how long the others
    went on.
    """
    most, begun = rule.begin(state.rule, gamma)
    most = jnp.clip(most, 1, gamma)
    batch = tokens.shape[0]

    def draw(after: Pass, carry: Any) -> Any:
        """Draws a token in each row that goes on, and asks the rule about it."""
        depth, going, count, learnt, _, buffer, _, drafted = carry
        depth, count = depth + 1, count + going.astype(jnp.int32)
        token, buffer, law, soft = choose(after.logits, buffer, depth)
        new = (token[:, None], law)
        new = where_rows(going, new, jax.tree.map(jnp.zeros_like, new))
        if drafted is None:
            drafted = jax.tree.map(
                lambda x: jnp.zeros((batch, gamma) + x.shape[2:], x.dtype), new
            )
        drafted = jax.tree.map(
            lambda whole, part: jax.lax.dynamic_update_slice_in_dim(
                whole, part, depth - 1, axis=1
            ),
            drafted,
            new,
        )
        answer, heard = rule.go_on(learnt, Signal(depth, token, soft, after.hidden))
        learnt = where_rows(going, heard, learnt)
        going = going & answer & (depth < most)
        return depth, going, count, learnt, token, buffer, after.memory, drafted

    def unfinished(carry: Any) -> Array:
        return jnp.any(carry[1])

    def step(carry: Any) -> Any:
        return draw(advance(carry[4], carry[6]), carry)

    count = jnp.zeros_like(state.drafted)
    carry: Any = (jnp.int32(0), ~state.ended, count, begun, None, tokens, None, None)
    carry = jax.lax.while_loop(unfinished, step, draw(first, carry))
    _, _, count, learnt, _, _, memory, (drafted, laws) = carry
    block = DraftBlock(tokens=drafted, length=count, law=laws)
    return block, memory, state.replace(rule=learnt, drafted=count)


def where_rows(rows: Bool[Array, " B"], new: Any, old: Any) -> Any:
    """Row by row, one tree of arrays or the other."""
    return jax.tree.map(
        lambda n, o: jnp.where(rows.reshape((-1,) + (1,) * (n.ndim - 1)), n, o),
        new,
        old,
    )
