"""A smaller model of the same tokenizer as the drafter (Leviathan et al. 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.drafters.base import Committed
from specjax.models.base import Cache, Encoded, EncoderDecoder, encode_draft
from specjax.sampling import Sampling, draw_law, fit_vocabulary
from specjax.types import DraftBlock, Law, Noise, Prefix


@struct.dataclass
class ModelDraftState:
    """The draft model's memory.

    Attributes:
        encoded: its encoder's result, or the target's projected to its width.
        cache: holds the prefix up to, but without, the last *two* committed tokens. The
            last drafted token is never fed, so after a full acceptance the memory lags
            by two; feeding two tokens in every first step covers both cases at the
            price of one.
    """

    encoded: Encoded
    cache: Cache


@struct.dataclass
class ModelDrafter:
    """Drafts token by token with a model of its own.

    Attributes:
        model: any `EncoderDecoder`; its vocabulary may be padded otherwise than the
            target's. One that shares the target's encoder (`models.base.encode_draft`)
            runs none of its own.
    """

    model: Any

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    def nodes(self, gamma: int) -> int:
        """A chain."""
        return gamma

    def init(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        prefix: Int[Array, "B P"],
        length: Int[Array, " B"],
        size: int,
    ) -> ModelDraftState:
        """Encodes the sources and feeds the prefixes.

        Raises:
            InputError: the model shares the encoder of targets of another width.
        """
        own = encode_draft(self.model, encoded, inputs, mask)
        cache = self.model.init_cache(inputs.shape[0], size)
        if prefix.shape[1] > 2:
            _, cache = self.model.decode(prefix, cache, own)
        return ModelDraftState(
            encoded=own, cache=cache.replace(length=jnp.maximum(length - 2, 0))
        )

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: ModelDraftState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, ModelDraftState]:
        """Runs `gamma` passes of the model: the first feeds two tokens, others one."""
        vocab_size = target.vocab_size
        rows = jnp.arange(tokens.shape[0])

        def choose(
            logits: Array, buffer: Array, depth: int | Array
        ) -> tuple[Array, Array, Law]:
            prefix = Prefix(tokens=buffer, length=(length + depth - 1)[:, None])
            law = sampling.law(fit_vocabulary(logits[:, None], vocab_size), prefix)
            chosen = jax.vmap(lambda key, own: draw_law(key, own, 0, vocab_size))(
                node_keys(noise, depth, depth), law
            )
            if sampling.controls:  # they read the drafted tokens too
                buffer = buffer.at[rows, length + depth - 1].set(chosen, mode="drop")
            return chosen, buffer, law

        logits, cache = catch_up(self.model, state, tokens, length)
        token, buffer, law = choose(logits, tokens, 1)

        def step(carry: Any, depth: Array) -> tuple[Any, Any]:
            token, buffer, cache = carry
            output, cache = self.model.decode(token[:, None], cache, state.encoded)
            token, buffer, law = choose(output.logits[:, 0], buffer, depth)
            return (token, buffer, cache), (token, law)

        (_, _, cache), (more, laws) = jax.lax.scan(
            step, (token, buffer, cache), jnp.arange(2, gamma + 1)
        )
        # Scanned outputs have depth first and a position axis of one.
        laws = jax.tree.map(lambda x: jnp.moveaxis(x[:, :, 0], 0, 1), laws)
        block = DraftBlock(
            tokens=jnp.concatenate([token[:, None], more.T], axis=1),
            length=jnp.full_like(length, gamma),
            law=jax.tree.map(lambda x, y: jnp.concatenate([x, y], 1), law, laws),
        )
        return block, state.replace(cache=cache)

    def commit(self, state: ModelDraftState, committed: Committed) -> ModelDraftState:
        """Rolls the memory back to all but the last two committed tokens."""
        length = jnp.maximum(committed.length - 2, 0)
        return state.replace(cache=state.cache.replace(length=length))


def catch_up(
    model: EncoderDecoder, state: ModelDraftState, tokens: Array, length: Array
) -> tuple[Array, Cache]:
    """Feeds the last two committed tokens: logits after the last, and the memory."""
    rows, start = jnp.arange(tokens.shape[0]), state.cache.length
    fed = tokens[rows[:, None], start[:, None] + jnp.arange(2)[None]]
    output, cache = model.decode(fed, state.cache, state.encoded)
    assert cache is not None  # only teacher forcing keeps nothing
    # A row with one token so far feeds a token too many; it gets overwritten.
    return output.logits[rows, length - 1 - start], cache.replace(length=length)


def node_keys(noise: Noise, node: int | Array, depth: int | Array) -> Array:
    """The key of one drafted node, in every row."""
    return jax.vmap(lambda row: row.key(node, depth))(noise)
