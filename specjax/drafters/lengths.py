"""Rules of a draft's length, row by row: when a row has drafted enough.

All of them keep the token after which they stop, and read nothing but what was drafted
and what became of earlier blocks: with such lengths token and block verification are
exact. A stop saves passes of the draft; verification has a width of gamma all the same.
Nothing is carried from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from specjax.drafters.acceptance_head import AcceptanceHead, head_inputs
from specjax.drafters.chain import LengthRule, Signal, where_rows
from specjax.errors import InputError

Number = float | int | Array | np.ndarray
# Whether numbers are as they must be, and how that is said.
Bounds = tuple[Callable[[np.ndarray], np.ndarray], str]

SHARE: Bounds = (lambda x: (x >= 0) & (x <= 1), "from 0 to 1")
WHOLE: Bounds = (lambda x: (x >= 1) & (x == np.floor(x)), "whole, at least 1")
ABOVE: Bounds = (lambda x: (x > 0) & (x < np.inf), "a number above 0")
SIZE: Bounds = (lambda x: (x >= 0) & (x < np.inf), "a number, at least 0")


@struct.dataclass
class Fixed:
    """So many tokens in every block of a row; of gamma at most.

    Attributes:
        length: one number, or ``[B]`` one per row.
    """

    length: Number

    reads_hidden: ClassVar[bool] = False
    bounds: ClassVar[dict[str, Bounds]] = {"length": WHOLE}

    def init(self, batch: int) -> Int[Array, " B"]:
        """The lengths."""
        length = jnp.asarray(self.length, jnp.int32)
        if length.shape not in ((), (batch,)):
            raise InputError(
                f"length of Fixed has shape {length.shape}: one number or one per row "
                f"({batch} rows)"
            )
        return jnp.broadcast_to(length, (batch,))

    def begin(self, state: Array, gamma: int) -> tuple[Array, Array]:
        """Of each row."""
        return state, state

    def go_on(self, state: Array, signal: Signal) -> tuple[Array, Array]:
        """Whatever is drafted."""
        return jnp.ones(signal.token.shape, bool), state

    def commit(self, state: Array, drafted: Array, num_accepted: Array) -> Array:
        """Learns nothing."""
        return state


@struct.dataclass
class Heuristic:
    """Longer after a block that stood whole, shorter after another, as in transformers.

    Between 1 and gamma; the one of Hugging Face's transformers adds 2 and takes 1.

    Attributes:
        start: tokens of the first block.
        up: more tokens after a block that stood whole.
        down: fewer tokens after another.
    """

    start: Number = 5
    up: Number = 2
    down: Number = 1

    reads_hidden: ClassVar[bool] = False
    bounds: ClassVar[dict[str, Bounds]] = {
        "start": WHOLE,
        "up": WHOLE,
        "down": WHOLE,
    }

    def init(self, batch: int) -> Int[Array, " B"]:
        """The next block's length."""
        return jnp.full(batch, self.start, jnp.int32)

    def begin(self, state: Array, gamma: int) -> tuple[Array, Array]:
        """The length, which gamma bounds from now on."""
        length = jnp.clip(state, 1, gamma)
        return length, length

    def go_on(self, state: Array, signal: Signal) -> tuple[Array, Array]:
        """Whatever is drafted."""
        return jnp.ones(signal.token.shape, bool), state

    def commit(self, state: Array, drafted: Array, num_accepted: Array) -> Array:
        """One step up or down."""
        up, down = jnp.asarray(self.up, jnp.int32), jnp.asarray(self.down, jnp.int32)
        return jnp.where(num_accepted >= drafted, state + up, state - down)


@struct.dataclass
class Confidence:
    """Until the draft gives its token less than a threshold.

    Kangaroo (arXiv:2404.18911) and Hugging Face's transformers stop so.

    Attributes:
        threshold: probability below which a token is the last.
    """

    threshold: Number = 0.4

    reads_hidden: ClassVar[bool] = False
    bounds: ClassVar[dict[str, Bounds]] = {"threshold": SHARE}

    def init(self, batch: int) -> tuple[()]:
        """Nothing."""
        return ()

    def begin(self, state: Any, gamma: int) -> tuple[Array, Any]:
        """Up to gamma."""
        return jnp.array(gamma, jnp.int32), state

    def go_on(self, state: Any, signal: Signal) -> tuple[Array, Any]:
        """While the draft is sure."""
        return signal.confidence >= self.threshold, state

    def commit(self, state: Any, drafted: Array, num_accepted: Array) -> Any:
        """Learns nothing."""
        return state


@struct.dataclass
class EntropyState:
    """What `EntropyBound` adapts, by row: ``float32[B]``, but for `most`.

    Attributes:
        bound: acceptance below which a token is the last.
        rate: running mean of accepted / drafted.
        most: ``int32[B]`` gamma.
    """

    bound: Float[Array, " B"]
    rate: Float[Array, " B"]
    most: Int[Array, " B"]


@struct.dataclass
class EntropyBound:
    """Until a lower bound on acceptance, from the draft's entropy H, falls too low.

    AdaEDL (Agrawal et al. 2024, arXiv:2410.18351) stops where
    ``1 - sqrt(kappa H) < bound``, and moves `bound` as Draft & Verify (Zhang et al.
    2024, arXiv:2309.08168) moves its threshold: up, towards shorter drafts, where too
    little is accepted; else down, but for drafts that gamma ended.

    Attributes:
        kappa: of the bound, with H in nats.
        start: the first `bound`.
        aim: accepted / drafted that is wanted.
        memory: weight of the past in the running mean of that.
        step: by which `bound` moves after each block; 0 holds it.
    """

    kappa: Number = 0.2
    start: Number = 0.4
    aim: Number = 0.9
    memory: Number = 0.5
    step: Number = 0.01

    reads_hidden: ClassVar[bool] = False
    bounds: ClassVar[dict[str, Bounds]] = {
        "kappa": ABOVE,
        "start": SHARE,
        "aim": SHARE,
        "memory": SHARE,
        "step": SHARE,
    }

    def init(self, batch: int) -> EntropyState:
        """The bound as set; what came before counts as accepted."""
        return EntropyState(
            bound=jnp.full(batch, self.start, jnp.float32),
            rate=jnp.ones(batch, jnp.float32),
            most=jnp.ones(batch, jnp.int32),
        )

    def begin(self, state: EntropyState, gamma: int) -> tuple[Array, EntropyState]:
        """Up to gamma."""
        most = jnp.full_like(state.most, gamma)
        return most, state.replace(most=most)

    def go_on(
        self, state: EntropyState, signal: Signal
    ) -> tuple[Bool[Array, " B"], EntropyState]:
        """While the bound on acceptance is high."""
        entropy = jnp.sum(jax.scipy.special.entr(signal.probs), axis=-1)
        return 1 - jnp.sqrt(self.kappa * entropy) >= state.bound, state

    def commit(
        self, state: EntropyState, drafted: Array, num_accepted: Array
    ) -> EntropyState:
        """Moves the bound."""
        share = _ratio(num_accepted, drafted)
        rate = self.memory * state.rate + (1 - self.memory) * share
        longer = jnp.where(drafted >= state.most, 0.0, -1.0)
        way = jnp.where(rate < self.aim, 1.0, longer)
        bound = jnp.clip(state.bound + self.step * way, 0.0, 1.0)
        return state.replace(bound=bound, rate=rate)


@struct.dataclass
class AcceptanceStop:
    """Until the chance that one of the block's tokens falls is too high.

    SpecDec++ (Huang et al. 2024, arXiv:2405.19715).

    Attributes:
        head: predicts each token's acceptance.
        threshold: of ``1 - product of acceptances``, past which a token is the last.
    """

    head: AcceptanceHead
    threshold: Number = 0.7

    reads_hidden: ClassVar[bool] = True
    bounds: ClassVar[dict[str, Bounds]] = {"threshold": SHARE}

    def init(self, batch: int) -> Float[Array, " B"]:
        """The chance that the block stands so far."""
        return jnp.ones(batch, jnp.float32)

    def begin(self, state: Array, gamma: int) -> tuple[Array, Array]:
        """Up to gamma; nothing has fallen yet."""
        return jnp.array(gamma, jnp.int32), jnp.ones_like(state)

    def go_on(self, state: Array, signal: Signal) -> tuple[Array, Array]:
        """While the block is likely to stand."""
        assert signal.hidden is not None  # asked for by `reads_hidden`
        inputs = head_inputs(signal.hidden, signal.probs)
        standing = state * self.head.acceptance(inputs)
        return 1 - standing <= self.threshold, standing

    def commit(self, state: Array, drafted: Array, num_accepted: Array) -> Array:
        """Learns nothing."""
        return state


@struct.dataclass
class BanditState:
    """What each row knows of K rules.

    Attributes:
        pulls: ``float32[B, K]`` blocks that each has ended.
        reward: ``float32[B, K]`` what they gained together.
        arm: ``int32[B]`` the rule of this block.
        most: ``int32[B]`` gamma.
        rules: the state of each, which its own blocks alone change.
    """

    pulls: Float[Array, "B K"]
    reward: Float[Array, "B K"]
    arm: Int[Array, " B"]
    most: Int[Array, " B"]
    rules: tuple[Any, ...]


@struct.dataclass
class Bandit:
    """Chooses one of several rules for each block, by what they gained in this row.

    UCB1 over blocks, as in TapOut (2025, arXiv:2511.02017): each rule once, then the
    one of the highest mean reward plus ``explore sqrt(2 log(blocks) / own blocks)``.

    Attributes:
        rules: two or more.
        blend: a block's reward is so much of accepted / gamma, and the rest of
            accepted / drafted.
        explore: 1 is UCB1; less suits short texts.
    """

    rules: tuple[LengthRule, ...]
    blend: Number = 0.5
    explore: Number = 1.0

    bounds: ClassVar[dict[str, Bounds]] = {"blend": SHARE, "explore": SIZE}

    @property
    def reads_hidden(self) -> bool:
        """Where one of the rules does."""
        return any(rule.reads_hidden for rule in self.rules)

    def init(self, batch: int) -> BanditState:
        """No rule was tried."""
        return BanditState(
            pulls=jnp.zeros((batch, len(self.rules)), jnp.float32),
            reward=jnp.zeros((batch, len(self.rules)), jnp.float32),
            arm=jnp.zeros(batch, jnp.int32),
            most=jnp.ones(batch, jnp.int32),
            rules=tuple(rule.init(batch) for rule in self.rules),
        )

    def begin(self, state: BanditState, gamma: int) -> tuple[Array, BanditState]:
        """Chooses, and begins with what was chosen."""
        tried = jnp.maximum(state.pulls, 1.0)
        blocks = jnp.maximum(jnp.sum(state.pulls, axis=1, keepdims=True), 1.0)
        score = state.reward / tried + self.explore * jnp.sqrt(
            2 * jnp.log(blocks) / tried
        )
        arm = jnp.argmax(jnp.where(state.pulls > 0, score, jnp.inf), axis=1)
        state = state.replace(arm=arm.astype(jnp.int32))
        begun = [
            rule.begin(own, gamma)
            for rule, own in zip(self.rules, state.rules, strict=True)
        ]
        most = self._chosen(state, [own for own, _ in begun])
        state = self._kept(state, [own for _, own in begun])
        return most, state.replace(most=jnp.full_like(state.most, gamma))

    def go_on(
        self, state: BanditState, signal: Signal
    ) -> tuple[Bool[Array, " B"], BanditState]:
        """What the chosen rule says."""
        asked = [
            rule.go_on(own, signal)
            for rule, own in zip(self.rules, state.rules, strict=True)
        ]
        answer = self._chosen(state, [own for own, _ in asked])
        return answer, self._kept(state, [own for _, own in asked])

    def commit(
        self, state: BanditState, drafted: Array, num_accepted: Array
    ) -> BanditState:
        """Rewards the chosen rule, and tells it of its block."""
        reward = self.blend * _ratio(num_accepted, state.most)
        reward += (1 - self.blend) * _ratio(num_accepted, drafted)
        chosen = jax.nn.one_hot(state.arm, len(self.rules), dtype=jnp.float32)
        told = [
            rule.commit(own, drafted, num_accepted)
            for rule, own in zip(self.rules, state.rules, strict=True)
        ]
        return self._kept(state, told).replace(
            pulls=state.pulls + chosen,
            reward=state.reward + chosen * reward[:, None],
        )

    def _chosen(self, state: BanditState, values: list[Array]) -> Array:
        """Each row's value of its own rule."""
        rows = [jnp.broadcast_to(value, state.arm.shape) for value in values]
        return jnp.choose(state.arm, rows, mode="clip")

    def _kept(self, state: BanditState, rules: list[Any]) -> BanditState:
        """The new state of each row's own rule, and the old ones of the others."""
        kept = [
            where_rows(state.arm == number, new, old)
            for number, (new, old) in enumerate(zip(rules, state.rules, strict=True))
        ]
        return state.replace(rules=tuple(kept))


def check_rule(rule: Any, name: str) -> None:
    """Refuses settings of this package's rules that mean nothing.

    Args:
        rule: any rule, with concrete numbers.
        name: how the caller names it, for the message.

    Raises:
        InputError: naming the first number out of its bounds, or too few rules.
    """
    for field, (holds, wanted) in getattr(rule, "bounds", {}).items():
        value = getattr(rule, field)
        if isinstance(value, jax.core.Tracer):
            continue
        numbers = np.asarray(value, np.float64)
        if not np.all(np.isfinite(numbers) & holds(numbers)):
            raise InputError(f"{name}.{field} is {value}: it must be {wanted}")
    if isinstance(rule, Bandit):
        if len(rule.rules) < 2:
            raise InputError(
                f"{name}.rules has {len(rule.rules)}: a bandit chooses among two or "
                "more"
            )
        for number, own in enumerate(rule.rules):
            check_rule(own, f"{name}.rules[{number}]")


def _ratio(part: Array, whole: Array) -> Float[Array, " B"]:
    """Of counts; a row that drafted nothing is not told of it."""
    return part.astype(jnp.float32) / jnp.maximum(whole, 1).astype(jnp.float32)
