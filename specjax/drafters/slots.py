"""Blocks whose logits are all known at once: how a token is found for each slot."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from specjax.drafters.chain import Pass, draft_chain
from specjax.errors import InputError
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise

# How the token of a slot is found: the likeliest, which then stands for sure (a one-hot
# law), or drawn. Drawn slots that know nothing of each other's tokens do not fit
# together: at temperature 1 a block of a public drafter had 1.2 accepted tokens where
# argmax had 3 (github.com/z-lab/dflash/issues/169). Noise that the target shares
# (`verify.coupled_verify`) joins them again, and so does a Markov head.
SLOTS = ("argmax", "sampled")


def check_slots(slots: str) -> None:
    """Refuses a way to find tokens that is none of `SLOTS`.

    Raises:
        InputError: it is none.
    """
    if slots not in SLOTS:
        raise InputError(f"slots is {slots!r}: it must be one of {', '.join(SLOTS)}")


def draft_slots(
    logits: Float[Array, "B G V"],
    slots: str,
    *,
    noise: Noise,
    tokens: Int[Array, "B L"],
    length: Int[Array, " B"],
    sampling: Sampling,
    vocab_size: int,
    after: Callable[[Int[Array, " B"]], Float[Array, "B V"]] | None = None,
) -> DraftBlock:
    """Walks over the slots from left to right; see `draft_chain` for the rest.

    Args:
        logits: of every slot.
        slots: one of `SLOTS`.
        noise: of the draft.
        tokens: the committed text.
        length: its valid tokens.
        sampling: of the draft. Of chosen tokens its controls and dead rows hold alone.
        vocab_size: the target's ids.
        after: what a slot's logits gain by the token before it; None: nothing.
    """

    def advance(token: Array, slot: Array) -> Pass:
        own = jax.lax.dynamic_index_in_dim(logits, slot, axis=1, keepdims=False)
        if after is not None:
            own = own + after(token)
        return Pass(own, None, slot + 1)

    if slots == "argmax":
        sampling = sampling.replace(temperature=None, top_k=None, top_p=None)
    block, _, _ = draft_chain(
        Pass(logits[:, 0], None, jnp.array(1, jnp.int32)),
        advance,
        noise=noise,
        tokens=tokens,
        length=length,
        gamma=logits.shape[1],
        sampling=sampling,
        vocab_size=vocab_size,
    )
    return block
