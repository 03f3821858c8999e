"""Token rows to arrays of few shapes: rows are padded to length buckets."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int32

from specjax import errors
from specjax.data.tokenizer import EOS_ID, PAD_ID

Rows = Sequence[Sequence[int]]
Buckets = Sequence[int | tuple[int, int]]
Examples = Sequence[tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class InferenceBatch:
    """Source rows of one bucket.

    Attributes:
        inputs: token ids, padded with 0. A row that only fills the batch reads one
            end-of-sequence id.
        mask: which inputs are real.
        rows: each row's index in what was given, -1 for one that fills the batch.
        valid: which rows are real.
    """

    inputs: Int32[np.ndarray, "B S"]
    mask: Bool[np.ndarray, "B S"]
    rows: Int32[np.ndarray, " B"]
    valid: Bool[np.ndarray, " B"]


@dataclasses.dataclass(frozen=True)
class Batch:
    """Source and target rows of one bucket.

    Attributes:
        inputs: source ids, padded with 0.
        input_mask: which inputs are real.
        targets: target ids, padded with 0.
        target_mask: which targets are real; none in a row that only fills the batch.
        rows: each row's index in the examples, -1 for one that fills the batch.
    """

    inputs: Int32[np.ndarray, "B S"]
    input_mask: Bool[np.ndarray, "B S"]
    targets: Int32[np.ndarray, "B T"]
    target_mask: Bool[np.ndarray, "B T"]
    rows: Int32[np.ndarray, " B"]


@dataclasses.dataclass(frozen=True)
class Position:
    """How far training has come: the next batch is batch `index` of `epoch`."""

    epoch: int = 0
    index: int = 0


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """The buckets as a tuple.

    Raises:
        InputError: there is none, one is below 1, or they do not increase.
    """
    buckets = tuple(int(bucket) for bucket in buckets)
    increasing = all(a < b for a, b in zip(buckets, buckets[1:], strict=False))
    if not buckets or buckets[0] < 1 or not increasing:
        raise errors.InputError(
            f"length buckets {list(buckets)} are wrong: they must be positive and"
            " increase"
        )
    return buckets


def bucket_length(length: int, buckets: Sequence[int], row: int | None = None) -> int:
    """The shortest bucket that holds a row.

    Args:
        length: the row's tokens, end of sequence included.
        buckets: increasing lengths in tokens.
        row: the row's index from 0, for the message.

    Returns:
        A member of `buckets`.

    Raises:
        InputError: the row is longer than the longest bucket, or empty.
    """
    buckets = check_buckets(buckets)
    name = "a row" if row is None else f"row {row} (counted from 0)"
    if length < 1:
        raise errors.InputError(f"{name} has no tokens")
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise errors.InputError(
        f"{name} has {length} tokens, more than the longest bucket, {buckets[-1]}:"
        " shorten it or add a longer bucket"
    )


def pad_to_bucket(
    rows: Rows, length: int, num_rows: int | None = None
) -> tuple[Int32[np.ndarray, "B S"], Bool[np.ndarray, "B S"]]:
    """Pads rows on the right to one length.

    Args:
        rows: token ids.
        length: of every row afterwards.
        num_rows: how many rows to return; the rest is padding. Default: as given.

    Returns:
        The ids and a mask of the real ones.

    Raises:
        InputError: a row is longer than `length`, or there are more than `num_rows`.
    """
    num_rows = len(rows) if num_rows is None else num_rows
    if len(rows) > num_rows:
        raise errors.InputError(f"{len(rows)} rows do not fit a batch of {num_rows}")
    ids = np.full((num_rows, length), PAD_ID, np.int32)
    mask = np.zeros((num_rows, length), bool)
    for number, row in enumerate(rows):
        bucket_length(len(row), (length,), number)
        ids[number, : len(row)] = row
        mask[number, : len(row)] = True
    return ids, mask


def inference_batches(
    rows: Rows, batch_size: int, buckets: Sequence[int]
) -> Iterator[InferenceBatch]:
    """Batches of one size, each of one bucket; as many shapes as buckets in use.

    Args:
        rows: source token ids.
        batch_size: rows of every batch; the last of a bucket is filled up.
        buckets: increasing lengths in tokens.

    Returns:
        An iterator over the batches, short buckets first, rows in order within a
        bucket. All rows are checked before the first batch.

    Raises:
        InputError: a row is empty or too long, or `batch_size` is below 1.
    """
    if batch_size < 1:
        raise errors.InputError(f"batch_size is {batch_size}; it must be at least 1")
    buckets = check_buckets(buckets)
    lengths = [bucket_length(len(row), buckets, at) for at, row in enumerate(rows)]
    return _inference_batches(rows, batch_size, np.array(lengths, np.int64))


def _inference_batches(
    rows: Rows, batch_size: int, lengths: np.ndarray
) -> Iterator[InferenceBatch]:
    for bucket in np.unique(lengths):
        members = np.flatnonzero(lengths == bucket)
        for start in range(0, len(members), batch_size):
            chosen = members[start : start + batch_size]
            inputs, mask, indices = _padded(rows, chosen, int(bucket), batch_size)
            yield InferenceBatch(inputs, mask, indices, indices >= 0)


def _padded(
    rows: Rows, chosen: np.ndarray, length: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, mask = pad_to_bucket([rows[at] for at in chosen], length, num_rows)
    # Attention over nothing at all is NaN in some models: let filling rows read EOS.
    ids[len(chosen) :, 0] = EOS_ID
    mask[len(chosen) :, 0] = True
    indices = np.full(num_rows, -1, np.int32)
    indices[: len(chosen)] = chosen
    return ids, mask, indices


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which batches an epoch consists of, up to their order.

    Attributes:
        members: for each bucket in use the indices of its examples.
        lengths: for each bucket in use its source and target length in tokens.
        num_rows: for each bucket in use the rows of a batch.
    """

    members: tuple[np.ndarray, ...]
    lengths: tuple[tuple[int, int], ...]
    num_rows: tuple[int, ...]

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has; every epoch has as many."""
        return sum(
            -(-len(members) // rows)
            for members, rows in zip(self.members, self.num_rows, strict=True)
        )


def bucket_shapes(buckets: Buckets) -> tuple[tuple[int, int], ...]:
    """The source and target length of each bucket.

    Args:
        buckets: all numbers, which hold for both sides and increase, or all pairs
            (source, target), in any order: summaries are short and their sources long.

    Raises:
        InputError: they are neither, or one is below 1 or stands twice.
    """
    # What a command line gives may be anything.
    listed: Sequence[Any] = buckets if isinstance(buckets, list | tuple) else [buckets]
    if all(type(bucket) is int for bucket in listed):
        return tuple((length, length) for length in check_buckets(listed))
    for bucket in listed:
        pair = bucket if isinstance(bucket, list | tuple) else ()
        if [type(length) for length in pair] != [int, int]:
            raise errors.InputError(
                f"length buckets {buckets!r} are wrong: all whole numbers, or all "
                "pairs of a source's and a target's length"
            )
    shapes = tuple((source, target) for source, target in listed)
    if min(map(min, shapes)) < 1 or len(set(shapes)) < len(shapes):
        raise errors.InputError(
            f"length buckets {list(buckets)} are wrong: lengths must be positive, and "
            "each pair stand once"
        )
    return shapes


def source_lengths(buckets: Buckets) -> tuple[int, ...]:
    """The buckets' source lengths, in order: what `inference_batches` takes."""
    return tuple(sorted({source for source, _ in bucket_shapes(buckets)}))


def which_bucket(examples: Examples, buckets: Buckets) -> Int32[np.ndarray, " N"]:
    """For each example the number of the smallest bucket that holds both sides.

    Args:
        examples: source and target token ids.
        buckets: see `bucket_shapes`; the smallest has the fewest positions in all.

    Returns:
        Numbers of buckets; -1 where none holds the example, or a side is empty.
    """
    shapes = np.array(bucket_shapes(buckets), np.int64)
    sizes = np.array([(len(s), len(t)) for s, t in examples], np.int64).reshape(-1, 2)
    which = np.full(len(sizes), -1, np.int32)
    # From the largest to the smallest: the last that holds an example stays.
    for bucket in np.argsort(-shapes.sum(1), kind="stable"):
        which[(sizes <= shapes[bucket]).all(1)] = bucket
    which[(sizes < 1).any(1)] = -1
    return which


def plan_batches(
    examples: Examples,
    tokens_per_batch: int,
    buckets: Buckets,
    multiple_of: int = 1,
) -> Plan:
    """Sorts examples into buckets and sets each bucket's batch size.

    Args:
        examples: source and target token ids.
        tokens_per_batch: positions of a batch, padding included, at most: the mean of
            source and target. But a batch has never fewer than `multiple_of` rows.
        buckets: see `bucket_shapes`; an example goes to the smallest that holds it.
        multiple_of: what the rows of a batch must divide by (devices of a mesh).

    Returns:
        The plan.

    Raises:
        InputError: an example is empty on one side or fits no bucket.
    """
    if tokens_per_batch < 1 or multiple_of < 1:
        raise errors.InputError(
            f"tokens_per_batch is {tokens_per_batch} and multiple_of {multiple_of};"
            " both must be at least 1"
        )
    if len(examples) == 0:
        raise errors.InputError("there are no examples to train on")
    shapes = bucket_shapes(buckets)
    which = which_bucket(examples, buckets)
    bad = np.flatnonzero(which < 0)
    if bad.size:
        source, target = map(len, examples[bad[0]])
        raise errors.InputError(
            f"example {bad[0]} (counted from 0; {bad.size} such in all) has {source}"
            f" source and {target} target tokens, and no bucket holds both: "
            f"{list(buckets)}"
        )
    used = np.unique(which)
    rows = [
        max(1, 2 * tokens_per_batch // sum(shapes[b]) // multiple_of) * multiple_of
        for b in used
    ]
    return Plan(
        members=tuple(np.flatnonzero(which == bucket) for bucket in used),
        lengths=tuple(shapes[b] for b in used),
        num_rows=tuple(rows),
    )


def epoch_batches(
    examples: Examples, plan: Plan, seed: int, epoch: int, start: int = 0
) -> Iterator[Batch]:
    """The batches of one epoch, every example once, in an order of (seed, epoch) alone.

    Args:
        examples: what the plan was made from.
        plan: see `plan_batches`.
        seed: of the order.
        epoch: number of the epoch; each has another order.
        start: how many batches to leave out, which costs nothing.

    Yields:
        Batches from number `start` on. The last of each bucket is filled up with rows
        without targets.
    """
    rng = np.random.default_rng((seed, epoch))
    # One entry a batch: which bucket, and which slice of the shuffled members.
    shuffled = [rng.permutation(members) for members in plan.members]
    batches = [
        (bucket, first)
        for bucket, members in enumerate(shuffled)
        for first in range(0, len(members), plan.num_rows[bucket])
    ]
    for at in rng.permutation(len(batches))[start:]:
        bucket, first = batches[at]
        num_rows = plan.num_rows[bucket]
        source_length, target_length = plan.lengths[bucket]
        chosen = shuffled[bucket][first : first + num_rows]
        inputs, input_mask, indices = _padded(
            [source for source, _ in (examples[at] for at in chosen)],
            np.arange(len(chosen)),
            source_length,
            num_rows,
        )
        indices[: len(chosen)] = chosen
        targets, target_mask = pad_to_bucket(
            [examples[at][1] for at in chosen], target_length, num_rows
        )
        yield Batch(inputs, input_mask, targets, target_mask, indices)


def training_batches(
    examples: Examples,
    tokens_per_batch: int,
    buckets: Buckets,
    seed: int,
    position: Position = Position(),
    multiple_of: int = 1,
) -> Iterator[tuple[Batch, Position]]:
    """Batches without end, epoch after epoch, from any position on.

    Args:
        examples: source and target token ids.
        tokens_per_batch: see `plan_batches`.
        buckets: see `plan_batches`.
        seed: of the order.
        position: where to begin; save the position that came with the last batch to
            go on after it.
        multiple_of: see `plan_batches`.

    Returns:
        An iterator over batches, each with the position that follows it. The examples
        are checked before the first batch.

    Raises:
        InputError: see `plan_batches`; or the position is not in this data.
    """
    plan = plan_batches(examples, tokens_per_batch, buckets, multiple_of)
    if position.epoch < 0 or not 0 <= position.index < plan.num_batches:
        raise errors.InputError(
            f"{position} is not in this data: an epoch has {plan.num_batches} batches;"
            " resume with the examples, tokens per batch and buckets of the first run"
        )
    return _training_batches(examples, plan, seed, position)


def _training_batches(
    examples: Examples, plan: Plan, seed: int, position: Position
) -> Iterator[tuple[Batch, Position]]:
    epoch, index = position.epoch, position.index
    while True:
        for batch in epoch_batches(examples, plan, seed, epoch, index):
            index += 1
            last = index == plan.num_batches
            yield batch, Position(epoch + 1, 0) if last else Position(epoch, index)
        epoch, index = epoch + 1, 0
