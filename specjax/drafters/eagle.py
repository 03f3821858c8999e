"""One decoder layer that goes on from the target's features (Li et al. 2025)."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import Committed, SlotLogits, check_known
from specjax.drafters.chain import (
    LengthState,
    Pass,
    commit_length,
    draft_chain,
    init_length,
)
from specjax.errors import InputError, is_whole
from specjax.models import narrow
from specjax.models.base import Cache, Encoded, EncoderDecoder
from specjax.models.dense import dense
from specjax.models.t5_bias import MASKED, relative_position_bucket
from specjax.models.t5_blocks import (
    DecoderBlock,
    Dropout,
    KeysValues,
    RMSNorm,
    empty_memory,
    run_decoder,
)
from specjax.models.t5_config import T5Config
from specjax.rows import put, take
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise


@struct.dataclass
class EagleState:
    """What is known of the text.

    Attributes:
        encoded: the target's, with the cross-attention's keys and values of this layer.
        cache: of this layer; its slots hold tokens whose features are the target's.
        features: ``[B, L, D]`` in slot j the fused features of token j - 1.
        rule: of the length; None without a rule.
    """

    encoded: Encoded
    cache: Cache
    features: Float[Array, "B L D"]
    rule: LengthState | None = None


@struct.dataclass
class EagleDrafter:
    """Drafts token by token with one decoder layer over the target's features.

    In slot j stands what the target thought of token j - 1, the outputs of some of its
    layers fused into one vector, together with the embedding of token j; the layer,
    which attends to the slots before and to the target's encoder output, says what
    token j + 1 is, through the target's head. Beyond the last committed token the
    layer's own output takes the place of features, until verification gives the true
    ones; then the slots are fed anew. Before the start token stands a learnt vector, so
    that the first block is one like any other.

    EAGLE-3 (Li et al. 2025, arXiv:2503.01840): several layers' features, no loss on
    them, and training on the layer's own outputs (`slot_logits`). Of a target that was
    widened (`models.widen`) it reads the old columns.

    Attributes:
        start: the features before the first token.
        tap_norms: of each tapped layer's output.
        fuse: makes one vector of them.
        norm: of that vector, or of the layer's own output.
        join: makes the layer's input of it and of the embedding, in this order.
        layer: the decoder layer.
        head_norm: before the target's head.
        config: shape of the target that it was made for (static).
        taps: the target's layers that are read (static).
        rule: ends a row's draft early; None: every block has gamma tokens.
    """

    start: Float[Array, " D"]
    tap_norms: tuple[RMSNorm, ...]
    fuse: Float[Array, "D KD"]
    norm: RMSNorm
    join: Float[Array, "D DD"]
    layer: DecoderBlock
    head_norm: RMSNorm
    config: T5Config = struct.field(pytree_node=False)
    taps: tuple[int, ...] = struct.field(pytree_node=False)
    rule: Any = None

    kind: ClassVar[str] = "eagle"
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> EagleDrafter:
        """A copy of the target's first layer, which reads embeddings as that one does.

        The last layer, which in the target reads what others have made of them, learns
        more slowly: after 110 steps at `repair` 1.2 tokens of three were expected to
        stand, and 1.6 with the first.

        Args:
            target: a T5.
            settings: ``taps``, rising numbers of decoder layers (the first, the middle
                and the last); ``shape``, the `T5Config` of the target before it was
                widened (the target's).
            key: initialises what is not copied: what fuses features, and all of a
                layer of another shape than the target's.

        Raises:
            InputError: a setting that is not known or means nothing.
        """
        config = narrow.made_for(target, settings.get("shape"))
        depth = config.num_decoder_layers
        check_known(settings, ("taps", "shape"), cls.kind)
        usual = sorted({0, depth // 2, depth - 1})
        taps = _check_taps(settings.get("taps", usual), depth)
        width, dtype = config.d_model, target.dtype
        parts = len(taps) * width
        start_key, fuse_key, join_key, layer_key = jax.random.split(key, 4)
        fuse = jax.random.normal(fuse_key, (width, parts)) * parts**-0.5
        # Little of them at first: they are noise to the layer.
        from_features = jax.random.normal(join_key, (width, width)) * 0.1 * width**-0.5
        join = jnp.concatenate([from_features, jnp.eye(width)], axis=1)

        def plain() -> RMSNorm:
            return jax.tree.map(lambda x: x.astype(dtype), RMSNorm(config))

        return cls(
            start=jax.random.normal(start_key, (width,)).astype(dtype),
            tap_norms=tuple(plain() for _ in taps),
            fuse=fuse.astype(dtype),
            norm=plain(),
            join=join.astype(dtype),
            layer=narrow.copy_layer(target, 0, config, layer_key),
            head_norm=narrow.copy_norm(target, config),
            config=config,
            taps=taps,
        )

    def settings(self) -> dict[str, Any]:
        """See `create`."""
        return {"taps": self.taps, "shape": dataclasses.asdict(self.config)}

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
    ) -> EagleState:
        """Feeds prefixes to the target, for their features, and to the layer.

        Raises:
            InputError: the target is narrower than the layer.
        """
        batch, given = prefix.shape
        own = self._encode(target, encoded)
        shape = (batch, size, self.start.shape[0])
        state = EagleState(
            encoded=own,
            cache=Cache(
                memory=empty_memory(self.config, 1, batch, size, self.start.dtype),
                length=jnp.zeros(batch, jnp.int32),
            ),
            features=jnp.broadcast_to(self.start[None, None], shape),
            rule=init_length(self.rule, batch),
        )
        if given > 1:
            output, _ = target.decode(prefix, None, encoded, taps=self.taps)
            known = self._fuse(output.features)[:, :-1]
            features = state.features.at[:, 1:given].set(known)
            _, cache = self._feed(
                target, features[:, :given], prefix, state.cache, state.encoded
            )
            state = state.replace(features=features, cache=cache)
        # The last token of each prefix is fed by the first block.
        return state.replace(cache=state.cache.replace(length=length - 1))

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: EagleState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, EagleState]:
        """Feeds what the last block has brought, then `gamma - 1` tokens of its own.

        At most gamma + 1 tokens are new, and so many are fed; those past the row's own
        get overwritten.
        """
        begin = state.cache.length
        slots = begin[:, None] + jnp.arange(gamma + 1, dtype=jnp.int32)[None]
        places = jnp.minimum(slots, tokens.shape[1] - 1)
        hidden, cache = self._feed(
            target,
            take(state.features, places),
            take(tokens, places),
            state.cache,
            state.encoded,
        )
        # A row that has ended brings none; nobody reads its drafts.
        hidden = take(hidden, jnp.clip(length - 1 - begin, 0, gamma))
        known = cache.replace(length=length)

        def say(hidden: Array, cache: Cache) -> Pass:
            normed = self.head_norm(hidden)
            logits = narrow.head_logits(target, normed)
            return Pass(logits=logits, hidden=normed, memory=(hidden, cache))

        def advance(token: Array, memory: tuple[Array, Cache]) -> Pass:
            hidden, cache = memory
            hidden, cache = self._feed(
                target, hidden[:, None], token[:, None], cache, state.encoded
            )
            return say(hidden[:, 0], cache)

        block, (_, cache), rule = draft_chain(
            say(hidden, known),
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
        return block, state.replace(cache=cache.replace(length=length), rule=rule)

    def commit(self, state: EagleState, committed: Committed) -> EagleState:
        """Keeps the target's features of the tokens that it was fed.

        Those of rejected tokens stand in slots past the end, and get overwritten.
        """
        known = self._fuse(committed.features)
        fed = jnp.arange(known.shape[1], dtype=jnp.int32)
        slots = state.cache.length[:, None] + fed[None]
        return state.replace(
            features=put(state.features, slots, known),
            rule=commit_length(self.rule, state.rule, committed),
        )

    def slot_logits(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        fed: Int[Array, "B T"],
        features: tuple[jax.Array, ...],
        key: Key[Array, ""],
        *,
        gamma: int,
    ) -> SlotLogits:
        """All anchors; each slot goes on from the layer's own output of the one before.

        EAGLE-3's training-time test: slot i of anchor t attends to the slots up to t,
        made of the target's features, and then to those that this anchor's own earlier
        steps have made, as in a draft.
        """
        encoded = self._encode(target, encoded)
        batch, size = fed.shape
        start = jnp.broadcast_to(self.start[None, None], (batch, 1, len(self.start)))
        hidden = jnp.concatenate([start, self._fuse(features)[:, :-1]], axis=1)
        invisible = jnp.where(encoded.mask, 0.0, MASKED)[:, None, None, :]
        memories: list[KeysValues] = []
        logits = []
        for slot in range(gamma):
            ahead = jnp.pad(fed[:, slot:], ((0, 0), (0, min(slot, size))))
            x = self._join(target, hidden, ahead)
            queries, memory = self.layer.attention.project(x, self.config.num_heads)
            memories.append(memory)
            mixed = self._attend(queries, memories)
            hidden = self.layer.finish(
                x, mixed, encoded.cross[0], invisible, Dropout(None, 0.0)
            )
            logits.append(narrow.head_logits(target, self.head_norm(hidden)))
        return SlotLogits.of_blocks(jnp.stack(logits, axis=2), end=size)

    def _encode(self, target: Any, encoded: Encoded) -> Encoded:
        """The target's result, of the layer's width, with its keys and values of it."""
        narrow.check_width(target, self.config.d_model)
        hidden = encoded.hidden[..., : self.config.d_model]
        cross = self.layer.cross.keys_values(hidden, self.config.num_heads)
        return encoded.replace(hidden=hidden, cross=(cross,))

    def _fuse(self, features: tuple[jax.Array, ...]) -> Float[Array, "B T D"]:
        """One vector of the outputs of the target's tapped layers."""
        width = self.config.d_model
        normed = [
            norm(part[..., :width])
            for norm, part in zip(self.tap_norms, features, strict=True)
        ]
        return dense(jnp.concatenate(normed, axis=-1), self.fuse)

    def _join(
        self, target: Any, hidden: Float[Array, "B T D"], tokens: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        """The layer's input."""
        own = narrow.embed(target, tokens, self.config.d_model)
        return dense(jnp.concatenate([self.norm(hidden), own], axis=-1), self.join)

    def _feed(
        self,
        target: Any,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        cache: Cache,
        encoded: Encoded,
    ) -> tuple[Float[Array, "B T D"], Cache]:
        """One pass of the layer over some slots: its output, and the memory."""
        x = self._join(target, hidden, tokens)
        (x,), after = run_decoder(
            [self.layer], self.config, x, cache, encoded.cross, encoded.mask
        )
        assert after is not None  # only teacher forcing keeps nothing
        return x, after

    def _attend(
        self, queries: Float[Array, "B H T K"], memories: list[KeysValues]
    ) -> Float[Array, "B T HK"]:
        """Self-attention of the last slot of every anchor's block.

        Args:
            queries: of all anchors.
            memories: of each slot so far. Of the first, all that stand up to the anchor
                are seen, and of the others the anchor's own.
        """
        table = self.layer.attention.bias
        assert table is not None  # `create` gives it one
        size, last = queries.shape[2], len(memories) - 1
        steps = np.arange(size + last)
        buckets = relative_position_bucket(
            -steps,
            bidirectional=False,
            num_buckets=self.config.num_buckets,
            max_distance=self.config.max_distance,
        )
        bias = table[...].astype(jnp.float32)[buckets].T  # [H, steps]
        anchor, place = np.arange(size)[:, None], np.arange(size)[None]
        seen = jnp.where(
            place <= anchor, bias[:, np.maximum(anchor + last - place, 0)], MASKED
        )
        exact = dict(preferred_element_type=jnp.float32)
        shared, own = memories[0], memories[1:]
        scores = [
            jnp.einsum("bhtk,bhlk->bhtl", queries, shared.keys, **exact) + seen[None]
        ]
        for slot, memory in enumerate(own, start=1):
            score = jnp.einsum("bhtk,bhtk->bht", queries, memory.keys, **exact)
            scores.append((score + bias[None, :, None, last - slot])[..., None])
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1)
        weights = weights.astype(queries.dtype)
        mixed = jnp.einsum("bhtl,bhlk->bthk", weights[..., :size], shared.values)
        for slot, memory in enumerate(own):
            chain = jnp.swapaxes(weights[..., size + slot, None] * memory.values, 1, 2)
            mixed = mixed + chain
        return mixed.reshape(*mixed.shape[:2], -1)


def _check_taps(taps: Any, depth: int) -> tuple[int, ...]:
    listed = taps if isinstance(taps, list | tuple) else ()
    whole = all(is_whole(tap) for tap in listed)
    if (
        not listed
        or not whole
        or list(listed) != sorted(set(listed))
        or not 0 <= listed[0] <= listed[-1] < depth
    ):
        raise InputError(
            f"eagle's taps is {taps!r}: rising numbers of the target's decoder layers, "
            f"0 to {depth - 1}"
        )
    return tuple(listed)
