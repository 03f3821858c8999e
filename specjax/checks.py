"""Refuses, before anything compiles, calls that could only go wrong later."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from specjax.controls import MinLength, check_vocabulary
from specjax.drafters.base import Drafter
from specjax.drafters.lengths import check_rule
from specjax.errors import InputError, is_whole
from specjax.models.base import EncoderDecoder
from specjax.sampling import Sampling, check_sampling, draft_settings, with_arrays
from specjax.types import DraftBlock
from specjax.verify import Verifier


def _concrete(*values: object) -> bool:
    """Whether their numbers can be read: not in a trace, nor where part of an array is
    another process's."""
    return not any(
        isinstance(value, jax.core.Tracer)
        or not getattr(value, "is_fully_addressable", True)
        for value in values
    )


def check_arguments(
    inputs: Array,
    mask: Array,
    keys: Array | None,
    sampling: Sampling,
    max_length: int,
    budget: int | Array,
    prefix: Array,
    prefix_length: Array,
    eos_id: int | Array,
) -> None:
    """Checks what every decode needs; one that draws nothing has no keys.

    Raises:
        InputError: naming the argument and what it must be.
    """
    if inputs.ndim != 2 or inputs.shape[1] < 1:
        raise InputError(
            f"inputs have shape {inputs.shape}: they must be [rows, source tokens], "
            "one token or more"
        )
    batch = inputs.shape[0]
    if mask.shape != inputs.shape:
        raise InputError(
            f"mask has shape {mask.shape} and inputs {inputs.shape}: they must agree"
        )
    if keys is not None:
        check_keys(keys, batch)
    check_sampling(sampling, "sampling", batch)
    if prefix.ndim != 2 or prefix.shape[0] != batch or prefix.shape[1] < 1:
        raise InputError(
            f"prefix has shape {prefix.shape}: it must be [{batch}, P] with P >= 1"
        )
    if np.shape(eos_id) != () or not jnp.issubdtype(
        jnp.result_type(eos_id), jnp.integer
    ):
        raise InputError(
            f"eos_id is {eos_id}: one whole number; what else ends a row stands in stop"
        )
    if max_length <= prefix.shape[1]:
        raise InputError(
            f"max_length is {max_length} and the prefix has {prefix.shape[1]} columns: "
            "max_length counts the prefix, and must leave room for one token"
        )
    if _concrete(budget):
        tokens = np.asarray(budget)
        whole = np.issubdtype(tokens.dtype, np.integer)
        if not whole or np.any((tokens < 0) | (tokens >= 2**31)):
            raise InputError(
                f"budget is {budget}: new tokens per row, a whole number from 0 to "
                "below 2**31"
            )
    if np.shape(budget) not in ((), (batch,)):
        raise InputError(
            f"budget has shape {np.shape(budget)}: one number or one per row ({batch})"
        )
    if _concrete(prefix_length):
        lengths = np.asarray(prefix_length)
        if lengths.shape != (batch,) or not np.all(
            (lengths >= 1) & (lengths <= prefix.shape[1])
        ):
            raise InputError(
                f"prefix_length is {lengths.tolist()}: one number per row, each in "
                f"1..{prefix.shape[1]}"
            )


def decode_arguments(
    target: EncoderDecoder,
    inputs: Array,
    mask: Array,
    keys: Array | None,
    sampling: Sampling,
    max_length: int,
    budget: int | Array | None,
    prefix: Array | None,
    prefix_length: Array | None,
    eos_id: int,
) -> dict[str, Any]:
    """Checks what all loops share and fixes types, so that values never retrace.

    Args:
        target: whose ids they are. The rest: as of `autoregressive_generate`; a loop
            that draws nothing has no keys.

    Returns:
        The arguments by name, but for the target.

    Raises:
        InputError: naming the argument and what it must be.
    """
    batch = len(inputs)
    if prefix is None:
        prefix = jnp.zeros((batch, 1), jnp.int32)
    inputs, mask, prefix = jnp.asarray(inputs), jnp.asarray(mask), jnp.asarray(prefix)
    if prefix_length is None:
        prefix_length = jnp.full(batch, prefix.shape[1], jnp.int32)
    if budget is None:
        budget = max_length
    check_arguments(
        inputs, mask, keys, sampling, max_length, budget, prefix, prefix_length, eos_id
    )
    check_ids(inputs, mask, prefix, prefix_length, target.vocab_size)
    check_controls(sampling, eos_id, target.vocab_size)
    return dict(
        inputs=jnp.asarray(inputs, jnp.int32),
        mask=jnp.asarray(mask, bool),
        keys=keys,
        sampling=with_arrays(sampling),
        max_length=int(max_length),
        budget=jnp.broadcast_to(jnp.asarray(budget, jnp.int32), (batch,)),
        prefix=jnp.asarray(prefix, jnp.int32),
        prefix_length=jnp.asarray(prefix_length, jnp.int32),
        eos_id=jnp.asarray(eos_id, jnp.int32),
    )


def check_ids(
    inputs: Array, mask: Array, prefix: Array, prefix_length: Array, vocab_size: int
) -> None:
    """Every real id must have a row in the target: a lookup would clamp it in silence.

    The encoder's vocabulary is taken to be the target's.

    Raises:
        InputError: naming the first row and position of an id without one.
    """
    if not _concrete(inputs, mask, prefix, prefix_length):
        return
    columns = np.arange(np.shape(prefix)[1])[None]
    for name, given, real in (
        ("inputs", inputs, np.asarray(mask, bool)),
        ("prefix", prefix, columns < np.asarray(prefix_length)[:, None]),
    ):
        ids = np.asarray(given)
        if not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"{name} are of type {ids.dtype}: ids are whole numbers")
        wrong = np.argwhere(real & ((ids < 0) | (ids >= vocab_size)))
        if len(wrong):
            row, position = wrong[0]
            raise InputError(
                f"{name}[{row}, {position}] is {ids[row, position]}: the target has "
                f"ids 0 to {vocab_size - 1}"
            )


def check_controls(sampling: Sampling, eos_id: int | Array, vocab_size: int) -> None:
    """Controls must speak of the target's ids, and of the id that ends its rows.

    Raises:
        InputError: naming the control.
    """
    for control in sampling.controls:
        check_vocabulary(control, "sampling", vocab_size)
        if not isinstance(control, MinLength) or not _concrete(control.eos_id, eos_id):
            continue
        if np.any(np.asarray(control.eos_id) != np.asarray(eos_id)):
            raise InputError(
                f"sampling.controls: MinLength.eos_id is {control.eos_id} and rows end "
                f"at eos_id {eos_id}: they must be the same"
            )


def check_keys(keys: Array, batch: int) -> None:
    """Keys must be typed, threefry, one per row.

    Under vmap other generators draw every row from the first key.

    Raises:
        InputError: else.
    """
    wanted = f"jax.random.split(jax.random.key(seed), {batch}) makes them"
    if not jnp.issubdtype(keys.dtype, jax.dtypes.prng_key):
        raise InputError(f"keys are of type {keys.dtype}, not typed keys: {wanted}")
    implementation = str(jax.random.key_impl(keys))
    if "fry" not in implementation:
        raise InputError(
            f"keys are of kind {implementation}: only threefry draws rows "
            f"independently under vmap; {wanted}, with impl='threefry2x32'"
        )
    if keys.shape != (batch,):
        raise InputError(f"keys have shape {keys.shape}: one per row; {wanted}")


def check_stop(stop: Array | None) -> Array | None:
    """Stop sequences as int32.

    Raises:
        InputError: not ``[K, M]``, or padded on the left. A row of -1 alone is none, so
            that fewer sequences need no other program.
    """
    if stop is None:
        return None
    if _concrete(stop):
        rows = np.asarray(stop)
        ragged = rows.ndim != 2 or rows.size == 0
        if not np.issubdtype(rows.dtype, np.integer):
            raise InputError(
                f"stop is of type {rows.dtype}: token ids are whole numbers"
            )
        if ragged or np.any((rows < 0)[:, :-1] & (rows >= 0)[:, 1:]):
            raise InputError(
                f"stop has shape {rows.shape}: it must be [sequences, tokens], padded "
                "with -1 on the right (a row of -1 alone is no sequence)"
            )
    return jnp.asarray(stop, jnp.int32)


def check_block(
    drafter: Drafter, verifier: Verifier, sampling: Sampling, block: DraftBlock
) -> None:
    """A block must be what its drafter says, and what the verifier can judge.

    Raises:
        InputError: naming the drafter.
    """
    name = type(drafter).__name__
    if (block.parents is not None) != drafter.trees:
        kind = "a chain" if block.parents is None else "a tree"
        raise InputError(
            f"{name} has trees={drafter.trees} and drafted {kind}: its blocks must "
            "have parents where trees is true, and none where it is false"
        )
    _check_trees(drafter, verifier, sampling)


def _check_trees(drafter: Drafter, verifier: Verifier, sampling: Sampling) -> None:
    judges_chains = not (verifier.trees or (sampling.greedy and verifier.lossless))
    if drafter.trees and judges_chains:
        raise InputError(
            f"{type(drafter).__name__} drafts trees and the verifier "
            f"{verifier.rule.__name__} judges chains: use a verifier of trees, or "
            "decode greedily"
        )
    if not drafter.trees or verifier.siblings is None or sampling.greedy:
        return
    drawn = getattr(drafter, "siblings", None)
    if drawn not in verifier.siblings:
        raise InputError(
            f"{type(drafter).__name__} has siblings={drawn!r} and the verifier "
            f"{verifier.rule.__name__} is exact for {' or '.join(verifier.siblings)}: "
            "draft them so, or use another verifier"
        )


def check_speculation(
    drafter: Drafter,
    verifier: Verifier,
    sampling: Sampling,
    draft_sampling: Sampling | None,
    gamma: int,
    batch: int,
) -> Sampling:
    """Checks what only speculation needs, and settles the draft's sampling.

    Returns:
        The sampling that the drafter uses; see `sampling.draft_settings`.

    Raises:
        InputError: naming what does not fit.
    """
    if not hasattr(drafter, "draft"):
        raise InputError(
            f"the drafter is a {type(drafter).__name__}, which drafts nothing: a model "
            "drafts as ModelDrafter(model)"
        )
    if not isinstance(verifier, Verifier):
        raise InputError(
            f"the verifier is a {type(verifier).__name__}, not a Verifier such as "
            "token_verify or block_verify"
        )
    check_rule(getattr(drafter, "rule", None), "drafter.rule")
    whole = is_whole(gamma) or isinstance(gamma, np.integer)
    if not whole or gamma < 1:
        raise InputError(
            f"gamma is {gamma}: the draft length must be a whole number >= 1 (plain "
            "decoding is autoregressive_generate)"
        )
    # Greedily every lossless rule becomes equality of ids, and reads no law.
    by_id = sampling.greedy and verifier.lossless
    if verifier.needs_law and not drafter.has_law and not by_id:
        raise InputError(
            f"the verifier {verifier.rule.__name__} reads the draft's law and "
            f"{type(drafter).__name__} has none: use a verifier with needs_law=False"
        )
    _check_trees(drafter, verifier, sampling)
    if draft_sampling is None:
        return sampling
    if not drafter.samples:
        raise InputError(
            f"draft_sampling is set and {type(drafter).__name__} draws nothing: leave "
            "it out"
        )
    check_sampling(draft_sampling, "draft_sampling", batch)
    return draft_settings(sampling, draft_sampling)
