"""Whole decodes for `experiments.gpu_check`: specjax's loops over made-up decoders."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from experiments.gpu_decoder import SOURCE, Shape, Weights, feed, make_memory
from specjax.decode_state import DecodeOutput
from specjax.decoding import (
    autoregressive_generate,
    speculative_generate,
    speculative_init,
    speculative_step,
)
from specjax.drafters.base import node_keys
from specjax.drafters.model import ModelDrafter, ModelDraftState, catch_up
from specjax.metrics import (
    Difference,
    acceptance_rate,
    block_efficiency,
    differences,
    merge,
    survival,
)
from specjax.models.base import Cache, DecoderOutput, Encoded
from specjax.sampling import Sampling, draw_law, with_arrays
from specjax.types import DraftBlock, Law, Noise

Row = dict[str, Any]

_STARTS = 4  # decodes of batch 1 begin with so many tokens in turn
_ROUNDS = 4  # of a straight loop's body


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("weights", "cross"),
    meta_fields=("shape",),
)
@dataclasses.dataclass(frozen=True)
class Decoder:
    """A `specjax.models.base.EncoderDecoder` without an encoder.

    Attributes:
        weights: of `gpu_decoder.make_weights`, scanned or not.
        cross: keys and values of the source that all rows have.
        shape: of the decoder.
    """

    weights: Weights
    cross: Any
    shape: Shape

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.shape.vocab

    def encode(self, inputs: Any, mask: Any, *, dropout_key: Any = None) -> Encoded:
        """The source that it has, whatever the inputs."""
        del dropout_key
        hidden = jnp.zeros((*inputs.shape, 1), jnp.bfloat16)
        return Encoded(hidden=hidden, mask=mask, cross=self.cross)

    def init_cache(self, batch_size: int, size: int) -> Cache:
        """An empty cache."""
        scanned = isinstance(self.weights["layers"], dict)
        memory = make_memory(self.shape, batch_size, size, scanned)
        return Cache(memory=memory, length=jnp.zeros(batch_size, jnp.int32))

    def decode(
        self, tokens: Any, cache: Cache | None, encoded: Encoded, **rest: Any
    ) -> tuple[DecoderOutput, Cache | None]:
        """Feeds tokens at each row's own offset: chains alone, without taps."""
        if any(own for own in rest.values() if own is not None):
            raise NotImplementedError(f"chains without taps alone, not {rest}")
        own = cache if cache is not None else self.init_cache(*tokens.shape)
        logits, memory = feed(
            self.shape, self.weights, own.memory, encoded.cross, tokens, own.length
        )
        if cache is None:
            return DecoderOutput(logits=logits), None
        length = own.length + tokens.shape[1]
        return DecoderOutput(logits=logits), Cache(memory=memory, length=length)

    def keep(self, cache: Cache, base: Any, path: Any) -> Cache:
        """Of trees, which it does not decode."""
        raise NotImplementedError("chains alone")


@struct.dataclass
class StraightDrafter(ModelDrafter):
    """The same drafts, passes written one after another in place of a loop.

    XLA launches the kernels of a loop's body from the host, one by one; straight-line
    code goes into one graph.
    """

    def draft(
        self,
        target: Any,
        noise: Noise,
        state: ModelDraftState,
        tokens: Any,
        length: Any,
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, ModelDraftState]:
        """`gamma` passes of the model."""
        after = catch_up(self.model, state, tokens, length)
        logits, cache = after.logits, after.memory
        drafted, laws = [], []
        for depth in range(1, gamma + 1):
            law = sampling.law(logits[:, None])
            token = jax.vmap(lambda key, own: draw_law(key, own, 0, target.vocab_size))(
                node_keys(noise, depth, depth), law
            )
            drafted.append(token)
            laws.append(law)
            if depth < gamma:
                output, cache = self.model.decode(token[:, None], cache, state.encoded)
                logits = output.logits[:, 0]
        whole: Law = jax.tree.map(lambda *own: jnp.concatenate(own, axis=1), *laws)
        block = DraftBlock(
            tokens=jnp.stack(drafted, axis=1),
            length=jnp.full_like(length, gamma),
            law=whole,
        )
        return block, state.replace(cache=cache)


@functools.partial(jax.jit, static_argnames=("gamma", "max_length"))
def _straight(
    target: Decoder,
    drafter: Any,
    inputs: Any,
    mask: Any,
    keys: Any,
    prefix: Any,
    sampling: Sampling,
    *,
    gamma: int,
    max_length: int,
) -> DecodeOutput:
    """`speculative_generate` with several rounds in a loop's body."""
    batch = inputs.shape[0]
    encoded, state = speculative_init(
        target,
        drafter,
        inputs,
        mask,
        gamma=gamma,
        max_length=max_length,
        budget=jnp.full(batch, max_length, jnp.int32),
        prefix=prefix,
        prefix_length=jnp.ones(batch, jnp.int32),
    )

    def rounds(state: Any) -> Any:
        for _ in range(_ROUNDS):  # one that has ended writes nothing more
            state = speculative_step(
                target,
                drafter,
                encoded,
                keys,
                state,
                sampling=sampling,
                draft_sampling=sampling,
                gamma=gamma,
                eos_id=-1,
            )
        return state

    state = jax.lax.while_loop(lambda own: jnp.any(~own.done), rounds, state)
    return DecodeOutput(
        tokens=state.tokens[:, :max_length], length=state.length, stats=state.stats
    )


def compare(
    report: Any,
    target: Decoder,
    draft: Decoder,
    *,
    batch: int,
    gamma: int,
    temperature: float | None,
    length: int,
    straight: bool,
) -> Row:
    """Times decodes with and without the draft, and sets their tokens side by side.

    Args:
        report: times calls (`gpu_check.Report`).
        target: its source is for `batch` rows.
        draft: likewise.
        batch: rows.
        gamma: drafted tokens.
        temperature: None: greedy.
        length: of the output.
        straight: drafts and several rounds as straight-line code.
    """
    drafter = (StraightDrafter if straight else ModelDrafter)(draft)
    sampling = with_arrays(Sampling(temperature=temperature))
    inputs = jnp.ones((batch, SOURCE), jnp.int32)
    mask = jnp.ones(inputs.shape, bool)
    keys = jax.random.split(jax.random.key(3), batch)
    # Rows of a batch start differently; single ones do so in turn.
    starts = np.arange(2, 2 + max(batch, _STARTS), dtype=np.int32) % target.vocab_size
    prefixes = [jnp.asarray(own)[:, None] for own in starts.reshape(-1, batch)]

    def plain(prefix: Any) -> DecodeOutput:
        return autoregressive_generate(
            target,
            inputs,
            mask,
            keys,
            sampling=sampling,
            max_length=length,
            prefix=prefix,
            eos_id=-1,
        )

    def speculative(prefix: Any) -> DecodeOutput:
        settings: Row = dict(gamma=gamma, max_length=length)
        if straight:
            return _straight(
                target, drafter, inputs, mask, keys, prefix, sampling, **settings
            )
        return speculative_generate(
            target,
            drafter,
            inputs,
            mask,
            keys,
            sampling=sampling,
            prefix=prefix,
            eos_id=-1,
            **settings,
        )

    times, outputs = {}, {}
    for name, decode in (("plain", plain), ("speculative", speculative)):
        made: list[DecodeOutput] = []

        def call(decode: Any = decode, made: Any = made) -> Any:
            made[:] = [decode(prefix) for prefix in prefixes]
            return made

        times[name] = report.timed(call, 3)
        outputs[name] = made
    stats = merge([own.stats for own in outputs["speculative"]])
    found = {
        "speedup": times["plain"]["seconds"] / times["speculative"]["seconds"],
        "plain": times["plain"],
        "speculative": times["speculative"],
        "tokens": int(jnp.sum(stats.emitted)),
        "tokens_per_call": block_efficiency(stats),
        "acceptance_rate": acceptance_rate(stats),
        "survival": survival(stats),
    }
    if temperature is not None:
        return found
    parted: list[Difference] = []
    compared = 0
    for one, other in zip(outputs["plain"], outputs["speculative"], strict=True):
        report.room()
        own = differences(target, inputs, mask, keys, one, other, sampling=sampling)
        parted += own
        compared += batch * (length - 1) - sum(length - 1 - d.position for d in own)
    return found | {
        "rows": len(starts),
        "rows_that_part": len(parted),
        "tokens_until_then": compared,
        "gaps": sorted(round(own.gap, 6) for own in parted),
    }
