"""What a drafter must offer: memory made once, a draft per step, a commit per step."""

from __future__ import annotations

from typing import Any, Protocol

import jax
from flax import struct
from jaxtyping import Array, Bool, Int

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
    """

    tokens: Int[Array, "B L"]
    length: Int[Array, " B"]
    num_accepted: Int[Array, " B"]
    features: tuple[jax.Array, ...] = ()
    path: Int[Array, "B G"] | None = None


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
