"""From logits to the law that a token is drawn from, and the draw itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key

from specjax.controls import (
    Control,
    apply_control,
    check_control,
    control_rows,
    with_fixed_types,
)
from specjax.errors import InputError
from specjax.types import Law, Prefix

Number = float | int | Array | None

_HOTTEST = 1e30


@struct.dataclass
class Sampling:
    """How logits become a law: controls, temperature, top-k, top-p, in this order.

    Numbers are traced (a new value compiles nothing) and are scalars or ``[B]``; what
    is None is absent from the program.

    Attributes:
        temperature: None: greedy, with neither a sort nor random bits. A traced 0 gives
            the same tokens.
        top_k: keep the k most probable ids, ties in order of id. None: off.
        top_p: keep the smallest most-probable set whose mass reaches top_p. None: off.
        controls: edits that depend on the prefix (`specjax.controls`). They run at
            every drafted position and on both models, so that p and q stay the laws in
            use.
        num_tokens: static; ids from here on are dead rows of the vocabulary (padding of
            the embedding to a round size) and get probability 0. None: no dead rows.
    """

    temperature: Number = 1.0
    top_k: Number = None
    top_p: Number = None
    controls: tuple[Control, ...] = ()
    num_tokens: int | None = struct.field(pytree_node=False, default=None)

    @property
    def greedy(self) -> bool:
        """Whether the law is a point mass by construction."""
        return self.temperature is None

    def edited(
        self, logits: Float[Array, "B T V"], prefix: Prefix | None = None
    ) -> Float[Array, "B T V"]:
        """The logits without dead rows and as the controls leave them.

        Args:
            logits: as of `law`.
            prefix: as of `law`.

        Raises:
            InputError: there are controls and no prefix.
        """
        logits = mask_dead_rows(logits, self.num_tokens)
        for control in self.controls:
            if prefix is None:
                raise InputError(
                    "sampling.controls read the prefix, and this drafter or caller "
                    "gives none: drop the controls or use another drafter"
                )
            logits = apply_control(control, logits, prefix)
        return logits

    def law(self, logits: Float[Array, "B T V"], prefix: Prefix | None = None) -> Law:
        """The laws after each of T positions.

        Args:
            logits: float32 raw logits.
            prefix: what precedes each position; needed by controls alone.

        Returns:
            A one-hot `Law` over the lowest most probable id when greedy, else a dense
            one.
        """
        logits = self.edited(logits, prefix)
        best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        if self.temperature is None:
            ids = best[..., None]
            return Law(probs=jnp.ones(ids.shape, jnp.float32), ids=ids)
        temperature = _per_row(self.temperature, jnp.float32)
        frozen = temperature <= 0
        # From the best logit down, so that a small temperature cannot overflow.
        scaled = logits - jnp.max(logits, axis=-1, keepdims=True)
        scaled = scaled / jnp.where(frozen, 1.0, temperature)
        if self.top_k is not None or self.top_p is not None:
            scaled = _truncate(scaled, self.top_k, self.top_p)
        ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)
        point = best[..., None] == ids[None, None]
        probs = jax.nn.softmax(scaled, axis=-1)
        return Law(probs=jnp.where(frozen, point.astype(jnp.float32), probs))


def mask_dead_rows(
    logits: Float[Array, "*B V"], num_tokens: int | None
) -> Float[Array, "*B V"]:
    """Logits with -inf at ids from `num_tokens` on."""
    if num_tokens is None or num_tokens >= logits.shape[-1]:
        return logits
    real = jnp.arange(logits.shape[-1]) < num_tokens
    real = jnp.broadcast_to(real, logits.shape)
    return jnp.where(real, logits, -jnp.inf)


def fit_vocabulary(
    logits: Float[Array, "*B W"], vocab_size: int
) -> Float[Array, "*B V"]:
    """A draft's logits cut or padded with -inf to the target's `vocab_size` rows.

    Models of one tokenizer differ in the padding of their embedding; the rows that both
    have are the real ones.
    """
    width = logits.shape[-1]
    if width >= vocab_size:
        return logits[..., :vocab_size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, vocab_size - width)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


def _per_row(value: Number, dtype: DTypeLike) -> Array:
    """A scalar or ``[B]`` setting, shaped to meet ``[B, T, V]``."""
    value = jnp.asarray(value, dtype)
    return value if value.ndim == 0 else value[:, None, None]


def _truncate(logits: jax.Array, top_k: Number, top_p: Number) -> jax.Array:
    """-inf at all but the first m ids by (logit, then lower id).

    One sort of the values serves both rules: m is the smaller of k and the number of
    ids whose preceding mass is below top_p, renormalised after top-k.
    """
    vocab_size = logits.shape[-1]
    ordered = -jnp.sort(-logits, axis=-1)
    kept = jnp.full(logits.shape[:-1] + (1,), vocab_size, jnp.int32)
    if top_k is not None:
        kept = jnp.minimum(kept, _per_row(top_k, jnp.int32))
    if top_p is not None:
        rank = jnp.arange(vocab_size, dtype=jnp.int32)[None, None]
        probs = jax.nn.softmax(jnp.where(rank < kept, ordered, -jnp.inf), axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs
        limit = _per_row(top_p, jnp.float32)
        # The running sum may round up to 1 before the last id: a top_p of 1 keeps all.
        inside = (before < limit) | (limit >= 1)
        nucleus = jnp.sum(inside, axis=-1, keepdims=True, dtype=jnp.int32)
        kept = jnp.minimum(kept, nucleus)
    kept = jnp.maximum(kept, 1)
    threshold = jnp.take_along_axis(ordered, kept - 1, axis=-1)
    above = logits > threshold
    ties = logits == threshold
    room = kept - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    first_ties = ties & (jnp.cumsum(ties, axis=-1, dtype=jnp.int32) <= room)
    return jnp.where(above | first_ties, logits, -jnp.inf)


def draw(key: Key[Array, ""], weights: Float[Array, " V"]) -> Int[Array, ""]:
    """Draws an id in proportion to `weights`: the only way a token is ever drawn.

    The id whose exponential clock of rate `weight` rings first, in float32: the
    ``argmax(log weights + Gumbel)``, since -log of an exponential variable is a Gumbel
    one. Weights need not sum to 1; an id of weight 0 (or of less than the smallest
    normal float32) is never drawn, unless no other is there or one is NaN: then the
    last id comes out. Ids that hold less than some 1e-10 of the whole are drawn too
    seldom, since clocks have 32 random bits.
    """
    # Written for XLA's CPU backend: an argmax there computes all that feeds it element
    # by element, three logarithms included, and took thrice the time of this form.
    speed = clock_speeds(key, weights)
    fastest = (speed == jnp.max(speed)) & (weights > 0)
    ids = jnp.arange(weights.shape[0], dtype=jnp.int32)
    return jnp.min(jnp.where(fastest, ids, weights.shape[0] - 1))


def draw_distinct(
    key: Key[Array, ""], weights: Float[Array, " V"], count: int
) -> Int[Array, " K"]:
    """The first ids whose clocks ring in `draw`: drawn without replacement, in order.

    The first is what `draw` gives. Where fewer than `count` ids have weight, what
    follows them was not drawn: ids of weight 0.

    Args:
        key: one key for all of them.
        weights: as in `draw`.
        count: how many ids (static), at most V.
    """
    # Of equals the lower id comes first, as in `draw`.
    return jax.lax.top_k(clock_speeds(key, weights), count)[1].astype(jnp.int32)


def clock_speeds(
    key: Key[Array, ""], weights: Float[Array, " V"]
) -> Float[Array, " V"]:
    """One over the time at which each id's exponential clock rings: the first is drawn.

    Its logarithm is ``log(weights)`` plus Gumbel noise.

    Args:
        key: of the draw.
        weights: as of `draw`.
    """
    # `uniform` has steps of 1e-7, in which the clocks of rare ids would be lost: all 32
    # bits, and log1p, keep them apart near 0, where the first one rings.
    bits = jax.random.bits(key, weights.shape, jnp.uint32).astype(jnp.float32)
    passed = jnp.minimum((bits + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return weights / -jnp.log1p(-passed)


def draw_law(key: Key[Array, ""], law: Law, row: int, vocab_size: int) -> Array:
    """Draws from one row of a sequence's laws; a one-hot law needs no random bits."""
    if law.ids is not None and law.ids.shape[-1] == 1:
        return law.ids[row, 0]
    return draw(key, law.row(jnp.int32(row), vocab_size))


def residual(
    target: Float[Array, " V"], draft: Float[Array, " V"]
) -> Float[Array, " V"]:
    """Unnormalised ``[target - draft]+``; where that is empty, `target` itself.

    An empty residual means that a rejection had probability 0 up to rounding.
    """
    difference = jnp.maximum(target - draft, 0.0)
    return jnp.where(jnp.sum(difference) > 0, difference, target)


def check_sampling(
    sampling: Sampling, name: str, batch_size: int | None = None
) -> None:
    """Refuses settings that mean nothing.

    Args:
        sampling: settings with concrete numbers.
        name: how the caller names them, for the message.
        batch_size: rows, where per-row settings are to be checked against it.

    Raises:
        InputError: a negative or boundless temperature, top-k below 1, top-p outside
            (0, 1], num_tokens below 1, a per-row setting of another batch size, or
            numbers of a control that mean nothing.
    """
    rules = {
        # Past the bound a float32 divided by it is 0 or NaN, at dead rows too.
        "temperature": (
            lambda x: (x >= 0) & (x <= _HOTTEST),
            f"from 0 to {_HOTTEST:g} (None is greedy)",
        ),
        "top_k": (
            lambda x: (x >= 1) & (x == np.floor(x)) & (x < 2**31),
            "a whole number, at least 1 and below 2**31 (None switches it off)",
        ),
        "top_p": (lambda x: (x > 0) & (x <= 1), "in (0, 1] (None switches it off)"),
    }
    for field, (holds, wanted) in rules.items():
        value = getattr(sampling, field)
        if value is None or isinstance(value, jax.core.Tracer):
            continue
        numbers = np.asarray(value, np.float64)
        if not np.all(np.isfinite(numbers) & holds(numbers)):
            raise InputError(f"{name}.{field} is {value}: it must be {wanted}")
        if numbers.ndim and batch_size is not None and numbers.shape != (batch_size,):
            raise InputError(
                f"{name}.{field} has shape {numbers.shape}: it must be one number or "
                f"one per row ({batch_size} rows)"
            )
    if sampling.num_tokens is not None and sampling.num_tokens < 1:
        raise InputError(f"{name}.num_tokens is {sampling.num_tokens}: at least 1")
    for control in sampling.controls:
        check_control(control, name, batch_size)


def draft_settings(sampling: Sampling, draft_sampling: Sampling | None) -> Sampling:
    """How the draft samples: its own settings, filled up with the target's.

    Dead rows and controls that it does not set are the target's, since a draft that
    they rule out is always rejected.

    Args:
        sampling: of the target.
        draft_sampling: of the draft; None: as the target.
    """
    if draft_sampling is None:
        return sampling
    num_tokens = draft_sampling.num_tokens
    return draft_sampling.replace(
        num_tokens=sampling.num_tokens if num_tokens is None else num_tokens,
        controls=draft_sampling.controls or sampling.controls,
    )


def with_arrays(sampling: Sampling) -> Sampling:
    """The same settings with numbers as arrays of fixed type, so that none retraces."""

    def number(value: Number, dtype: DTypeLike) -> Array | None:
        return None if value is None else jnp.asarray(value, dtype)

    return sampling.replace(
        temperature=number(sampling.temperature, jnp.float32),
        top_k=number(sampling.top_k, jnp.int32),
        top_p=number(sampling.top_p, jnp.float32),
        controls=tuple(with_fixed_types(control) for control in sampling.controls),
    )


def sampling_rows(sampling: Sampling, rows: Int[Array, " K"]) -> Sampling:
    """The settings of some rows of a batch; what is one for all rows stays.

    Args:
        sampling: of the batch.
        rows: numbers of rows.
    """

    def taken(value: Number) -> Number:
        if value is None or np.ndim(value) == 0:
            return value
        return jnp.asarray(value)[rows]

    return sampling.replace(
        temperature=taken(sampling.temperature),
        top_k=taken(sampling.top_k),
        top_p=taken(sampling.top_p),
        controls=tuple(control_rows(control, rows) for control in sampling.controls),
    )
