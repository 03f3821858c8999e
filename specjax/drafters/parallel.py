"""A whole block in one pass of a causal T5 decoder, which sentinels ask for (PARD).

Per row the pass is fed the n tokens that were committed since the last one, and then a
sentinel for each slot but the first:

    fed       w_1 .. w_n  s_1  s_2  ..  s_(gamma-1)        n differs by row
    logits           u_0  u_1  u_2  ..  u_(gamma-1)        u_i: i + 1 places after w_n

A causal block suits T5: its relative bias tells the first 16 distances apart, where a
block that sees both ways would have one bias for all that lies ahead. And a model that
span corruption has trained knows a sentinel as "something is missing here".

An et al. 2025 (arXiv:2504.18583).
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Key

from specjax.drafters.base import Committed, SlotLogits, check_known
from specjax.drafters.slots import check_slots, draft_slots
from specjax.errors import InputError, is_whole
from specjax.models.base import Cache, Encoded, EncoderDecoder, encode_draft
from specjax.models.dense import dense
from specjax.models.embedding import look_up
from specjax.models.t5 import T5
from specjax.models.t5_blocks import run_decoder
from specjax.models.t5_config import T5Config
from specjax.sampling import Sampling, draw_distinct
from specjax.types import DraftBlock, Noise

_USUAL: dict[str, Any] = {
    "max_gamma": 8,
    "markov_rank": 0,
    "slots": None,
    "keep": 0.7,
    "keep_least": 0.2,
    "first_sentinel": None,
}


@struct.dataclass
class MarkovHead:
    """What a slot's logits gain by the token before it: ``after @ before[token]``.

    Attributes:
        before: ``[V, R]`` of the token before.
        after: ``[V, R]`` of the slot's own token; 0 before training.

    Source: DSpark (arXiv:2607.05147).
    """

    before: Float[Array, "V R"]
    after: Float[Array, "V R"]

    def __call__(self, tokens: Int[Array, "*N"]) -> Float[Array, "*N V"]:
        """Logits to be added, after these tokens."""
        return dense(look_up(self.before, tokens), self.after, jnp.float32)


@struct.dataclass
class ParallelDraftState:
    """The draft model's memory.

    Attributes:
        encoded: its encoder's result, or the target's projected to its width.
        cache: holds the text as it was when it last drafted, less what did not stand;
            the last committed token is never in it. Sentinels' slots lie past its
            length.
    """

    encoded: Encoded
    cache: Cache


@struct.dataclass
class ParallelDrafter:
    """Drafts a block in one pass of a T5.

    The T5's own weights draft token by token too, as ``ModelDrafter(drafter.model)``.

    Attributes:
        model: a T5, with an encoder of its own or the target's (`encoder_width`).
        sentinels: ``[max_gamma - 1, D]`` embeddings of those that ask for slots 1 and
            on. They are no ids, so that any vocabulary will do.
        markov: corrects each slot but the first by the token before it, left to right:
            law row i stays the law of its token given those before. None: none.
        slots: one of `slots.SLOTS` (static).
        keep: training: slot i has ``max(keep**i, keep_least)`` of a text's places
            (static).
        keep_least: see `keep` (static).
    """

    model: T5
    sentinels: Float[Array, "N D"]
    markov: MarkovHead | None
    slots: str = struct.field(pytree_node=False)
    keep: float = struct.field(pytree_node=False)
    keep_least: float = struct.field(pytree_node=False)

    kind: ClassVar[str] = "parallel"
    taps: ClassVar[tuple[int, ...]] = ()
    has_law: ClassVar[bool] = True
    trees: ClassVar[bool] = False

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn; the likeliest are so at any temperature."""
        return self.slots == "sampled"

    @property
    def max_gamma(self) -> int:
        """The longest block: a sentinel for each slot but the first."""
        return len(self.sentinels) + 1

    @classmethod
    def create(
        cls, target: Any, settings: dict[str, Any], key: Key[Array, ""]
    ) -> ParallelDrafter:
        """One that starts from a random T5; `from_model` takes a trained one.

        Args:
            target: what it drafts for.
            settings: ``config``, the T5's shape in Hugging Face's terms, and those of
                `from_model`.
            key: initialises what is random.

        Raises:
            InputError: no shape, or as `from_model`.
        """
        rest = dict(settings)
        if "config" not in rest:
            raise InputError(
                "a parallel drafter starts from a draft T5: give one, or its config"
            )
        config = T5Config.from_json(rest.pop("config"))
        model_key, key = jax.random.split(key)
        return cls.from_model(target, T5(config, model_key), rest, key)

    @classmethod
    def from_model(
        cls, target: Any, model: T5, settings: dict[str, Any], key: Key[Array, ""]
    ) -> ParallelDrafter:
        """One that starts from a trained draft.

        Args:
            target: what it drafts for.
            model: its arrays are copied.
            settings: ``max_gamma``, the longest block (8); ``first_sentinel``, the id
                of <extra_id_0>, from which the vocabulary's sentinels count down: their
                embeddings are where this drafter's start (None: the mean of all);
                ``markov_rank``, 0 for no Markov head (0); ``slots``, one of
                `slots.SLOTS` ("sampled" with a Markov head, else "argmax"); ``keep``
                (0.7) and ``keep_least`` (0.2).
            key: initialises the Markov head.

        Raises:
            InputError: a setting that is not known or means nothing, or a model that
                reads another encoder than the target's.
        """
        own = _checked(settings, model.vocab_size)
        if model.shares_encoder:
            model.check_encoder_width(target.config.d_model)
        count, rank = own["max_gamma"] - 1, own["markov_rank"]
        table = model.embedding[...]
        start = jnp.broadcast_to(jnp.mean(table, axis=0), (count, table.shape[1]))
        if own["first_sentinel"] is not None:
            start = table[own["first_sentinel"] - np.arange(count)]
        markov = None
        if rank:
            shape = (model.vocab_size, rank)
            before = jax.random.normal(key, shape, table.dtype)
            markov = MarkovHead(before=before, after=jnp.zeros_like(before))
        return cls(
            model=jax.tree.map(jnp.copy, model),
            sentinels=start,
            markov=markov,
            slots=own["slots"] or ("sampled" if rank else "argmax"),
            keep=own["keep"],
            keep_least=own["keep_least"],
        )

    def settings(self) -> dict[str, Any]:
        """What `create` makes one of this shape from."""
        return {
            "config": self.model.config.to_json(),
            "max_gamma": self.max_gamma,
            "markov_rank": 0 if self.markov is None else self.markov.before.shape[1],
            "slots": self.slots,
            "keep": self.keep,
            "keep_least": self.keep_least,
        }

    def nodes(self, gamma: int) -> int:
        """A chain.

        Raises:
            InputError: there are too few sentinels, or `slots` is none that is known.
        """
        check_slots(self.slots)
        if gamma > self.max_gamma:
            raise InputError(
                f"gamma is {gamma} and the drafter has {len(self.sentinels)} sentinels:"
                f" gamma can be {self.max_gamma} at most"
            )
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
    ) -> ParallelDraftState:
        """Encodes the sources and feeds the prefixes.

        Raises:
            InputError: the model shares the encoder of targets of another width.
        """
        own = encode_draft(self.model, encoded, inputs, mask)
        cache = self.model.init_cache(inputs.shape[0], size)
        if prefix.shape[1] > 1:
            _, fed = self.model.decode(prefix, cache, own)
            assert fed is not None  # only teacher forcing keeps nothing
            cache = fed
        return ParallelDraftState(encoded=own, cache=cache.replace(length=length - 1))

    def draft(
        self,
        target: EncoderDecoder,
        noise: Noise,
        state: ParallelDraftState,
        tokens: Int[Array, "B L"],
        length: Int[Array, " B"],
        *,
        gamma: int,
        sampling: Sampling,
    ) -> tuple[DraftBlock, ParallelDraftState]:
        """Runs one pass, and walks over its slots.

        At most ``gamma + 1`` tokens may have been committed since the last draft. What
        is more keeps the sentinels that stood in its slots, which the draft alone
        suffers from.
        """
        known = jnp.maximum(state.cache.length, length - (gamma + 1))
        new = (length - known)[:, None]
        place = jnp.arange(2 * gamma, dtype=jnp.int32)[None]
        text = jnp.take_along_axis(tokens, known[:, None] + place, 1, mode="clip")
        slot = jnp.clip(place - new, 0, len(self.sentinels) - 1)
        # Behind a row's last sentinel stand more of them, which no slot can see.
        fed = jnp.where(
            (place < new)[..., None],
            look_up(self.model.embedding[...], text),
            look_up(self.sentinels, slot),
        )
        logits, cache = self._decode(
            fed,
            state.cache.replace(length=known),
            state.encoded,
            read=new - 1 + place[:, :gamma],
        )
        assert cache is not None  # only teacher forcing keeps nothing

        block = draft_slots(
            logits,
            self.slots,
            noise=noise,
            tokens=tokens,
            length=length,
            sampling=sampling,
            vocab_size=target.vocab_size,
            after=self.markov,
        )
        return block, state.replace(cache=cache.replace(length=length))

    def commit(
        self, state: ParallelDraftState, committed: Committed
    ) -> ParallelDraftState:
        """Forgets nothing but sentinels: accepted tokens are fed by the next pass."""
        # A row that has ended feeds its last token anew.
        length = jnp.minimum(state.cache.length, committed.length - 1)
        return state.replace(cache=state.cache.replace(length=length))

    def slot_logits(
        self,
        target: EncoderDecoder,
        encoded: Encoded,
        inputs: Int[Array, "B S"],
        mask: Bool[Array, "B S"],
        fed: Int[Array, "B T"],
        features: tuple[jax.Array, ...],
        key: Key[Array, ""],
        *,
        gamma: int,
    ) -> SlotLogits:
        """Slot 0 at every place, slot i at fewer and fewer, whose chains are whole.

        The sentinels of an anchor hang below its token as the branch of a tree, so that
        they see what they see when drafting. All rows have the same anchors, drawn in
        proportion to the texts that go on there.

        Args:
            target: see `TrainableDrafter.slot_logits`, as for all.
            encoded: its encoder's result.
            inputs: source ids.
            mask: True at real source tokens.
            fed: the start token and the text, without its last token.
            features: none.
            key: draws the anchors.
            gamma: slots of a block.

        Raises:
            InputError: `gamma` is not `max_gamma`.
        """
        self.nodes(gamma)
        if gamma < self.max_gamma:
            raise InputError(
                f"max_gamma is {self.max_gamma} and blocks of {gamma} are trained, so "
                f"that sentinels would stay as they are: set max_gamma to {gamma}"
            )
        own = encode_draft(self.model, encoded, inputs, mask)
        batch, count = fed.shape
        kept = [self._kept(count, slot) for slot in range(1, gamma)]
        ended = jnp.cumsum(fed == self.model.config.eos_id, axis=1) > 0
        going = jnp.sum(~ended, axis=0, dtype=jnp.float32)
        drawn = draw_distinct(key, going, max(kept, default=0))

        text = jnp.arange(count, dtype=jnp.int32)
        anchor = jnp.concatenate([text, *(drawn[:size] for size in kept)])
        slot = jnp.array(np.repeat(np.arange(gamma), [count, *kept]), jnp.int32)
        # Group 1 hangs below the text, each other below the first of the one before.
        parents, below = [text - 1], drawn
        for group, size in enumerate(kept):
            parents.append(below[:size])
            first = count + sum(kept[:group])
            below = first + jnp.arange(size, dtype=jnp.int32)

        vectors = look_up(self.sentinels, slot[count:] - 1)
        vectors = jnp.broadcast_to(vectors[None], (batch, *vectors.shape))
        logits, _ = self._decode(
            jnp.concatenate([look_up(self.model.embedding[...], fed), vectors], axis=1),
            None,
            own,
            parents=jnp.concatenate(parents)[None],
        )
        if self.markov is not None and gamma > 1:
            place = anchor[count:] + slot[count:]
            before = jnp.take(fed, place, axis=1, mode="clip")
            logits = logits.at[:, count:].add(self.markov(before))
        anchor = jnp.where(anchor + slot < count, anchor, -1)
        return SlotLogits(
            logits=logits,
            anchor=jnp.broadcast_to(anchor[None], logits.shape[:2]),
            slot=jnp.broadcast_to(slot[None], logits.shape[:2]),
        )

    def _kept(self, count: int, slot: int) -> int:
        """How many of `count` places a slot is trained at."""
        share = max(self.keep**slot, self.keep_least)
        return max(math.floor(share * count), 1)

    def _decode(
        self,
        fed: Float[Array, "B T D"],
        cache: Cache | None,
        encoded: Encoded,
        *,
        parents: Int[Array, "1 T"] | None = None,
        read: Int[Array, "B R"] | None = None,
    ) -> tuple[Float[Array, "B R V"], Cache | None]:
        """`T5.decode` of embeddings; `read`: the places whose logits are wanted."""
        model = self.model
        outputs, cache = run_decoder(
            model.decoder,
            model.config,
            fed,
            cache,
            encoded.cross,
            encoded.mask,
            parents=parents,
        )
        hidden = outputs[-1]
        if read is not None:  # before the head, which is a good part of a small draft
            hidden = jnp.take_along_axis(hidden, read[..., None], axis=1)
        return model.logits(model.decoder_norm(hidden)), cache


def _checked(settings: dict[str, Any], vocab_size: int) -> dict[str, Any]:
    """All settings but the T5's shape.

    Raises:
        InputError: naming the first that is wrong.
    """
    check_known(settings, _USUAL, ParallelDrafter.kind)
    own = _USUAL | settings
    for name, least in (("max_gamma", 2), ("markov_rank", 0)):
        value = own[name]
        if not is_whole(value) or value < least:
            raise InputError(f"{name} is {value!r}: a whole number, at least {least}")
    for name in ("keep", "keep_least"):
        value = own[name]
        if not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(f"{name} is {value!r}: a share, from 0 to 1")
    if own["slots"] is not None:
        check_slots(own["slots"])
    first = own["first_sentinel"]
    if first is not None:
        least = own["max_gamma"] - 2
        if not is_whole(first) or not least <= first < vocab_size:
            raise InputError(
                f"first_sentinel is {first!r}: with max_gamma {own['max_gamma']} an id "
                f"from {least} to {vocab_size - 1}, since others count down from it"
            )
    return own
