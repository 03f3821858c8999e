"""The target's own first layers as the draft, with a small trained exit."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx, struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import Committed, SlotLogits, check_known
from specjax.drafters.model import ModelDrafter, ModelDraftState
from specjax.errors import InputError, is_whole
from specjax.models import narrow
from specjax.models.base import Cache, DecoderOutput, Encoded, EncoderDecoder
from specjax.models.embedding import look_up
from specjax.models.t5 import T5
from specjax.models.t5_blocks import (
    DecoderBlock,
    Dropout,
    FeedForward,
    RMSNorm,
    empty_memory,
    run_decoder,
)
from specjax.models.t5_config import T5Config
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise

# What stands between the target's layers and the exit's norm.
ADAPTERS = ("none", "feed_forward", "layer")


@struct.dataclass
class EarlyExitDrafter:
    """Drafts token by token with the target's first layers, an exit, and its head.

    The target's embedding, layers and head serve both, and so do its encoder's output
    and its cross-attention's keys and values; the memory of the first layers is the
    drafter's own. LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710) trains the target
    for such exits; an adapter fits one to a target that stays as it is (Kangaroo, Liu
    et al. 2024, arXiv:2404.18911). Of a target that was widened (`models.widen`) it
    reads the old columns.

    Attributes:
        norm: before the head.
        adapter: of the kind that `ADAPTERS` names; None: none.
        config: shape of the target that it was made for (static).
        layers: how many of the target's are run (static).
        rule: ends a row's draft early; None: every block has gamma tokens.
    """

    norm: RMSNorm
    adapter: FeedForward | DecoderBlock | None
    config: T5Config = struct.field(pytree_node=False)
    layers: int = struct.field(pytree_node=False)
    rule: Any = None

    kind: ClassVar[str] = "early_exit"
    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> EarlyExitDrafter:
        """An exit that does nothing yet, or, as a layer, what the target's last does.

        Args:
            target: a T5, whose final norm is copied, and for a layer its last one.
            settings: ``layers``, 1 to the target's but one (half of them, rounded
                down); ``adapter``, one of `ADAPTERS` ("layer"); ``shape``, the
                `T5Config` of the target before it was widened (the target's).
            key: initialises what is not copied: a feed-forward layer, and all of an
                exit of another shape than the target's.

        Raises:
            InputError: a setting that is not known or means nothing.
        """
        config = narrow.made_for(target, settings.get("shape"))
        depth = config.num_decoder_layers
        usual: dict[str, Any] = {
            "layers": depth // 2,
            "adapter": "layer",
            "shape": None,
        }
        check_known(settings, usual, cls.kind)
        own = usual | settings
        layers, name = own["layers"], own["adapter"]
        if not is_whole(layers) or not 1 <= layers < depth:
            raise InputError(
                f"early_exit's layers is {layers!r}: the target has {depth} decoder "
                f"layers, of which 1 to {depth - 1} can draft"
                if depth > 1
                else "the target has one decoder layer: it has no early exit"
            )
        if name not in ADAPTERS:
            raise InputError(
                f"early_exit's adapter is {name!r}: it must be one of "
                f"{', '.join(ADAPTERS)}"
            )
        adapter: FeedForward | DecoderBlock | None = None
        if name == "layer":
            adapter = narrow.copy_layer(target, depth - 1, config, key)
        elif name == "feed_forward":
            random = FeedForward(config, key)
            # It starts as the identity.
            random.wo = nnx.Param(jnp.zeros_like(random.wo[...]))
            adapter = jax.tree.map(lambda x: x.astype(target.dtype), random)
        return cls(
            norm=narrow.copy_norm(target, config),
            adapter=adapter,
            config=config,
            layers=layers,
        )

    def settings(self) -> dict[str, Any]:
        """See `create`."""
        names = {type(None): "none", FeedForward: "feed_forward", DecoderBlock: "layer"}
        return {
            "layers": self.layers,
            "adapter": names[type(self.adapter)],
            "shape": dataclasses.asdict(self.config),
        }

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
        """Feeds the prefixes.

        Raises:
            InputError: the target is none that the exit fits.
        """
        return self._drafter(target).init(
            target, encoded, inputs, mask, prefix, length, size
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
        """As a model of its own would draft: see `ModelDrafter`."""
        return self._drafter(target).draft(
            target, noise, state, tokens, length, gamma=gamma, sampling=sampling
        )

    def commit(self, state: ModelDraftState, committed: Committed) -> ModelDraftState:
        """Rolls the memory back: see `ModelDrafter`."""
        return ModelDrafter(None, rule=self.rule).commit(state, committed)

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
        """All anchors; slot i of anchor t is slot 0 of anchor t + i."""
        model = self._drafter(target).model
        output, _ = model.decode(fed, None, model.encode_shared(encoded))
        size = fed.shape[1]
        row = jnp.arange(size)[:, None] + jnp.arange(gamma)[None]
        logits = output.logits[:, jnp.minimum(row, size - 1)]
        return SlotLogits.of_blocks(logits, end=size)

    def _drafter(self, target: Any) -> ModelDrafter:
        """What drafts, which lives within a call alone: it holds the target."""
        narrow.check_width(target, self.config.d_model)
        return ModelDrafter(ExitModel(exit=self, target=target), rule=self.rule)


@struct.dataclass
class ExitModel:
    """A target as far as an exit: a draft model that shares its encoder.

    Attributes:
        exit: where it ends.
        target: the whole.
    """

    exit: EarlyExitDrafter
    target: T5

    shares_encoder: ClassVar[bool] = True

    @property
    def vocab_size(self) -> int:
        """The target's."""
        return self.target.vocab_size

    def encode_shared(self, encoded: Encoded) -> Encoded:
        """The target's result, with cross-attention's keys and values as needed here.

        Args:
            encoded: the target's.
        """
        own = self.target.config
        blocks, adapter = self.target.decoder[: self.exit.layers], self.exit.adapter
        cross = (encoded.cross or ())[: len(blocks)] or tuple(
            block.cross.keys_values(encoded.hidden, own.num_heads) for block in blocks
        )
        if isinstance(adapter, DecoderBlock):
            hidden = encoded.hidden[..., : self.exit.config.d_model]
            heads = self.exit.config.num_heads
            cross += (adapter.cross.keys_values(hidden, heads),)
        return encoded.replace(cross=cross)

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """An empty cache of the layers that are run, the adapter's last."""
        room = (batch_size, size, self.target.dtype)
        memory = empty_memory(self.target.config, self.exit.layers, *room)
        if isinstance(self.exit.adapter, DecoderBlock):
            memory += empty_memory(self.exit.config, 1, *room)
        return Cache(memory=memory, length=jnp.zeros(batch_size, jnp.int32))

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None,
        encoded: Encoded,
        *,
        taps: tuple[int, ...] = (),
    ) -> tuple[DecoderOutput, Cache | None]:
        """See `T5.decode`; -1, the state after the exit's norm, is the only tap.

        Args:
            tokens: ids to feed.
            cache: memory of what was fed before; None: teacher forcing.
            encoded: from `encode_shared`.
            taps: () or (-1,).
        """
        target, layers, adapter = self.target, self.exit.layers, self.exit.adapter
        below, above = _split(cache, layers)
        x = look_up(target.embedding[...], tokens)
        outputs, below = run_decoder(
            target.decoder[:layers],
            target.config,
            x,
            below,
            encoded.cross[:layers],
            encoded.mask,
        )
        x = outputs[-1][..., : self.exit.config.d_model]
        if isinstance(adapter, DecoderBlock):
            (x,), above = run_decoder(
                [adapter],
                self.exit.config,
                x,
                above,
                encoded.cross[layers:],
                encoded.mask,
            )
        elif adapter is not None:
            x = adapter(x, Dropout(None, 0.0))
        hidden: Float[Array, "B T D"] = self.exit.norm(x)
        output = DecoderOutput(
            logits=narrow.head_logits(target, hidden), features=(hidden,) * len(taps)
        )
        if below is None or above is None:
            return output, None
        return output, below.replace(memory=below.memory + above.memory)


def _split(cache: Cache | None, layers: int) -> tuple[Cache | None, Cache | None]:
    """The memory of the target's layers, and the adapter's."""
    if cache is None:
        return None, None
    parts = cache.memory[:layers], cache.memory[layers:]
    return cache.replace(memory=parts[0]), cache.replace(memory=parts[1])
