"""Parts of the decoding loops, each run many times in one program: what is timed."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array

from specjax.decode_state import DecodeState
from specjax.decoding import speculative_init, speculative_step
from specjax.drafters.base import Committed, Drafter
from specjax.models.base import Encoded, EncoderDecoder
from specjax.rows import put
from specjax.sampling import Sampling
from specjax.types import DraftBlock, Noise
from specjax.verify import Verifier


@struct.dataclass
class Replay:
    """A drafter that costs nothing: its state is the block, changed a little each time.

    Without a change the compiler could compute parts of the pass once for all steps.
    """

    taps: tuple[int, ...] = struct.field(pytree_node=False, default=())
    trees: bool = struct.field(pytree_node=False, default=False)
    siblings: str | None = struct.field(pytree_node=False, default=None)
    has_law: bool = struct.field(pytree_node=False, default=True)
    samples: bool = struct.field(pytree_node=False, default=True)

    def nodes(self, gamma: int) -> int:
        return gamma

    def init(self, *arguments: Any) -> Any:
        return None

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: DraftBlock,
        tokens: Array,
        length: Array,
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, DraftBlock]:
        other = (state.tokens + 1) % target.vocab_size
        return state, state.replace(tokens=other)

    def commit(self, state: DraftBlock, committed: Committed) -> DraftBlock:
        return state


@functools.partial(jax.jit, static_argnames=("gamma", "max_length"))
def prepare(
    target: EncoderDecoder,
    drafter: Drafter,
    inputs: Array,
    mask: Array,
    keys: Array,
    *,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
    max_length: int,
) -> tuple[Encoded, DecodeState, DraftBlock]:
    """The state before the first step, and a block to verify."""
    batch = inputs.shape[0]
    encoded, state = speculative_init(
        target,
        drafter,
        inputs,
        mask,
        gamma=gamma,
        max_length=max_length,
        budget=jnp.full(batch, max_length, jnp.int32),
        prefix=jnp.zeros((batch, 1), jnp.int32),
        prefix_length=jnp.ones(batch, jnp.int32),
    )
    block, _ = drafter.draft(
        target,
        Noise(keys=keys, start=state.length - 1),
        state.draft_state,
        state.tokens,
        state.length,
        gamma=gamma,
        sampling=draft_sampling,
    )
    return encoded, state, block


@functools.partial(jax.jit, static_argnames="gamma")
def verify_steps(
    target: EncoderDecoder,
    drafter: Drafter,
    encoded: Encoded,
    keys: Array,
    state: DecodeState,
    block: DraftBlock,
    count: Array,
    *,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
) -> DecodeState:
    """`count` steps of the speculative loop with a draft that costs nothing."""

    def step(_: Array, state: DecodeState) -> DecodeState:
        return speculative_step(
            target,
            Replay(
                taps=drafter.taps,
                trees=drafter.trees,
                siblings=getattr(drafter, "siblings", None),
            ),
            encoded,
            keys,
            state,
            verifier=verifier,
            sampling=sampling,
            draft_sampling=draft_sampling,
            gamma=gamma,
            eos_id=jnp.int32(-1),
        )

    return jax.lax.fori_loop(0, count, step, state.replace(draft_state=block))


@functools.partial(jax.jit, static_argnames="gamma")
def draft_steps(
    target: EncoderDecoder,
    drafter: Drafter,
    encoded: Encoded,
    keys: Array,
    state: DecodeState,
    count: Array,
    *,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling,
    gamma: int,
) -> Any:
    """`count` drafts and commits; each starts from a token of the one before."""
    rows = state.length.shape[0]
    fed = jnp.zeros((rows, gamma + 1), jnp.int32)
    output, _ = target.decode(fed, state.cache, encoded, taps=drafter.taps)
    path = jnp.zeros((rows, gamma), jnp.int32) if drafter.trees else None

    def step(index: Array, carry: Any) -> Any:
        tokens, draft_state, used = carry
        folded = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, index)
        block, draft_state = drafter.draft(
            target,
            Noise(keys=folded, start=state.length - 1),
            draft_state,
            tokens,
            state.length,
            gamma=gamma,
            sampling=draft_sampling,
        )
        # All tokens and laws are read, or the compiler would drop some.
        last = jnp.max(block.tokens, axis=-1)
        committed = Committed(
            tokens=put(tokens, state.length - 1, last),
            length=state.length,
            num_accepted=jnp.zeros_like(state.length),
            features=output.features,
            path=path,
        )
        draft_state = drafter.commit(draft_state, committed)
        if block.law is not None:  # of a tree: fewer rows than tokens
            some = block.tokens[:, : block.law.probs.shape[1]]
            used = used + jnp.sum(block.law.at(some), axis=-1)
        return committed.tokens, draft_state, used

    used = jnp.zeros(rows, jnp.float32)
    return jax.lax.fori_loop(0, count, step, (state.tokens, state.draft_state, used))
