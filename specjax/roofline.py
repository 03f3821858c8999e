"""What a T5's passes read, compute and take on a device, from its shape alone.

A pass takes the longer of two times: that of moving its bytes and that of its matrix
products, both at the device's published best. Launches and synchronisation are left
out, and a small draft on a fast device is bound by them: the paper's c for T5-small is
about three times the one modelled here. Fusion may save some of the activations.

Williams, Waterman, Patterson 2009 (doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from specjax.errors import InputError, is_whole
from specjax.models.t5_config import (
    T5Config,
    num_encoder_parameters,
    num_parameters,
)

# Bytes of one number, of those types in which weights, caches and activations are kept.
ITEM_BYTES: Mapping[str, int] = {"float32": 4, "bfloat16": 2}
_WIDE = 4  # scores of attention and logits are float32 whatever the rest is
_ENDLESS = 2**40  # rows: at so many the weights no longer count


@dataclasses.dataclass(frozen=True)
class Device:
    """One chip.

    Attributes:
        name: of the chip.
        bandwidth: of its memory, bytes / s.
        peak: operations / s of matrix products, by the type of what is stored.
        memory: bytes.
    """

    name: str
    bandwidth: int | float
    peak: Mapping[str, int | float]
    memory: int | float

    def __post_init__(self) -> None:
        sizes = {"bandwidth": self.bandwidth, "memory": self.memory}
        sizes |= {f"peak[{dtype!r}]": value for dtype, value in self.peak.items()}
        for name, value in sizes.items():
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise InputError(f"{name} of {self.name} is {value!r}: above 0")

    @staticmethod
    def presets() -> tuple[str, ...]:
        """Names that `preset` knows."""
        return tuple(_DEVICES)

    @staticmethod
    def preset(name: str) -> Device:
        """A chip by its name, with its vendor's figures.

        Raises:
            InputError: there is none of that name.

        >>> v4 = Device.preset("TPU v4")
        >>> round(v4.peak["bfloat16"] / v4.bandwidth)  # operations per byte
        229
        """
        if name not in _DEVICES:
            raise InputError(f"device is {name!r}: one of {', '.join(_DEVICES)}")
        return _DEVICES[name]


def _chip(name: str, memory: float, bandwidth: float, **teraflops: float) -> Device:
    """From gigabytes, gigabytes / s and teraflop / s."""
    peak = {dtype: value * 1e12 for dtype, value in teraflops.items()}
    return Device(name, bandwidth * 1e9, peak, memory * 1e9)


# TPUs: docs.cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. GPUs: NVIDIA's data sheets of
# the SXM boards, dense (the sheets print twice as much, "with sparsity"). The peak of
# float32 is that of the form which JAX multiplies it in unless told otherwise
# (docs.jax.dev/en/latest/201/precision.html): bfloat16 on TPU, TF32 on these GPUs.
_DEVICES: Mapping[str, Device] = {
    chip.name: chip
    for chip in (
        # 32 GiB; the others' vendors say GB.
        _chip("TPU v4", 32 * 1.024**3, 1200.0, bfloat16=275.0, float32=275.0),
        _chip("TPU v5e", 16.0, 819.0, bfloat16=197.0, float32=197.0),
        _chip("TPU v5p", 95.0, 2765.0, bfloat16=459.0, float32=459.0),
        _chip("TPU v6e", 32.0, 1638.0, bfloat16=918.0, float32=918.0),
        _chip("H200", 141.0, 4800.0, bfloat16=989.4, float32=494.7),
        _chip("A100-80GB", 80.0, 2039.0, bfloat16=312.0, float32=156.0),
        _chip("A100-40GB", 40.0, 1555.0, bfloat16=312.0, float32=156.0),
    )
}


@dataclasses.dataclass(frozen=True)
class Work:
    """What one pass moves and computes.

    Attributes:
        weights: bytes of the parameters that it reads, once.
        self_attention: bytes of the memory of self-attention: slots that it reads, and
            those of its own tokens, which it writes. An encoder has none.
        cross_attention: bytes of keys and values of cross-attention, which a decoder
            reads and an encoder writes.
        activations: bytes of what each matrix product reads and writes otherwise, those
            of attention included, and of the logits, which whoever draws reads again.
        flops: operations of the matrix products; one of ``[m, k]`` and ``[k, n]`` is
            2 m k n.
    """

    weights: int
    self_attention: int
    cross_attention: int
    activations: int
    flops: int

    @property
    def bytes(self) -> int:
        """All that it moves."""
        caches = self.self_attention + self.cross_attention
        return self.weights + caches + self.activations

    def seconds(self, device: Device, dtype: str) -> float:
        """The longer of moving the bytes and doing the operations."""
        _item_bytes(dtype)
        if dtype not in device.peak:
            raise InputError(f"dtype is {dtype!r}: {device.name} has no peak for it")
        return max(self.bytes / device.bandwidth, self.flops / device.peak[dtype])


def decoder_parameters(config: T5Config) -> int:
    """Number of weights that a decoder pass reads.

    Not the encoder, the embedding's other rows, or the cross-attention's key and value
    projections, which the encoder's pass has used up.

    >>> decoder_parameters(T5Config.preset("t5-v1_1-small"))
    38482624
    """
    products = sum(read * written for read, written in _decoder_products(config))
    tables = config.num_decoder_layers if config.bias_per_layer else 1
    return (
        config.num_decoder_layers * (products + 3 * config.d_model)
        + tables * config.num_buckets * config.num_heads
        + config.d_model
        + config.d_model * config.vocab_size
    )


def decoder_pass(
    config: T5Config,
    dtype: str,
    *,
    tokens: int = 1,
    batch: int = 1,
    written: int,
    source: int,
) -> Work:
    """A pass of the decoder: a step (one token per row), or one that verifies.

    Args:
        config: the shape.
        dtype: of weights, caches and activations: "float32" or "bfloat16".
        tokens: m, fed per row; gamma + 1 where gamma drafts are verified.
        batch: rows, >= 1.
        written: slots of the self-attention's memory that are read, per row, >= 0. A
            buffer of fixed size is read whole, so there it is that size.
        source: tokens of the source, padding included, >= 1.

    Raises:
        InputError: an argument outside its range.

    >>> step = decoder_pass(
    ...     T5Config.preset("t5-v1_1-xxl"), "bfloat16", written=64, source=128
    ... )
    >>> round(step.weights / 1e9, 2), round(step.bytes / step.weights, 3)
    (11.14, 1.008)
    """
    _at_least(1, tokens=tokens, batch=batch, source=source)
    _at_least(0, written=written)
    size, layers = _item_bytes(dtype), config.num_decoder_layers
    fed, inner, heads = batch * tokens, config.d_attention, config.num_heads
    products = _decoder_products(config)
    head = config.d_model * config.vocab_size
    scores = heads * (written + tokens + source)
    # Attention reads q, and of its own tokens k and v; cross-attention q; both write.
    moved = sum(read + put for read, put in products) + (4 + 2) * inner
    return Work(
        weights=size * decoder_parameters(config),
        self_attention=2 * layers * inner * batch * (written + tokens) * size,
        cross_attention=2 * layers * inner * batch * source * size,
        activations=fed
        * (
            size * (2 * config.d_model + layers * moved)  # the embedding, the head
            + _WIDE * 2 * (layers * scores + config.vocab_size)
        ),
        flops=2 * fed * (layers * sum(read * put for read, put in products) + head)
        + 4 * fed * layers * inner * (written + tokens + source),
    )


def encoder_pass(config: T5Config, dtype: str, *, batch: int = 1, source: int) -> Work:
    """All that is done once per source: the encoder and the cross-attention's keys.

    Of a draft that shares its target's encoder: the projection in the encoder's place.

    Args:
        config: the shape.
        dtype: of weights, caches and activations: "float32" or "bfloat16".
        batch: rows, >= 1.
        source: tokens of the source, padding included, >= 1.

    Raises:
        InputError: an argument outside its range.

    >>> work = encoder_pass(T5Config.preset("t5-v1_1-xxl"), "bfloat16", source=128)
    >>> round(work.weights / 1e9, 2)
    10.87
    """
    _at_least(1, batch=batch, source=source)
    size, layers = _item_bytes(dtype), config.num_encoder_layers
    fed, width, inner = batch * source, config.d_model, config.d_attention
    products = _encoder_products(config)
    cross = 2 * config.num_decoder_layers * inner * width
    read = config.encoder_width
    # The embedding's rows, or the target's encoder output and what is made of it.
    entry = width if read is None else read + width
    moved = sum(taken + put for taken, put in products) + 4 * inner
    return Work(
        weights=size * (num_encoder_parameters(config) + cross),
        self_attention=0,
        cross_attention=2 * config.num_decoder_layers * inner * fed * size,
        activations=fed
        * (
            size * (entry + layers * moved + config.num_decoder_layers * width)
            + _WIDE * 2 * layers * config.num_heads * source
        ),
        flops=2
        * fed
        * (
            layers * sum(taken * put for taken, put in products)
            + cross
            + width * (read or 0)
        )
        + 4 * fed * layers * inner * source,
    )


def cost_ratio(
    target: T5Config,
    draft: T5Config,
    device: Device,
    dtype: str,
    *,
    batch: int = 1,
    written: int,
    source: int,
) -> float:
    """c: a draft step / a target step, both of one token per row.

    Args:
        target: its shape.
        draft: its shape.
        device: where both run.
        dtype: of both.
        batch: see `decoder_pass`, as for the rest.
        written: slots read.
        source: tokens.

    Raises:
        InputError: an argument outside its range.

    >>> xxl, small = T5Config.preset("t5-v1_1-xxl"), T5Config.preset("t5-v1_1-small")
    >>> c = cost_ratio(
    ...     xxl, small, Device.preset("TPU v4"), "bfloat16", written=64, source=128
    ... )
    >>> round(c, 3)
    0.007
    """
    steps = [
        decoder_pass(config, dtype, batch=batch, written=written, source=source)
        for config in (draft, target)
    ]
    return steps[0].seconds(device, dtype) / steps[1].seconds(device, dtype)


def verify_ratio(
    config: T5Config,
    device: Device,
    dtype: str,
    *,
    tokens: int,
    batch: int = 1,
    written: int,
    source: int,
) -> float:
    """v(tokens): a target pass of so many tokens per row / a step of one.

    Args:
        config: the target's shape.
        device: where it runs.
        dtype: see `decoder_pass`, as for the rest.
        tokens: gamma + 1.
        batch: rows.
        written: slots read.
        source: tokens of the source.

    Raises:
        InputError: an argument outside its range.

    >>> xxl, v4 = T5Config.preset("t5-v1_1-xxl"), Device.preset("TPU v4")
    >>> v = verify_ratio(xxl, v4, "bfloat16", tokens=8, written=64, source=128)
    >>> 1 < v < 1.01
    True
    """
    step, verifying = (
        decoder_pass(
            config, dtype, tokens=fed, batch=batch, written=written, source=source
        )
        for fed in (1, tokens)
    )
    return verifying.seconds(device, dtype) / step.seconds(device, dtype)


def free_batch(
    config: T5Config,
    device: Device,
    dtype: str,
    *,
    gamma: int,
    written: int,
    source: int,
    slack: float = 0.1,
) -> int | float:
    """The largest batch at which verifying gamma drafts is as good as free.

    There v(gamma + 1) is at most 1 + slack. At batch 1 a pass of few tokens takes the
    time of reading the weights; v grows with the batch, by activations at first, and
    from where the arithmetic takes longer than the memory, as the batch does.

    Args:
        config: the target's shape.
        device: where it runs.
        dtype: see `decoder_pass`, as for the rest.
        gamma: drafts per row, >= 0.
        written: slots read.
        source: tokens of the source.
        slack: share of a step that counts as nothing, > 0.

    Returns:
        whole rows, 0 if not even one; infinite where no batch is too large, as with
        caches so long that the memory is always the busier.

    Raises:
        InputError: an argument outside its range.

    >>> xxl, h200 = T5Config.preset("t5-v1_1-xxl"), Device.preset("H200")
    >>> free_batch(xxl, h200, "bfloat16", gamma=7, written=64, source=128)
    22
    """
    _at_least(0, gamma=gamma)
    if not 0 < slack < math.inf:
        raise InputError(f"slack is {slack}: above 0")

    def free(batch: int) -> bool:
        ratio = verify_ratio(
            config,
            device,
            dtype,
            tokens=gamma + 1,
            batch=batch,
            written=written,
            source=source,
        )
        return ratio <= 1 + slack

    low, high = 0, 1
    while free(high):
        low, high = high, 2 * high
        if high > _ENDLESS:
            return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if free(middle) else (low, middle)
    return low


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes that models keep while they decode; temporaries come on top.

    Attributes:
        weights: all parameters.
        self_attention: keys and values of all slots.
        cross_attention: keys and values of the source.
        hidden: the encoders' outputs.
    """

    weights: int
    self_attention: int
    cross_attention: int
    hidden: int

    @property
    def bytes(self) -> int:
        """All together."""
        caches = self.self_attention + self.cross_attention
        return self.weights + caches + self.hidden


def memory_needed(
    configs: Sequence[T5Config], dtype: str, *, batch: int = 1, slots: int, source: int
) -> Memory:
    """What a pair needs, or one model alone.

    Args:
        configs: shapes of the models that decode together.
        dtype: of weights and caches: "float32" or "bfloat16".
        batch: rows, >= 1.
        slots: of each row's self-attention memory: the longest output and a block.
        source: tokens of the source, padding included, >= 1.

    Raises:
        InputError: an argument outside its range.

    >>> pair = [T5Config.preset(f"t5-v1_1-{size}") for size in ("xxl", "small")]
    >>> need = memory_needed(pair, "bfloat16", slots=136, source=128)
    >>> round(need.bytes / 1e9, 1), need.bytes < Device.preset("TPU v4").memory
    (22.5, True)
    """
    _at_least(1, batch=batch, slots=slots, source=source)
    if not configs:
        raise InputError("configs is empty: one shape, or a pair's")
    size = _item_bytes(dtype)
    per_slot = sum(2 * c.num_decoder_layers * c.d_attention for c in configs)
    return Memory(
        weights=size * sum(num_parameters(c) for c in configs),
        self_attention=size * batch * slots * per_slot,
        cross_attention=size * batch * source * per_slot,
        hidden=size * batch * source * sum(c.d_model for c in configs),
    )


def _encoder_products(config: T5Config) -> list[tuple[int, int]]:
    """Numbers that each product of an encoder's layer reads and writes per token."""
    width, inner, hidden = config.d_model, config.d_attention, config.d_ff
    entry = hidden * (2 if config.gated else 1)
    return [(width, 3 * inner), (inner, width), (width, entry), (hidden, width)]


def _decoder_products(config: T5Config) -> list[tuple[int, int]]:
    """The same of a decoder's, where cross-attention reads keys that stand already."""
    width, inner = config.d_model, config.d_attention
    return [*_encoder_products(config), (width, inner), (inner, width)]


def _item_bytes(dtype: str) -> int:
    if dtype not in ITEM_BYTES:
        raise InputError(f"dtype is {dtype!r}: one of {', '.join(ITEM_BYTES)}")
    return ITEM_BYTES[dtype]


def _at_least(least: int, **counts: int) -> None:
    for name, count in counts.items():
        if not is_whole(count) or count < least:
            raise InputError(
                f"{name} is {count!r}: it must be a whole number of at least {least}"
            )
