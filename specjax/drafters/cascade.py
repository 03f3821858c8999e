"""A draft model whose own tokens are drafted by another drafter, and verified by it.

Chen et al. 2024 (arXiv:2312.11462), vertical cascade: here the block has exactly the
draft model's law, so that it stands in for `ModelDrafter` before any verifier.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Int

from specjax.drafters.base import Committed, DraftState, node_keys
from specjax.drafters.model import ModelDrafter, ModelDraftState
from specjax.errors import InputError, is_whole
from specjax.models.base import Encoded, EncoderDecoder
from specjax.rows import put
from specjax.sampling import Sampling, fit_vocabulary
from specjax.types import DraftBlock, Law, Noise, Prefix
from specjax.verify import Verifier, block_verify, coupled_verify
from specjax.verify.base import Scored, VerifyOutput, greedy_rule

_DRAFT, _VERIFY = 0, 1  # purposes of a round's noise


@struct.dataclass
class CascadeState:
    """Both memories.

    Attributes:
        model: of the draft model: all but the last two committed tokens, as that of
            `ModelDrafter`.
        inner: of its drafter.
        done: ``bool[B]`` rows whose drafts nobody reads.
        passes: ``int32[B]`` passes of the draft model that the row's blocks needed.
        blocks: ``int32[B]`` how many blocks these were.
    """

    model: ModelDraftState
    inner: DraftState
    done: Bool[Array, " B"]
    passes: Int[Array, " B"]
    blocks: Int[Array, " B"]


@dataclasses.dataclass(frozen=True)
class _AsTarget:
    """The draft model as its drafter sees it: a target of as many ids as the real one.

    Attributes:
        model: the draft model.
        vocab_size: the target's.
    """

    model: Any
    vocab_size: int

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


@struct.dataclass
class _Progress:
    """The carry of the rounds of one block.

    Attributes:
        round: number of the next one, from 1.
        written: ``int32[B]`` tokens drafted so far; the last round may write more than
            gamma.
        tokens: ``int32[B, W]`` the committed text and these.
        laws: of the first gamma of them.
        cache: the draft model's.
        inner: its drafter's state.
        passes: of the draft model, ``int32[B]``.
    """

    round: Int[Array, ""]
    written: Int[Array, " B"]
    tokens: Int[Array, "B W"]
    laws: Law
    cache: Any
    inner: DraftState
    passes: Int[Array, " B"]


@struct.dataclass
class CascadeDrafter:
    """Drafts with a model that is itself decoded speculatively.

    Each round the inner drafter proposes `gamma_inner` tokens, the model scores them in
    one pass, and an exact rule keeps some and adds one: so the text that grows is the
    model's own sample, and its laws are what the block reports. It is cut at gamma
    tokens whatever they are; a cut that looked at them would bias the block. What the
    last round wrote beyond is thrown away with its noise.

    Attributes:
        model: as of `ModelDrafter`.
        inner: a drafter of chains that reads no features, whose `commit` can also take
            tokens back: all that keep no more than the text itself or a `Cache`.
        gamma_inner: most tokens that the inner drafter drafts in a round (static).
        verifier: of a round; a lossless one. Where the noise is that of the position,
            `coupled_verify` takes its place: then the tokens are, one for one, those of
            `ModelDrafter`, which no rule of rejection could give.
    """

    model: Any
    inner: Any
    gamma_inner: int = struct.field(pytree_node=False, default=3)
    verifier: Verifier = block_verify

    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    samples: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    def nodes(self, gamma: int) -> int:
        """A chain."""
        return gamma

    def init(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        prefix: Int[Array, "B P"],
        length: Int[Array, " B"],
        size: int,
    ) -> CascadeState:
        """Starts both drafters; the model is the target of the inner one.

        Raises:
            InputError: the inner drafter, its gamma or the verifier cannot be used.
        """
        self._check()
        rest = (inputs, mask, prefix, length, size + self._room)
        own = ModelDrafter(self.model).init(target, encoded, *rest)
        batch = inputs.shape[0]
        return CascadeState(
            model=own,
            inner=self.inner.init(self._as_target(target), own.encoded, *rest),
            done=jnp.zeros(batch, bool),
            passes=jnp.zeros(batch, jnp.int32),
            blocks=jnp.zeros(batch, jnp.int32),
        )

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: CascadeState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, CascadeState]:
        """Runs rounds until all rows have gamma tokens; `sampling` is both drafters'.

        Noise of the step is new in each round: it is that of node r in round r.
        """
        batch, vocab_size = tokens.shape[0], target.vocab_size
        view = self._as_target(target)
        settings = dict(target=view, gamma=gamma, length=length, sampling=sampling)
        logits = jnp.zeros((batch, gamma, vocab_size))
        law = functools.partial(sampling.replace(controls=()).law, logits)
        progress = _Progress(
            round=jnp.array(1, jnp.int32),
            written=jnp.where(state.done, gamma, 0).astype(jnp.int32),
            tokens=jnp.pad(tokens, ((0, 0), (0, self._room))),
            laws=jax.tree.map(
                lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(law)
            ),
            cache=state.model.cache,
            inner=state.inner,
            passes=state.passes,
        )
        step = functools.partial(
            self._round, noise=noise, encoded=state.model.encoded, **settings
        )
        end = jax.lax.while_loop(
            lambda progress: jnp.any(progress.written < gamma), step, progress
        )
        # A drafter that never fed its last draft is two tokens behind a text that it
        # wrote whole, and the target may still add one: one more draft feeds them.
        _, inner = self.inner.draft(
            view,
            self._noise(noise, end.round, length + end.written, _DRAFT),
            end.inner,
            end.tokens,
            length + end.written,
            gamma=1,
            sampling=sampling,
        )
        places = length[:, None] + jnp.arange(gamma)[None]
        block = DraftBlock(
            tokens=jnp.take_along_axis(end.tokens, places, axis=1, mode="clip"),
            length=jnp.where(state.done, 0, gamma).astype(jnp.int32),
            law=end.laws,
        )
        return block, state.replace(
            model=state.model.replace(cache=end.cache),
            inner=inner,
            passes=end.passes,
            blocks=state.blocks + (~state.done).astype(jnp.int32),
        )

    def commit(self, state: CascadeState, committed: Committed) -> CascadeState:
        """Rolls both memories back; to the inner one all it drafted was dropped."""
        room = ((0, 0), (0, self._room))
        told = committed.replace(
            tokens=jnp.pad(committed.tokens, room),
            num_accepted=jnp.zeros_like(committed.num_accepted),
            features=(),
        )
        return state.replace(
            model=ModelDrafter(self.model).commit(state.model, committed),
            inner=self.inner.commit(state.inner, told),
            done=state.done if committed.done is None else committed.done,
        )

    def _round(
        self,
        progress: _Progress,
        *,
        target: Any,
        noise: Noise,
        encoded: Encoded,
        gamma: int,
        length: Array,
        sampling: Sampling,
    ) -> _Progress:
        """One draft of the inner drafter, one pass of the model, one verdict."""
        width = self.gamma_inner
        offset = jnp.arange(width + 1, dtype=jnp.int32)[None]
        live = progress.written < gamma
        text = length + progress.written  # tokens that stand
        block, inner = self.inner.draft(
            target,
            self._noise(noise, progress.round, text, _DRAFT),
            progress.inner,
            progress.tokens,
            text,
            gamma=width,
            sampling=sampling,
        )
        places = text[:, None] + offset
        drafted = put(progress.tokens, places[:, :-1], block.tokens)

        # From the last two tokens that stand on, as `ModelDrafter` starts.
        start = jnp.maximum(text - 2, 0)
        window = start[:, None] + jnp.arange(width + 2, dtype=jnp.int32)[None]
        fed = jnp.take_along_axis(drafted, window, axis=1, mode="clip")
        cache = progress.cache.replace(length=start)
        output, cache = self.model.decode(fed, cache, encoded)
        after = (text - 1 - start)[:, None] + offset
        logits = jnp.take_along_axis(output.logits, after[..., None], axis=1)
        logits = fit_vocabulary(logits, target.vocab_size)
        law = sampling.law(logits, Prefix(tokens=drafted, length=places))
        judge_noise = self._noise(noise, progress.round, text, _VERIFY)
        verdict = self._judge(judge_noise, block, law, logits)

        # Accepted drafts, then the model's own token.
        last = verdict.num_accepted[:, None]
        new = jnp.pad(block.tokens, ((0, 0), (0, 1)))
        new = jnp.where(offset == last, verdict.next_token[:, None], new)
        writes = live[:, None] & (offset <= last)
        where = jnp.where(writes, places, progress.tokens.shape[1])
        tokens = put(progress.tokens, where, new)
        row = jnp.where(writes, progress.written[:, None] + offset, gamma)
        laws = jax.tree.map(
            lambda whole, part: put(whole, row, part), progress.laws, law
        )
        written = progress.written + jnp.where(live, last[:, 0] + 1, 0)
        told = Committed(
            tokens=tokens,
            length=length + written,
            num_accepted=verdict.num_accepted,
            done=~live,
        )
        return _Progress(
            round=progress.round + 1,
            written=written,
            tokens=tokens,
            laws=laws,
            cache=cache,
            inner=self.inner.commit(inner, told),
            passes=progress.passes + live.astype(jnp.int32),
        )

    def _judge(
        self, noise: Noise, block: DraftBlock, law: Law, logits: Array
    ) -> VerifyOutput:
        """The model's verdict on the inner drafter's block."""
        if law.ids is not None:  # greedy
            rule = functools.partial(greedy_rule, gamma=self.gamma_inner)
            return jax.vmap(rule)(law.ids[..., 0], block)
        verifier = coupled_verify if noise.by == "position" else self.verifier
        return jax.vmap(verifier.rule, in_axes=(0, 0, 0, None))(
            noise, block, Scored(law=law, logits=logits), verifier.params
        )

    def _noise(self, noise: Noise, number: Array, text: Array, purpose: int) -> Noise:
        """A round's noise, where so many tokens stand."""
        if noise.by == "position":
            # The same for both: it is shared on purpose.
            keys = jax.random.clone(noise.keys)
        else:
            keys = jax.vmap(jax.random.fold_in, in_axes=(0, None))(
                node_keys(noise, number, number), purpose
            )
        return noise.replace(keys=keys, start=text - 1)

    def _as_target(self, target: EncoderDecoder) -> Any:
        return _AsTarget(model=self.model, vocab_size=target.vocab_size)

    @property
    def _room(self) -> int:
        """Slots past the target's buffer: a last round may run over its block's end."""
        return 2 * self.gamma_inner + 1

    def _check(self) -> None:
        inner, gamma = self.inner, self.gamma_inner
        name = type(inner).__name__
        if not is_whole(gamma) or gamma < 1:
            raise InputError(
                f"gamma_inner is {gamma!r}: a whole number of tokens, at least 1"
            )
        if inner.trees:
            raise InputError(
                f"{name} drafts trees: a cascade's inner drafter drafts chains"
            )
        if inner.taps:
            raise InputError(
                f"{name} reads what its target made of the text, and a text that its "
                "target took back leaves nothing to read: it cannot draft in a cascade"
            )
        rule = getattr(self.verifier.rule, "__name__", "verifier")
        if not self.verifier.lossless or self.verifier.noise == "position":
            raise InputError(
                f"the cascade's verifier is {rule}: it must be lossless, with noise of "
                "the step (for noise of the position there is a rule of its own)"
            )
        if self.verifier.needs_law and not inner.has_law:
            raise InputError(
                f"the cascade's verifier {rule} reads the law of {name}, which has "
                "none: use exact_match_verify"
            )


def expected_passes(alpha: float, gamma: int, gamma_inner: int) -> float:
    """Mean passes of the draft model per block, where `ModelDrafter` takes gamma.

    Args:
        alpha: chance that a token of the inner drafter stands, the same for all.
        gamma: tokens of a block.
        gamma_inner: tokens that the inner drafter drafts in a round.

    Raises:
        InputError: alpha is no probability, or a gamma is below 1.
    """
    if not 0 <= alpha <= 1 or gamma < 1 or gamma_inner < 1:
        raise InputError(
            f"alpha is {alpha} and the gammas are {gamma} and {gamma_inner}: alpha is "
            "from 0 to 1, a gamma at least 1"
        )
    chances = [alpha**k * (1 - alpha) for k in range(gamma_inner)] + [
        alpha**gamma_inner
    ]
    passes = [0.0]  # to write so many tokens
    for wanted in range(1, gamma + 1):
        rest = (passes[max(wanted - k, 0)] for k in range(1, gamma_inner + 2))
        passes.append(1 + sum(p * n for p, n in zip(chances, rest, strict=True)))
    return passes[gamma]
