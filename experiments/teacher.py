"""The target that a draft is distilled from: its laws, its texts, the way to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import ml_collections
from jax.sharding import Mesh

from experiments import baseline, build, train_data
from specjax import errors, sharding
from specjax.data import batches, tokenizer
from specjax.decoding import DecodeOutput
from specjax.models import shared_encoder, t5, t5_weights
from specjax.pair import load_model
from specjax.sampling import Sampling
from specjax.training import distill, step, texts


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Texts that the target has written of held-out sources.

    Attributes:
        sampling: how.
        parts: the sources.
        outputs: the texts.
    """

    sampling: Sampling
    parts: Sequence[batches.InferenceBatch]
    outputs: Sequence[DecodeOutput]


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A target, and how a draft learns from it.

    Attributes:
        target: the model.
        num_tokens: ids of the tokenizer; no writer may write one from here on.
        divergence: from its laws.
        mixture: whose texts the laws are compared on.
        fingerprint: of the target's files.
    """

    target: t5.T5
    num_tokens: int
    divergence: distill.Divergence
    mixture: texts.Mixture
    fingerprint: str

    def texts_of_step(
        self, state: step.TrainState, batch: step.Batch, number: int
    ) -> tuple[step.Batch, str]:
        """The batch with the texts of the step's writer, and who that is.

        Args:
            state: of the draft.
            batch: of the training file.
            number: of the step.
        """
        writer = texts.choose_writer(self.mixture, state.key, number)
        if writer == "truth":
            return batch, writer
        written = texts.rewrite(
            shared_encoder.whole(state.model, self.target)
            if writer == "draft"
            else self.target,
            batch,
            state.key,
            number,
            temperature=self.mixture.temperature,
            num_tokens=self.num_tokens,
            eos_id=self.target.config.eos_id,
        )
        return written, writer

    def held_out(
        self, config: ml_collections.ConfigDict, data: train_data.Data
    ) -> dict[str, HeldOut]:
        """What the target writes of the first held-out sources, greedy and sampled.

        Args:
            config: ``config.evaluate`` says how many, and of what length.
            data: has the sources.
        """
        own = config.evaluate
        sources = data.sources[: own.rows]
        parts = list(
            batches.inference_batches(
                sources, own.batch_size, batches.source_lengths(config.data.buckets)
            )
        )
        keys = build.row_keys(config.seed, len(sources))
        made = {}
        for name, temperature in (("greedy", None), ("sampled", 1.0)):
            sampling = Sampling(temperature=temperature, num_tokens=self.num_tokens)
            outputs = baseline.decode_all(
                self.target, parts, keys, sampling, own.max_length
            )
            made[name] = HeldOut(sampling, parts, outputs)
        return made

    def alphas(self, draft: t5.T5, held_out: dict[str, HeldOut]) -> dict[str, float]:
        """Mean of sum min(p, q) on the target's own texts, as the paper measures it.

        Args:
            draft: the model in training.
            held_out: see `Teacher.held_out`.

        Returns:
            ``alpha_greedy`` and ``alpha_sampled``, by the laws of either way to decode.
        """
        whole = shared_encoder.whole(draft, self.target)
        return {
            f"alpha_{name}": baseline.alpha(
                self.target, whole, own.parts, own.outputs, own.sampling
            )
            for name, own in held_out.items()
        }


def load_teacher(
    config: ml_collections.ConfigDict, mesh: Mesh | None = None
) -> Teacher | None:
    """The teacher of ``config.distill``; None where no target is named.

    Args:
        config: see `configs/repair_target.py`.
        mesh: that the target goes to.

    Raises:
        errors.InputError: the folder is no whole model's, or has another tokenizer.
    """
    if not config.distill.target:
        return None
    folder = build.checkpoint_folder(config.distill.target, "distill.target")
    target, own, _ = load_model(folder)
    if target.shares_encoder:
        raise errors.InputError(
            f"config.distill.target is {config.distill.target!r}, a draft without an "
            "encoder: it takes a whole model to learn from"
        )
    if mesh is not None:
        sharding.check_heads(target.config.num_heads, mesh.shape)
        target = sharding.place(target, mesh)
    tokenizer.check_same_tokenizer(own, tokenizer.load_tokenizer(config.data.folder))
    # The tokenizer's, not the target's padding: a draft's table may be padded further.
    return Teacher(
        target,
        own.vocab_size,
        divergence(config),
        mixture(config),
        t5_weights.fingerprint(folder),
    )


def divergence(config: ml_collections.ConfigDict) -> distill.Divergence:
    """The divergence from ``config.distill``."""
    fields = {field.name for field in dataclasses.fields(distill.Divergence)}
    settings = config.distill.to_dict()
    return distill.Divergence(**{name: settings[name] for name in fields})


def mixture(config: ml_collections.ConfigDict) -> texts.Mixture:
    """The mixture from ``config.distill.texts``, whose temperature 0 is greedy."""
    own = config.distill.texts.to_dict()
    return texts.Mixture(**own | {"temperature": own["temperature"] or None})
