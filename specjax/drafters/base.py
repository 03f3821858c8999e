"""What a drafter must offer: memory made once, a draft per step, a commit per step."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.errors import InputError
from specjax.models.base import Encoded, EncoderDecoder
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise

DraftState = Any


@struct.dataclass
class Committed:
    """One step's result, as the drafter is told it.

    Attributes:
        tokens: ``int32[B, L]`` the buffer with the new tokens written.
        length: ``int32[B]`` valid tokens; ``tokens[b, length[b] - 1]`` is the last one.
        num_accepted: ``int32[B]`` drafted tokens that stood.
        features: one ``[B, G + 1, D]`` per tap, of the tokens that the target was fed
            (last committed, d_1 .. d_G); the first ``num_accepted + 1`` are valid.
        path: ``int32[B, G]`` nodes of a tree that stood; None: a chain's own order.
        done: ``bool[B]`` rows that have ended, whose further drafts nobody reads; None:
            not said.
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    features: tuple[jax.Array, ...] = ()
    path: Int[Array, "B G"] | None = None
    done: Bool[Array, " B"] | None = None


class Drafter(Protocol):
    """The contract of all drafters: a frozen pytree.

    It holds no array of the target, which is passed in, so that there is one copy with
    one owner.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose output `commit` wants; () for none."""
        ...

    @property
    def trees(self) -> bool:
        """Whether blocks are trees, with `parents`; else chains."""
        ...

    # A drafter of trees has also `siblings`, one of `types.SIBLINGS`.

    def nodes(self, gamma: int) -> int:
        """N: drafted tokens of a block, none of them deeper than `gamma`."""
        ...

    @property
    def has_law(self) -> bool:
        """Whether blocks carry the law of their tokens."""
        ...

    @property
    def samples(self) -> bool:
        """Whether the drafter reads `sampling` (a copying drafter does not)."""
        ...

    def init(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        prefix: Int[Array, "B P"],
        length: Int[Array, " B"],
        size: int,
    ) -> DraftState:
        """Memory for decoding these sources after these prefixes.

        Args:
            target: the target model.
            encoded: the target's encoder result.
            inputs: source ids.
            mask: True at real source tokens.
            prefix: tokens that stand already.
            length: real tokens of each prefix, >= 1.
            size: slots of the token buffer.
        """
        ...

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: DraftState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, DraftState]:
        """Proposes up to `gamma` tokens after ``tokens[b, :length[b]]``.

        The token at depth d (from 1) of row b is drawn with ``noise.key(d, d)`` of that
        row.
        """
        ...

    def commit(self, state: DraftState, committed: Committed) -> DraftState:
        """Brings the memory in step with what was accepted."""
        ...


@struct.dataclass
class SlotLogits:
    """What a drafter would draft at many prefixes of texts that stand already.

    Anchor t is the prefix that ends with fed token t, and slot i (from 0) of its block
    the token i + 1 places after it. A slot's chain is whole: where slot i of an anchor
    is here, so are slots 0 .. i - 1.

    Attributes:
        logits: ``float32[B, Q, V]`` raw logits of the draft.
        anchor: ``int32[B, Q]`` whose block; -1: padding, to be left out.
        slot: ``int32[B, Q]`` which token of the block.
    """

    logits: Float[Array, "B Q V"]
    anchor: Int[Array, "B Q"]
    slot: Int[Array, "B Q"]

    @classmethod
    def of_blocks(
        cls,
        logits: Float[Array, "B A G V"],
        *,
        first: int = 0,
        end: int | None = None,
    ) -> SlotLogits:
        """Whole blocks of all anchors from one on.

        Args:
            logits: of each slot of each anchor.
            first: the first anchor.
            end: slots that stand this many places into the text, or more, become
                padding; None: they stay, for whoever judges them to leave out.
        """
        batch, anchors, gamma = logits.shape[:3]
        anchor, slot = jnp.meshgrid(
            jnp.arange(first, first + anchors, dtype=jnp.int32),
            jnp.arange(gamma, dtype=jnp.int32),
            indexing="ij",
        )
        if end is not None:
            anchor = jnp.where(anchor + slot < end, anchor, -1)
        shape = (batch, anchors * gamma)
        return cls(
            logits=logits.reshape(*shape, -1),
            anchor=jnp.broadcast_to(anchor.reshape(1, -1), shape),
            slot=jnp.broadcast_to(slot.reshape(1, -1), shape),
        )


class StoredDrafter(Drafter, Protocol):
    """A drafter with arrays of its own, which `drafters.files` keeps in a folder."""

    kind: ClassVar[str]

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> StoredDrafter:
        """One for this target that is ready to be trained, or has counted nothing.

        Args:
            target: what of it is copied, is copied here.
            settings: what shapes the drafter, of JSON's types; a name it lacks has its
                usual value.
            key: initialises what is random.

        Raises:
            InputError: a setting that is not known or means nothing.
        """
        ...

    def settings(self) -> dict[str, Any]:
        """What `create` needs to make one of this shape; all settings, by name."""
        ...


class TrainableDrafter(StoredDrafter, Protocol):
    """One whose arrays are weights, all of which `training.slots` trains."""

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
        """Teacher forcing: slot i of anchor t may read ``fed[:, : t + 1 + i]``.

        Row r of the target's own logits on `fed` judges slot i of anchor r - i.

        Args:
            target: no gradient flows into it.
            encoded: its encoder's result.
            inputs: source ids.
            mask: True at real source tokens.
            fed: the start token and the text, without its last token.
            features: the target's, of `taps`, ``[B, T, D]`` each.
            key: chooses anchors, drops features, and the like.
            gamma: slots of a block.
        """
        ...


def node_keys(noise: Noise, node: int | Array, depth: int | Array) -> Array:
    """The key of one drafted node, in every row."""
    return jax.vmap(lambda row: row.key(node, depth))(noise)


def check_known(
    settings: Collection[str], known: Collection[str], drafter: str
) -> None:
    """Refuses settings that a drafter has not.

    Args:
        settings: names that are given.
        known: names that it has.
        drafter: how it is named in the message.

    Raises:
        InputError: naming the first of them.
    """
    for name in settings:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"{drafter} has no setting {name!r}: {has}")
