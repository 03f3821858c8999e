"""How far a draft's laws are from a target's: what distillation makes smaller.

All of them are sums over the positions of a text of a divergence between the target's
next-token law p and the draft's q. Zhou et al. 2024 (DistillSpec, arXiv:2310.08461)
compare the first four for speculative decoding; which is best depends on the task and
on how tokens are drawn.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax import errors

LogLaw = Float[Array, "*N V"]


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Which divergence, between which laws. Hashable, so that it can be static.

    Attributes:
        name: one of `NAMES`.
        beta: weight of p in the mixture of "jsd", in (0, 1).
        decay: of "lk_hybrid": the KL's weight is exp(-decay * alpha).
        target_temperature: the target's logits are divided by it, > 0.
        draft_temperature: the same for the draft.
    """

    name: str = "forward_kl"
    beta: float = 0.5
    decay: float = 3.0
    target_temperature: float = 1.0
    draft_temperature: float = 1.0


@struct.dataclass
class DistillLoss:
    """Sums over the tokens of a batch.

    Attributes:
        loss: the divergence.
        alpha: sum min(p, q) at temperature 1, whatever the loss compares: the chance
            that a draft of that position is accepted. Padding of the vocabulary that
            both models have counts with the rest.
        tokens: tokens that count.
    """

    loss: Float[Array, ""]
    alpha: Float[Array, ""]
    tokens: Float[Array, ""]


def _kl(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    # Where p is 0 the summand is 0, whatever q is.
    p = jnp.exp(log_p)
    return jnp.sum(jnp.where(p > 0, p * (log_p - log_q), 0.0), axis=-1)


def _overlap(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    return jnp.sum(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)), axis=-1)


def _forward_kl(log_p: jax.Array, log_q: jax.Array, how: Divergence) -> jax.Array:
    return _kl(log_p, log_q)


def _reverse_kl(log_p: jax.Array, log_q: jax.Array, how: Divergence) -> jax.Array:
    return _kl(log_q, log_p)


def _jsd(log_p: jax.Array, log_q: jax.Array, how: Divergence) -> jax.Array:
    """beta KL(p | m) + (1 - beta) KL(q | m) with m = beta p + (1 - beta) q."""
    beta = how.beta
    log_m = jnp.logaddexp(log_p + jnp.log(beta), log_q + jnp.log1p(-beta))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _total_variation(log_p: jax.Array, log_q: jax.Array, how: Divergence) -> jax.Array:
    """Half the sum of |p - q|, which is 1 - alpha: the direct objective."""
    return 0.5 * jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q)), axis=-1)


def _lk(log_p: jax.Array, log_q: jax.Array, how: Divergence) -> jax.Array:
    """-log alpha: total variation's gradient over alpha, which is not lost early."""
    return -jnp.log(jnp.maximum(_overlap(log_p, log_q), jnp.finfo(jnp.float32).tiny))


def _lk_hybrid(log_p: jax.Array, log_q: jax.Array, how: Divergence) -> jax.Array:
    """KL while alpha is small, total variation as it grows."""
    alpha = jax.lax.stop_gradient(_overlap(log_p, log_q))
    weight = jnp.exp(-how.decay * alpha)
    direct = _total_variation(log_p, log_q, how)
    return weight * _kl(log_p, log_q) + (1 - weight) * direct


_RULES: Mapping[str, Callable[[jax.Array, jax.Array, Divergence], jax.Array]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
    "total_variation": _total_variation,
    "lk": _lk,
    "lk_hybrid": _lk_hybrid,
}
# The cross entropy of the texts themselves, which are then best the target's own: Kim
# and Rush 2016 (arXiv:1606.07947).
SEQUENCE = "sequence"
NAMES = (*_RULES, SEQUENCE)


def check_divergence(divergence: Divergence, name: str) -> None:
    """Refuses settings that mean nothing.

    Args:
        divergence: the settings.
        name: how the caller names them, for the message.

    Raises:
        errors.InputError: naming the first that is wrong.
    """
    if divergence.name not in NAMES:
        raise errors.InputError(
            f"{name}.name is {divergence.name!r}: it must be one of {', '.join(NAMES)}"
        )
    if not 0 < divergence.beta < 1:
        raise errors.InputError(f"{name}.beta is {divergence.beta}: between 0 and 1")
    if not 0 <= divergence.decay < math.inf:
        raise errors.InputError(
            f"{name}.decay is {divergence.decay}: a number, at least 0"
        )
    for field in ("target_temperature", "draft_temperature"):
        if not 0 < getattr(divergence, field) < math.inf:
            raise errors.InputError(
                f"{name}.{field} is {getattr(divergence, field)}: a number above 0"
            )
    for field in unread(divergence.name):
        value, default = getattr(divergence, field), getattr(Divergence(), field)
        if value != default:
            raise errors.InputError(
                f"{name}.{field} is {value}, and {name}.name {divergence.name} does "
                f"not read it: leave it at {default}, its default"
            )


def unread(name: str) -> tuple[str, ...]:
    """The settings of `Divergence` that the one of this name does not read."""
    readers = {
        "beta": ("jsd",),
        "decay": ("lk_hybrid",),
        "target_temperature": tuple(_RULES),
    }
    return tuple(field for field, names in readers.items() if name not in names)


def distill_loss(
    target_logits: Float[Array, "B T V"],
    draft_logits: Float[Array, "B T W"],
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    divergence: Divergence,
) -> DistillLoss:
    """The divergence at every position of a text, summed over those of `mask`.

    Args:
        target_logits: raw; no gradient flows into them.
        draft_logits: raw. Where one model has more rows than the other, the rows that
            both have are compared: the rest is padding of the vocabulary.
        targets: the texts, which "sequence" alone reads.
        mask: True at real tokens.
        divergence: see `Divergence`.
    """
    each, alpha = position_losses(target_logits, draft_logits, targets, divergence)
    weights = mask.astype(jnp.float32)
    return DistillLoss(
        loss=jnp.sum(each * weights),
        alpha=jnp.sum(alpha * weights),
        tokens=jnp.sum(weights),
    )


def position_losses(
    target_logits: Float[Array, "B T V"],
    draft_logits: Float[Array, "B T W"],
    targets: Int[Array, "B T"],
    divergence: Divergence,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """The divergence at every position, and alpha there, as `DistillLoss` has them.

    Args:
        target_logits: see `distill_loss`, as for the other arguments.
    """
    both = min(target_logits.shape[-1], draft_logits.shape[-1])

    def log_law(logits: jax.Array, temperature: float) -> jax.Array:
        scaled = logits[..., :both].astype(jnp.float32) / temperature
        return jax.nn.log_softmax(scaled, axis=-1)

    log_p = log_law(jax.lax.stop_gradient(target_logits), divergence.target_temperature)
    log_q = log_law(draft_logits, divergence.draft_temperature)
    if divergence.name == SEQUENCE:
        each = -jnp.take_along_axis(log_q, targets[..., None], axis=-1)[..., 0]
    else:
        each = _RULES[divergence.name](log_p, log_q, divergence)
    plain = log_law(target_logits, 1.0), log_law(draft_logits, 1.0)
    return each, jax.lax.stop_gradient(_overlap(*plain))
