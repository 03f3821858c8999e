"""Heads on the target's last hidden state, one per place ahead (Cai et al. 2024)."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import Committed, SlotLogits, check_known
from specjax.drafters.slots import check_slots, draft_slots
from specjax.errors import InputError, is_whole
from specjax.models import narrow
from specjax.models.base import Encoded, EncoderDecoder
from specjax.models.dense import dense
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise

_EPS = 1e-6


@struct.dataclass
class MedusaState:
    """What the target has said last.

    Attributes:
        hidden: ``[B, D]`` its hidden state of the token before the last committed one.
        known: ``bool[B]`` whether it has said anything yet.
    """

    hidden: Float[Array, "B D"]
    known: Bool[Array, " B"]


@struct.dataclass
class MedusaDrafter:
    """Drafts a block from one hidden state of the target, without a pass of its own.

    Cai et al. 2024 (arXiv:2401.10774); for whole blocks Stern et al. 2018
    (arXiv:1811.03115). When a block is drafted, the target has not been fed the last
    committed token yet: that one is its own correction or bonus, drawn from its head at
    the token before. So the newest hidden state is of the place before the last
    committed token, the target's own head is head 0, and head k (from 1) says what
    stands k places after the last committed token without having seen that. A row's
    first block is empty: its target has said nothing yet.

    Head k gives ``h + silu(W_k h)``, h the hidden state after a norm of the drafter's
    own, and then the target's vocabulary projection, or one of low rank.

    Attributes:
        scale: of the norm.
        heads: W of each head.
        down: of the low-rank projection; None: the target's head serves.
        up: of the same.
        tap: the target's layer that is read (static).
        slots: one of `slots.SLOTS` (static). "argmax" has a one-hot law: a token is
            accepted with the target's probability of it, at any temperature.
    """

    scale: Float[Array, " D"]
    heads: Float[Array, "K D D"]
    down: Float[Array, "R D"] | None
    up: Float[Array, "V R"] | None
    tap: int = struct.field(pytree_node=False)
    slots: str = struct.field(pytree_node=False, default="argmax")

    kind: ClassVar[str] = "medusa"
    has_law: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> MedusaDrafter:
        """Heads that all say what the target's own head says.

        Args:
            target: a T5, whose final norm and, for a low rank, head are copied.
            settings: ``heads``, most tokens of a block (4); ``rank`` of an own
                vocabulary projection, 0 for the target's (0); ``tap``, a layer of the
                target (its last); ``width``, how much of its hidden state is read (all
                of it); ``slots``, one of `slots.SLOTS` ("argmax").
            key: not used: nothing is random.

        Raises:
            InputError: a setting that is not known or means nothing.
        """
        config = target.config
        usual = {
            "heads": 4,
            "rank": 0,
            "tap": config.num_decoder_layers - 1,
            "width": config.d_model,
            "slots": "argmax",
        }
        own = usual | settings
        least = {
            "heads": (1, None),
            "rank": (0, own["width"]),
            "tap": (0, config.num_decoder_layers - 1),
            "width": (1, config.d_model),
        }
        check_known(settings, usual, cls.kind)
        for name, (low, high) in least.items():
            value = own[name]
            whole = is_whole(value)
            if not whole or value < low or (high is not None and value > high):
                wanted = f"{low} or more" if high is None else f"{low} to {high}"
                raise InputError(f"medusa's {name} is {value!r}: {wanted}")
        check_slots(own["slots"])
        width, rank = own["width"], own["rank"]
        down = up = None
        if rank:
            # The nearest of that rank to the target's.
            left, sizes, right = jnp.linalg.svd(
                _head(target, width).astype(jnp.float32), full_matrices=False
            )
            sizes = sizes * _head_scale(target, width)
            up = (left[:, :rank] * sizes[None, :rank]).astype(target.dtype)
            down = right[:rank].astype(target.dtype)
        return cls(
            scale=jnp.array(target.decoder_norm.scale[...][:width], copy=True),
            heads=jnp.zeros((own["heads"], width, width), target.dtype),
            down=down,
            up=up,
            tap=own["tap"],
            slots=own["slots"],
        )

    def settings(self) -> dict[str, Any]:
        """See `create`."""
        return {
            "heads": self.heads.shape[0],
            "rank": 0 if self.down is None else self.down.shape[0],
            "tap": self.tap,
            "width": self.scale.shape[0],
            "slots": self.slots,
        }

    @property
    def taps(self) -> tuple[int, ...]:
        """One layer."""
        return (self.tap,)

    @property
    def samples(self) -> bool:
        """What is chosen is not drawn."""
        return self.slots == "sampled"

    def nodes(self, gamma: int) -> int:
        """A chain.

        Raises:
            InputError: it is longer than there are heads, or `slots` is unknown.
        """
        heads = self.heads.shape[0]
        if gamma > heads:
            raise InputError(
                f"gamma is {gamma} and the medusa drafter has {heads} heads: at most "
                "one token per head can be drafted"
            )
        check_slots(self.slots)
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
    ) -> MedusaState:
        """Nothing is known yet."""
        batch, width = inputs.shape[0], self.scale.shape[0]
        return MedusaState(
            hidden=jnp.zeros((batch, width), self.scale.dtype),
            known=jnp.zeros(batch, bool),
        )

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: MedusaState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, MedusaState]:
        """All heads at once; tokens are then chosen, or drawn, one after another."""
        self.nodes(gamma)
        logits = self._logits(target, state.hidden[:, None], gamma)[:, 0]
        block = draft_slots(
            logits,
            self.slots,
            noise=noise,
            tokens=tokens,
            length=length,
            sampling=sampling,
            vocab_size=target.vocab_size,
        )
        return block.replace(length=jnp.where(state.known, gamma, 0)), state

    def commit(self, state: MedusaState, committed: Committed) -> MedusaState:
        """Keeps the hidden state of the last token that the target was fed and kept."""
        width, last = self.scale.shape[0], committed.num_accepted[:, None, None]
        hidden = committed.features[0][..., :width].astype(state.hidden.dtype)
        return state.replace(
            hidden=jnp.take_along_axis(hidden, last, axis=1)[:, 0],
            known=jnp.ones_like(state.known),
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
        """Every anchor but the first, which has no hidden state before it.

        Raises:
            InputError: there are more or fewer heads than slots.
        """
        heads = self.heads.shape[0]
        if gamma != heads:
            raise InputError(
                f"gamma is {gamma} and the medusa drafter has {heads} heads: it is "
                "trained on blocks of one token per head"
            )
        hidden = features[0][:, :-1, : self.scale.shape[0]]
        return SlotLogits.of_blocks(self._logits(target, hidden, gamma), first=1)

    def _logits(
        self, target: EncoderDecoder, hidden: Float[Array, "B T D"], gamma: int
    ) -> Float[Array, "B T G V"]:
        """What the first heads say at hidden states of the target."""
        wide = hidden.astype(jnp.float32)
        size = jnp.sqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPS)
        normed = (wide / size).astype(self.scale.dtype) * self.scale[None, None]
        added = jax.nn.silu(dense(normed, self.heads[:gamma]))
        ahead = normed[..., None, :] + added
        if self.down is None or self.up is None:
            return narrow.head_logits(target, ahead)
        return dense(dense(ahead, self.down), self.up, jnp.float32)


def _head(target: Any, width: int) -> Float[Array, "V D"]:
    """The first columns of a T5's vocabulary projection: all that a narrow one had."""
    return (target.embedding if target.head is None else target.head)[...][:, :width]


def _head_scale(target: Any, width: int) -> float:
    return width**-0.5 if target.config.scaled_head else 1.0
