"""Rules that do not keep the target's law, and say so: `lossless` is False."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Float

from specjax.errors import InputError
from specjax.sampling import draw, residual
from specjax.types import DraftBlock, Noise
from specjax.verify.base import (
    Scored,
    Verifier,
    VerifyOutput,
    draft_row,
    first_failure,
    law_of,
    pad_one,
    uniforms,
)


@struct.dataclass
class Typical:
    """Settings of `typical_rule`.

    Attributes:
        epsilon: a token this probable always stands.
        delta: times exp(-entropy): the bar where the law is flat.
    """

    epsilon: Float[Array, ""] | np.float32 | float = 0.3
    delta: Float[Array, ""] | np.float32 | float = 0.09


def lenient_rule(
    noise: Noise, block: DraftBlock, scored: Scored, lenience: Array | np.float32
) -> VerifyOutput:
    """Leviathan et al. 2023, A.5: q counts `lenience` times in the test of acceptance.

    A token then comes out with at most 1 / lenience of its probability; rare tokens may
    vanish. Greedily a draft stands whose probability is at least `lenience` times the
    largest (the paper prints the inequality the other way round). At 1 both are
    lossless.
    """
    gamma, vocab_size = block.tokens.shape[0], scored.logits.shape[-1]
    if scored.law.ids is not None and scored.law.ids.shape[-1] == 1:
        best = scored.law.ids[:, 0]
        logits = scored.logits[:gamma]
        drafted = jnp.take_along_axis(logits, block.tokens[:, None], axis=-1)[:, 0]
        largest = jnp.take_along_axis(logits, best[:gamma, None], axis=-1)[:, 0]
        near = drafted - largest >= jnp.log(lenience)
        number = first_failure(near, block)
        return VerifyOutput(num_accepted=number, next_token=best[number])
    p = scored.law.at(pad_one(block.tokens))[:gamma]
    drawn = lenience * law_of(block).at(block.tokens)
    number = first_failure(uniforms(noise, gamma) * drawn < p, block)
    target = scored.law.row(number, vocab_size)
    weights = residual(target, draft_row(block, number, vocab_size))
    token = draw(noise.key(0, number + 1), weights)
    return VerifyOutput(num_accepted=number, next_token=token)


def typical_rule(
    noise: Noise, block: DraftBlock, scored: Scored, params: Typical
) -> VerifyOutput:
    """Medusa's typical acceptance (Cai et al. 2024, arXiv:2401.10774).

    A draft stands where p(x) > min(epsilon, delta exp(-H(p))), whatever it was drawn
    from; the first that does not is replaced by a draw from p.
    """
    gamma, vocab_size = block.tokens.shape[0], scored.logits.shape[-1]
    laws = scored.law.dense(vocab_size)[:gamma]
    entropy = jnp.sum(jax.scipy.special.entr(laws), axis=-1)
    bar = jnp.minimum(params.epsilon, params.delta * jnp.exp(-entropy))
    p = scored.law.at(pad_one(block.tokens))[:gamma]
    number = first_failure(p > bar, block)
    weights = scored.law.row(number, vocab_size)
    token = draw(noise.key(0, number + 1), weights)
    return VerifyOutput(num_accepted=number, next_token=token)


def lenient(lenience: float) -> Verifier:
    """Accepts more than the target's law allows: see `lenient_rule`.

    Args:
        lenience: in (0, 1]; 1 is lossless, and the smaller the laxer.

    Raises:
        InputError: lenience is outside (0, 1].
    """
    if not 0 < np.float32(lenience) <= 1:
        raise InputError(
            f"lenience is {lenience}: above 0 and at most 1, where nothing is lost"
        )
    return Verifier(lenient_rule, params=np.float32(lenience), lossless=False)


def typical(epsilon: float = 0.3, delta: float = 0.09) -> Verifier:
    """Accepts whatever the target finds typical: see `typical_rule`.

    Args:
        epsilon: above 0 and at most 1.
        delta: above 0.

    Raises:
        InputError: a number outside these.
    """
    if not (0 < np.float32(epsilon) <= 1 and 0 < np.float32(delta) < math.inf):
        raise InputError(
            f"epsilon is {epsilon} and delta {delta}: epsilon must be above 0 and at "
            "most 1, delta a number above 0"
        )
    params = Typical(epsilon=np.float32(epsilon), delta=np.float32(delta))
    return Verifier(typical_rule, params=params, needs_law=False, lossless=False)
