"""The shape of a T5: one frozen record for the whole family, with published sizes."""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Any

from specjax.errors import InputError, is_whole

ACTIVATIONS = ("relu", "gelu_new")
MODEL_TYPES = ("t5", "mt5", "umt5")

# feed_forward_proj -> (gated, activation). What transformers calls "gated-gelu" is the
# tanh form; its plain "gelu" is the erf form, which no T5 uses.
_PROJECTIONS = {
    "relu": (False, "relu"),
    "gelu_new": (False, "gelu_new"),
    "gated-relu": (True, "relu"),
    "gated-gelu": (True, "gelu_new"),
    "gated-gelu_new": (True, "gelu_new"),
}

_SIZES = (
    "vocab_size",
    "d_model",
    "d_kv",
    "num_heads",
    "d_ff",
    "num_encoder_layers",
    "num_decoder_layers",
    "num_buckets",
    "max_distance",
)
_SIZES_SHARED = tuple(
    "encoder_width" if name == "num_encoder_layers" else name for name in _SIZES
)
# Ends the model_type of a draft without an encoder, so that others refuse it by name.
_SHARED = "_shared_encoder"


@dataclasses.dataclass(frozen=True)
class T5Config:
    """Everything that decides a T5's parameters and its function.

    Attributes:
        vocab_size: rows of the embedding and of the head, dead padding rows included.
        d_model: model width.
        d_kv: width of one head.
        num_heads: attention heads.
        d_ff: hidden units of the feed-forward layer.
        num_encoder_layers: encoder blocks; 0 where `encoder_width` is given.
        num_decoder_layers: decoder blocks.
        gated: feed-forward ``wo(act(wi_0 x) * wi_1 x)`` instead of ``wo(act(wi x))``.
        activation: "relu" or "gelu_new" (the tanh approximation).
        tied_head: the head is the embedding (no ``lm_head`` of its own).
        scaled_head: hidden states are multiplied by ``d_model**-0.5`` before the head.
        bias_per_layer: each layer owns a relative-bias table, as in umT5.
        num_buckets: relative-position buckets.
        max_distance: distance from which all positions share the last bucket.
        eps: of the RMS norm.
        dropout_rate: used when a dropout key is given.
        pad_id: padding, and the decoder's start token.
        eos_id: end of sequence.
        encoder_width: of a draft without an encoder: the width of the target's encoder
            output, which its decoder reads through a projection. None: the model has an
            encoder of its own.
    """

    vocab_size: int
    d_model: int
    d_kv: int
    num_heads: int
    d_ff: int
    num_encoder_layers: int
    num_decoder_layers: int
    gated: bool = True
    activation: str = "gelu_new"
    tied_head: bool = False
    scaled_head: bool = False
    bias_per_layer: bool = False
    num_buckets: int = 32
    max_distance: int = 128
    eps: float = 1e-6
    dropout_rate: float = 0.1
    pad_id: int = 0
    eos_id: int = 1
    encoder_width: int | None = None

    def __post_init__(self) -> None:
        if self.encoder_width is not None and self.num_encoder_layers != 0:
            raise InputError(
                f"T5Config.num_encoder_layers is {self.num_encoder_layers} and "
                f"encoder_width {self.encoder_width}: a draft that reads its target's "
                "encoder has none of its own, so it must be 0."
            )
        for name in _SIZES if self.encoder_width is None else _SIZES_SHARED:
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise InputError(
                    f"T5Config.{name} must be a whole number of at least 1, "
                    f"not {value!r}."
                )
        if self.activation not in ACTIVATIONS:
            raise InputError(
                f"T5Config.activation must be one of {', '.join(ACTIVATIONS)}, "
                f"not {self.activation!r}."
            )
        if self.num_buckets % 4:
            raise InputError(
                "T5Config.num_buckets must be a multiple of 4 (two directions, each "
                f"half exact and half logarithmic), not {self.num_buckets}."
            )
        if self.max_distance <= self.num_buckets // 2:
            raise InputError(
                "T5Config.max_distance must exceed half of num_buckets "
                f"({self.num_buckets // 2}), not be {self.max_distance}."
            )
        rate, eps = self.dropout_rate, self.eps
        if not isinstance(rate, int | float) or not 0.0 <= rate < 1.0:
            raise InputError(
                f"T5Config.dropout_rate must be a number in [0, 1), not {rate!r}."
            )
        if not isinstance(eps, int | float) or not eps > 0.0:
            raise InputError(f"T5Config.eps must be a positive number, not {eps!r}.")
        for name in ("pad_id", "eos_id"):
            value = getattr(self, name)
            if not isinstance(value, int) or not 0 <= value < self.vocab_size:
                raise InputError(
                    f"T5Config.{name} must be an id below vocab_size "
                    f"({self.vocab_size}), not {value!r}."
                )

    @property
    def d_attention(self) -> int:
        """Width of all heads together."""
        return self.num_heads * self.d_kv

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that `preset` knows: every published size of the family."""
        return tuple(_PRESETS)

    @staticmethod
    def preset(name: str) -> T5Config:
        """The shape of a published model.

        Args:
            name: one of `presets()`, for example "t5-v1_1-base" or "flan-t5-xl".

        Returns:
            its configuration.

        Raises:
            InputError: the name is unknown; the message lists close ones.
        """
        if name not in _PRESETS:
            close = difflib.get_close_matches(name, _PRESETS, n=4, cutoff=0.4)
            raise InputError(
                f"There is no T5 preset {name!r}; "
                + (
                    f"close ones are {', '.join(close)}."
                    if close
                    else f"the presets are {', '.join(_PRESETS)}."
                )
            )
        return _PRESETS[name]

    @staticmethod
    def from_json(
        source: Mapping[str, Any] | str | os.PathLike[str],
        *,
        has_head: bool | None = None,
    ) -> T5Config:
        """Reads a Hugging Face ``config.json``, as written by transformers 4 or 5.

        transformers 5 always writes ``tie_word_embeddings: true`` and keeps in
        ``scale_decoder_outputs`` what the flag meant before, so only the checkpoint's
        tensors tell whether the head is separate.

        Args:
            source: the parsed object, the file, or the directory that holds it.
            has_head: whether the checkpoint stores ``lm_head.weight``. None: unknown,
                so ``tie_word_embeddings`` decides.

        Returns:
            the configuration.

        Raises:
            InputError: the file is absent or not JSON, a field is missing, or its value
                is one that this model does not compute.
        """
        fields, where = _read(source)
        model_type = fields.get("model_type", "t5")
        shares_encoder = str(model_type).endswith(_SHARED)
        if shares_encoder:
            model_type = model_type.removesuffix(_SHARED)
        if model_type not in MODEL_TYPES:
            raise InputError(
                f"model_type in {where} is {model_type!r}; supported are "
                f"{', '.join(MODEL_TYPES)}."
            )
        gated, activation = _feed_forward(fields, model_type, where)
        tied = fields.get("tie_word_embeddings") is not False
        if has_head is False and not tied:
            raise InputError(
                f"{where} says tie_word_embeddings: false, but lm_head.weight, the "
                "head of its own, is not stored."
            )
        scaled = fields.get("scale_decoder_outputs", tied) and model_type != "mt5"
        pad_id = _one_id(fields, "pad_token_id", 0, where)
        start_id = _one_id(fields, "decoder_start_token_id", pad_id, where)
        if start_id != pad_id:
            raise InputError(
                f"decoder_start_token_id in {where} is {start_id}, but T5 starts from "
                f"the padding token, {pad_id}."
            )

        def size(name: str, default: int | None = None) -> Any:
            value = fields.get(name)
            value = default if value is None else value
            if value is None:
                raise InputError(f"{where} has no field {name!r}.")
            return value

        num_layers = size("num_layers")
        try:
            return T5Config(
                vocab_size=size("vocab_size"),
                d_model=size("d_model"),
                d_kv=size("d_kv"),
                num_heads=size("num_heads"),
                d_ff=size("d_ff"),
                num_encoder_layers=num_layers,
                num_decoder_layers=size("num_decoder_layers", num_layers),
                gated=gated,
                activation=activation,
                tied_head=tied if has_head is None else not has_head,
                scaled_head=bool(scaled),
                bias_per_layer=model_type == "umt5",
                num_buckets=size("relative_attention_num_buckets", 32),
                max_distance=size("relative_attention_max_distance", 128),
                eps=fields.get("layer_norm_epsilon", 1e-6),
                dropout_rate=fields.get("dropout_rate", 0.1),
                pad_id=pad_id,
                eos_id=_one_id(fields, "eos_token_id", 1, where),
                encoder_width=size("encoder_d_model") if shares_encoder else None,
            )
        except InputError as error:
            raise InputError(f"{where} cannot be used: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """The Hugging Face ``config.json`` of this shape, for transformers 4 and 5.

        mT5 is written as ``t5``: with an unscaled head the two are the same function.
        A tied unscaled or an untied scaled head is what transformers 5 alone can read.
        A draft without an encoder is written under a ``model_type`` of its own, which
        transformers refuses by name, with the width it reads as ``encoder_d_model``.
        """
        model_type = "umt5" if self.bias_per_layer else "t5"
        architecture = f"{model_type.upper()}ForConditionalGeneration"
        own = {}
        if self.encoder_width is not None:
            model_type, architecture = f"{model_type}{_SHARED}", "SharedEncoderDraft"
            own["encoder_d_model"] = self.encoder_width
        forms = {form: name for name, form in reversed(_PROJECTIONS.items())}
        projection = forms[self.gated, self.activation]
        return own | {
            "architectures": [architecture],
            "d_ff": self.d_ff,
            "d_kv": self.d_kv,
            "d_model": self.d_model,
            "decoder_start_token_id": self.pad_id,
            "dense_act_fn": self.activation,
            "dropout_rate": self.dropout_rate,
            "eos_token_id": self.eos_id,
            "feed_forward_proj": projection,
            "is_encoder_decoder": True,
            "is_gated_act": self.gated,
            "layer_norm_epsilon": self.eps,
            "model_type": model_type,
            "num_decoder_layers": self.num_decoder_layers,
            "num_heads": self.num_heads,
            "num_layers": self.num_encoder_layers,
            "pad_token_id": self.pad_id,
            "relative_attention_max_distance": self.max_distance,
            "relative_attention_num_buckets": self.num_buckets,
            "scale_decoder_outputs": self.scaled_head,
            "tie_word_embeddings": self.tied_head,
            "vocab_size": self.vocab_size,
        }


def num_parameters(config: T5Config) -> int:
    """Number of weights of a T5 of this shape; a tied head counts once."""
    return (
        config.vocab_size * config.d_model * (1 if config.tied_head else 2)
        + num_encoder_parameters(config)
        + _stack_parameters(config, config.num_decoder_layers, 2)
    )


def num_encoder_parameters(config: T5Config) -> int:
    """Number of weights, the embedding apart, that run once per source.

    Those of the encoder or, in a draft without one, of the projection that takes its
    place. The projections of cross-attention count as the decoder's.
    """
    if config.encoder_width is not None:
        return config.d_model * config.encoder_width
    return _stack_parameters(config, config.num_encoder_layers, 1)


def _stack_parameters(config: T5Config, num_layers: int, num_attentions: int) -> int:
    attention = 4 * config.d_model * config.d_attention
    feed_forward = (3 if config.gated else 2) * config.d_model * config.d_ff
    norms = num_attentions + 1
    block = num_attentions * attention + feed_forward + norms * config.d_model
    tables = num_layers if config.bias_per_layer else 1
    table = config.num_buckets * config.num_heads
    return num_layers * block + tables * table + config.d_model


def _read(
    source: Mapping[str, Any] | str | os.PathLike[str],
) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "the T5 config"
    path = pathlib.Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no T5 config at {path}.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path} is not a readable JSON file: {error}.") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} must hold one JSON object, the model's config.")
    return fields, str(path)


def _feed_forward(
    fields: Mapping[str, Any], model_type: str, where: str
) -> tuple[bool, str]:
    """Gating and activation from ``feed_forward_proj`` and the newer pair of fields."""
    projection = fields.get("feed_forward_proj")
    if projection is None and "dense_act_fn" in fields:
        gated = bool(fields.get("is_gated_act", False))
        activation = fields["dense_act_fn"]
    else:
        if projection is None:
            projection = "relu" if model_type == "t5" else "gated-gelu"
        if projection not in _PROJECTIONS:
            raise InputError(
                f"feed_forward_proj in {where} is {projection!r}; supported are "
                f"{', '.join(_PROJECTIONS)}."
            )
        gated, activation = _PROJECTIONS[projection]
        newer = {"is_gated_act": gated, "dense_act_fn": activation}
        for name, value in newer.items():
            if fields.get(name, value) != value:
                raise InputError(
                    f"{name} in {where} is {fields[name]!r}, which contradicts "
                    f"feed_forward_proj, {projection!r}."
                )
    if activation not in ACTIVATIONS:
        raise InputError(
            f"dense_act_fn in {where} is {activation!r}; supported are "
            f"{', '.join(ACTIVATIONS)}."
        )
    return gated, activation


def _one_id(fields: Mapping[str, Any], name: str, default: int, where: str) -> Any:
    value = fields.get(name)
    if value is None:
        return default
    if isinstance(value, list):
        if len(value) != 1:
            raise InputError(f"{name} in {where} must be one id, not {value}.")
        return value[0]
    return value


def _family(
    names: str, sizes: Mapping[str, tuple[int, ...]], **shared: Any
) -> dict[str, T5Config]:
    """Presets ``names.format(size)`` from (d_model, d_kv, heads, d_ff, enc, dec)."""
    fields = (
        "d_model",
        "d_kv",
        "num_heads",
        "d_ff",
        "num_encoder_layers",
        "num_decoder_layers",
    )
    return {
        names.format(size): T5Config(**shared | dict(zip(fields, shape, strict=True)))
        for size, shape in sizes.items()
    }


# Raffel et al. 2020 (arXiv:1910.10683).
_SIZES_1_0 = {
    "small": (512, 64, 8, 2048, 6, 6),
    "base": (768, 64, 12, 3072, 12, 12),
    "large": (1024, 64, 16, 4096, 24, 24),
    "3b": (1024, 128, 32, 16384, 24, 24),
    "11b": (1024, 128, 128, 65536, 24, 24),
}
# T5 1.1 and what was trained from its shapes; mT5 (arXiv:2010.11934), umT5
# (arXiv:2304.09151; its "large" has a training recipe, but no published weights).
_SIZES_1_1 = {
    "small": (512, 64, 6, 1024, 8, 8),
    "base": (768, 64, 12, 2048, 12, 12),
    "large": (1024, 64, 16, 2816, 24, 24),
    "xl": (2048, 64, 32, 5120, 24, 24),
    "xxl": (4096, 64, 64, 10240, 24, 24),
}
# Xue et al. 2022 (arXiv:2105.13626): three encoder layers to each decoder layer.
_SIZES_BYT5 = {
    "small": (1472, 64, 6, 3584, 12, 4),
    "base": (1536, 64, 12, 3968, 18, 6),
    "large": (1536, 64, 16, 3840, 36, 12),
    "xl": (2560, 64, 32, 6720, 36, 12),
    "xxl": (4672, 64, 64, 12352, 36, 12),
}
_PRESETS = {
    **_family(
        "t5-{}",
        _SIZES_1_0,
        vocab_size=32128,
        gated=False,
        activation="relu",
        tied_head=True,
        scaled_head=True,
    ),
    **_family("t5-v1_1-{}", _SIZES_1_1, vocab_size=32128),
    **_family("t5-{}-lm-adapt", _SIZES_1_1, vocab_size=32128),
    **_family("flan-t5-{}", _SIZES_1_1, vocab_size=32128),
    **_family("mt5-{}", _SIZES_1_1, vocab_size=250112),
    **_family("byt5-{}", _SIZES_BYT5, vocab_size=384),
    **_family("umt5-{}", _SIZES_1_1, vocab_size=256384, bias_per_layer=True),
}
