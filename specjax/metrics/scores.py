"""How likely the target finds a text, in one pass over it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from specjax.errors import InputError
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling, check_sampling, with_arrays
from specjax.types import Prefix


def token_log_probs(
    target: EncoderDecoder,
    inputs: Int[Array, "B S"],
    mask: Bool[Array, "B S"],
    tokens: Int[Array, "B L"],
    *,
    sampling: Sampling = Sampling(),  # noqa: B008 (a frozen record)
) -> Float[Array, "B T"]:
    """The log-probability of each token after those before it, by teacher forcing.

    The law is ``sampling.law``: of the target's logits without dead rows, as the
    controls leave them, over the temperature, cut by top-k and top-p. A greedy law is a
    point, which would say nothing: there the temperature counts as 1.

    Args:
        target: the model that judges.
        inputs: source ids.
        mask: True at real source tokens.
        tokens: start token first, as in `DecodeOutput.tokens`.
        sampling: how the target's logits become a law.

    Returns:
        column t is of ``tokens[:, t + 1]``, T = L - 1: those of a prefix and of padding
        too. -inf: the law has not the token, as of a lossy rule, or where rounding
        moves a cut. Needs memory for a few ``float32[B, L, V]``.

    Raises:
        InputError: one column of tokens, or settings that mean nothing.
    """
    if tokens.shape[1] < 2:
        raise InputError(
            f"tokens have {tokens.shape[1]} column: the start token and one more at "
            "least"
        )
    check_sampling(sampling, "sampling", tokens.shape[0])
    return _token_log_probs(target, inputs, mask, tokens, with_arrays(sampling))


@jax.jit
def _token_log_probs(
    target: EncoderDecoder, inputs: Array, mask: Array, tokens: Array, own: Sampling
) -> Array:
    output, _ = target.decode(tokens[:, :-1], None, target.encode(inputs, mask))
    places = jnp.arange(1, tokens.shape[1], dtype=jnp.int32)
    length = jnp.broadcast_to(places, (tokens.shape[0], places.shape[0]))
    if own.temperature is None:
        temperature = jnp.float32(1.0)
    else:
        temperature = jnp.where(own.temperature > 0, own.temperature, 1.0)
    law = own.replace(temperature=temperature).law(
        output.logits, Prefix(tokens=tokens, length=length)
    )
    return jnp.log(law.at(tokens[:, 1:]))
