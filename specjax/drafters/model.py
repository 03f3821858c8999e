"""A smaller model of the same tokenizer as the drafter (Leviathan et al. 2023)."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.drafters.base import Committed
from specjax.drafters.chain import (
    LengthState,
    Pass,
    commit_length,
    draft_chain,
    init_length,
)
from specjax.models.base import Cache, Encoded, EncoderDecoder, encode_draft
from specjax.rows import take
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise


@struct.dataclass
class ModelDraftState:
    """The draft model's memory.

    Attributes:
        encoded: its encoder's result, or the target's projected to its width.
        cache: holds the prefix up to, but without, the last *two* committed tokens. The
            last drafted token is never fed, so after a full acceptance the memory lags
            by two; feeding two tokens in every first step covers both cases at the
            price of one.
        rule: of the length; None without a rule.
    """

    encoded: Encoded
    cache: Cache
    rule: LengthState | None = None


@struct.dataclass
class ModelDrafter:
    """Drafts token by token with a model of its own.

    Attributes:
        model: any `EncoderDecoder`; its vocabulary may be padded otherwise than the
            target's. One that shares the target's encoder (`models.base.encode_draft`)
            runs none of its own.
        rule: ends a row's draft early; None: every block has gamma tokens.
    """

    model: Any
    rule: Any = None

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
            encoded=own,
            cache=cache.replace(length=jnp.maximum(length - 2, 0)),
            rule=init_length(self.rule, inputs.shape[0]),
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
        """Runs `gamma` passes of the model: the first feeds two tokens, others one.

        With a rule of the length it runs as many as the longest row wants.
        """

        def advance(token: Array, cache: Cache) -> Pass:
            output, cache = self.model.decode(
                token[:, None], cache, state.encoded, taps=self._taps
            )
            hidden = output.features[0][:, 0] if self._taps else None
            return Pass(output.logits[:, 0], hidden, cache)

        first = catch_up(self.model, state, tokens, length, self._taps)
        block, cache, rule = draft_chain(
            first,
            advance,
            noise=noise,
            tokens=tokens,
            length=length,
            gamma=gamma,
            sampling=sampling,
            vocab_size=target.vocab_size,
            rule=self.rule,
            state=state.rule,
        )
        return block, state.replace(cache=cache, rule=rule)

    def commit(self, state: ModelDraftState, committed: Committed) -> ModelDraftState:
        """Rolls the memory back to all but the last two committed tokens."""
        length = jnp.maximum(committed.length - 2, 0)
        return state.replace(
            cache=state.cache.replace(length=length),
            rule=commit_length(self.rule, state.rule, committed),
        )

    @property
    def _taps(self) -> tuple[int, ...]:
        """What the rule reads of the draft model."""
        return (-1,) if self.rule is not None and self.rule.reads_hidden else ()


def catch_up(
    model: EncoderDecoder,
    state: ModelDraftState,
    tokens: Array,
    length: Array,
    taps: tuple[int, ...] = (),
) -> Pass:
    """Feeds the last two committed tokens: what comes of the last, and the memory."""
    start = state.cache.length
    fed = take(tokens, start[:, None] + jnp.arange(2)[None])
    output, cache = model.decode(fed, state.cache, state.encoded, taps=taps)
    assert cache is not None  # only teacher forcing keeps nothing
    # A row with one token so far feeds a token too many; it gets overwritten.
    last = length - 1 - start
    return Pass(
        logits=take(output.logits, last),
        hidden=take(output.features[0], last) if taps else None,
        memory=cache.replace(length=length),
    )
