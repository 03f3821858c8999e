"""A small head on what a draft knows: the chance that its token is accepted."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Key

from specjax.errors import InputError, is_whole


@struct.dataclass
class AcceptanceHead:
    """One hidden layer of SiLU over the draft's hidden state and how sure its law is.

    SpecDec++ (Huang et al. 2024, arXiv:2405.19715) stops a draft by a head of the
    hidden state alone. From that a small head learns badly what its law says at once:
    the largest probability and the entropy, which are inputs too.
    `training.acceptance` fits one, and `drafters.files` keeps it in a folder.

    Attributes:
        inner: ``[D + 2, W]`` weights.
        inner_bias: ``[W]``.
        outer: ``[W]``.
        outer_bias: a number.
        draft: fingerprint of the draft whose hidden states it reads (static).
    """

    inner: Float[Array, "F W"]
    inner_bias: Float[Array, " W"]
    outer: Float[Array, " W"]
    outer_bias: Float[Array, ""]
    draft: str = struct.field(pytree_node=False, default="")

    kind: ClassVar[str] = "acceptance_head"

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> AcceptanceHead:
        """One that is ready to be trained, and says 1/2 of everything.

        Args:
            target: not read.
            settings: `features` (D), `hidden` (W) and `draft`.
            key: initialises `inner`.

        Raises:
            InputError: other settings than these, or a width below 1.
        """
        if set(settings) != {"features", "hidden", "draft"}:
            raise InputError(
                f"an acceptance head has the settings {sorted(settings)}: it takes "
                "features, hidden and draft"
            )
        features, hidden = settings["features"], settings["hidden"]
        for name, width in (("features", features), ("hidden", hidden)):
            if not is_whole(width) or width < 1:
                raise InputError(
                    f"{name} of an acceptance head is {width!r}: a whole number, at "
                    "least 1"
                )
        return cls(
            inner=jax.random.normal(key, (features + 2, hidden)) * features**-0.5,
            inner_bias=jnp.zeros(hidden),
            outer=jnp.zeros(hidden),
            outer_bias=jnp.zeros(()),
            draft=str(settings["draft"]),
        )

    def settings(self) -> dict[str, Any]:
        """What `create` makes one of this shape of."""
        inputs, hidden = self.inner.shape
        return {"features": inputs - 2, "hidden": hidden, "draft": self.draft}

    def logits(self, inputs: Float[Array, "*B F"]) -> Float[Array, "*B"]:
        """Log-odds of acceptance.

        Args:
            inputs: of `head_inputs`.
        """
        bias = jnp.broadcast_to(self.inner_bias, inputs.shape[:-1] + self.outer.shape)
        return jax.nn.silu(inputs @ self.inner + bias) @ self.outer + self.outer_bias

    def acceptance(self, inputs: Float[Array, "*B F"]) -> Float[Array, "*B"]:
        """The chance itself."""
        return jax.nn.sigmoid(self.logits(inputs))


def head_inputs(
    hidden: Float[Array, "*B D"], probs: Float[Array, "*B V"]
) -> Float[Array, "*B F"]:
    """The hidden state, then log of the largest probability, then -entropy in nats.

    Args:
        hidden: what the draft's logits are made of.
        probs: its law; of a greedy draft that of temperature 1.
    """
    best = jnp.log(jnp.max(probs, axis=-1, keepdims=True))
    entropy = jnp.sum(jax.scipy.special.entr(probs), axis=-1, keepdims=True)
    return jnp.concatenate([hidden.astype(jnp.float32), best, -entropy], axis=-1)
