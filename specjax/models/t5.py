"""T5 and its family (1.0, 1.1, LM-adapted, FLAN, mT5, ByT5, umT5) in Flax NNX.

Position lives in the relative bias alone, never in the keys.

Raffel et al. 2020 (arXiv:1910.10683); Shazeer 2020 (arXiv:2002.05202) for gated layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import InputError
from specjax.models.base import Cache, DecoderOutput, Encoded
from specjax.models.dense import dense
from specjax.models.embedding import look_up
from specjax.models.t5_bias import MASKED, relative_position_bucket
from specjax.models.t5_blocks import (
    DecoderBlock,
    Dropout,
    EncoderBlock,
    KeysValues,
    RMSNorm,
    attend,
    empty_memory,
    normal,
    run_decoder,
    write,
)
from specjax.models.t5_config import T5Config


class T5(nnx.Module):
    """A T5 encoder-decoder. Owns the embedding, which a tied head shares.

    With ``config.encoder_width`` it is a draft that shares its target's encoder: it has
    a projection in the place of an encoder, and `encode_shared` in that of `encode`.

    Args:
        config: the shape.
        key: initialises the parameters.
    """

    def __init__(self, config: T5Config, key: Key[Array, ""]):
        self.config = config
        keys = jax.random.split(key, 4)
        width = config.d_model
        self.embedding = normal(keys[0], (config.vocab_size, width), 1.0)
        encoder_keys = jax.random.split(keys[1], config.num_encoder_layers)
        decoder_keys = jax.random.split(keys[2], config.num_decoder_layers)
        self.encoder = nnx.List(
            EncoderBlock(config, k, i == 0 or config.bias_per_layer)
            for i, k in enumerate(encoder_keys)
        )
        self.decoder = nnx.List(
            DecoderBlock(config, k, i == 0 or config.bias_per_layer)
            for i, k in enumerate(decoder_keys)
        )
        read = config.encoder_width
        self.encoder_norm = RMSNorm(config) if read is None else None
        self.projection = (
            None if read is None else normal(keys[1], (width, read), read**-0.5)
        )
        self.decoder_norm = RMSNorm(config)
        self.head = (
            None
            if config.tied_head
            else normal(keys[3], (config.vocab_size, width), width**-0.5)
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.config.vocab_size

    @property
    def shares_encoder(self) -> bool:
        """Whether it reads a target's encoder and has none of its own."""
        return self.projection is not None

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the parameters and of the activations."""
        return self.embedding[...].dtype

    def encode(
        self,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        *,
        dropout_key: Key[Array, ""] | None = None,
    ) -> Encoded:
        """Encodes sources and projects the cross-attention keys and values, once.

        Args:
            inputs: source ids.
            mask: True at real tokens. Ids play no part in it: an id 0 inside a source
                is a token like any other.
            dropout_key: trains with dropout when given.

        Raises:
            InputError: the model shares its target's encoder.
        """
        config = self.config
        if self.encoder_norm is None:
            raise InputError(
                "this draft has no encoder of its own: it reads that of a target of "
                f"width {config.encoder_width}, and drafts for one alone"
            )
        dropout = Dropout(dropout_key, config.dropout_rate)
        positions = np.arange(inputs.shape[1])
        buckets = relative_position_bucket(
            positions[None, :] - positions[:, None],
            bidirectional=True,
            num_buckets=config.num_buckets,
            max_distance=config.max_distance,
        )
        invisible = jnp.where(mask, 0.0, MASKED)[:, None, None, :]
        x = dropout(look_up(self.embedding[...], inputs))
        bias = invisible
        for block in self.encoder:
            if block.attention.bias is not None:
                table = block.attention.bias[...].astype(jnp.float32)
                bias = table[buckets].transpose(2, 0, 1)[None] + invisible
            queries, memory = block.attention.project(x, config.num_heads)
            mixed = attend(queries, [(memory, bias)], dropout)
            x = x + dropout(dense(mixed, block.attention.out[...]))
            x = block.feed_forward(x, dropout)
        encoded = Encoded(hidden=dropout(self.encoder_norm(x)), mask=mask)
        return encoded.replace(cross=self._cross(encoded))

    def check_encoder_width(self, width: int) -> None:
        """Refuses a target whose encoder this draft cannot read.

        Args:
            width: of the target.

        Raises:
            InputError: the draft shares its target's encoder, of another width.
        """
        wanted = self.config.encoder_width
        if wanted is not None and wanted != width:
            raise InputError(
                f"the draft reads the encoder of a target of width {wanted}, and this "
                f"target's width is {width}"
            )

    def encode_shared(
        self, encoded: Encoded, *, dropout_key: Key[Array, ""] | None = None
    ) -> Encoded:
        """Projects a target's encoder output; takes the place of `encode`.

        Args:
            encoded: the target's; no gradient flows into it.
            dropout_key: trains with dropout when given.

        Raises:
            InputError: the model has an encoder of its own, or reads another width.
        """
        if self.projection is None:
            raise InputError("this model has an encoder of its own: call encode")
        self.check_encoder_width(encoded.hidden.shape[-1])
        dropout = Dropout(dropout_key, self.config.dropout_rate)
        hidden = jax.lax.stop_gradient(encoded.hidden).astype(self.dtype)
        own = Encoded(
            hidden=dropout(dense(hidden, self.projection[...])), mask=encoded.mask
        )
        return own.replace(cross=self._cross(own))

    def _cross(self, encoded: Encoded) -> tuple[KeysValues, ...]:
        heads = self.config.num_heads
        return tuple(b.cross.keys_values(encoded.hidden, heads) for b in self.decoder)

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """An empty cache of `size` slots per row."""
        layers = len(self.decoder)
        memory = empty_memory(self.config, layers, batch_size, size, self.dtype)
        return Cache(memory=memory, length=jnp.zeros(batch_size, jnp.int32))

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None,
        encoded: Encoded,
        *,
        parents: Int[Array, "B M"] | None = None,
        start: int = 0,
        taps: tuple[int, ...] = (),
        dropout_key: Key[Array, ""] | None = None,
    ) -> tuple[DecoderOutput, Cache | None]:
        """Feeds T tokens per row at that row's own offset.

        Args:
            tokens: ids to feed; token t of row b takes slot ``cache.length[b] + t``.
            cache: memory of what was fed before; None: teacher forcing from an empty
                memory, nothing is kept.
            encoded: from `encode`.
            parents: the fed tokens are nodes `start` and on of a tree (see `trees`):
                each sees the slots before the tree, its ancestors and itself.
            start: static; nodes of the tree that earlier calls have fed.
            taps: static numbers of decoder layers whose output is returned; -1 is the
                hidden state after the final norm.
            dropout_key: trains with dropout when given.

        Raises:
            InputError: a tap names no layer.
        """
        config = self.config
        for tap in taps:
            if not -1 <= tap < config.num_decoder_layers:
                raise InputError(
                    f"tap {tap} names no decoder layer: 0 to "
                    f"{config.num_decoder_layers - 1}, or -1 for the final norm"
                )
        dropout = Dropout(dropout_key, config.dropout_rate)
        outputs, cache = run_decoder(
            self.decoder,
            config,
            dropout(look_up(self.embedding[...], tokens)),
            cache,
            encoded.cross or self._cross(encoded),
            encoded.mask,
            parents=parents,
            start=start,
            dropout=dropout,
        )
        features = [*outputs, dropout(self.decoder_norm(outputs[-1]))]
        output = DecoderOutput(
            logits=self.logits(features[-1]),
            features=tuple(features[tap] for tap in taps),
        )
        return output, cache

    def keep(
        self, cache: Cache, base: Int[Array, " B"], path: Int[Array, "B G"]
    ) -> Cache:
        """Moves a tree's accepted path together: see `models.base`."""
        places = base[:, None] + path
        targets = base[:, None] + 1 + jnp.arange(path.shape[1], dtype=jnp.int32)[None]

        def move(memory: KeysValues) -> KeysValues:
            taken = jax.tree.map(
                lambda x: jnp.take_along_axis(
                    x, places[:, None, :, None], axis=2, mode="clip"
                ),
                memory,
            )
            return write(memory, taken, targets)

        return cache.replace(memory=tuple(move(memory) for memory in cache.memory))

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """The head's float32 logits of hidden states after the final norm (tap -1)."""
        weight = self.embedding if self.head is None else self.head
        if self.config.scaled_head:
            hidden = hidden * jnp.asarray(self.config.d_model**-0.5, hidden.dtype)
        # Rounded to bfloat16, distinct logits would tie.
        return dense(hidden, weight[...], jnp.float32)
