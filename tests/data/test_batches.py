"""Batches: few shapes, every row once, and the same order after a restart."""

import collections
import inspect
import itertools

import numpy as np
import pytest

from specjax import errors
from specjax.data import batches

BUCKETS = (4, 8, 16)


def _rows(count: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [
        [*rng.integers(2, 90, rng.integers(0, 16)).tolist(), 1] for _ in range(count)
    ]


def _examples(count: int) -> list[tuple[list[int], list[int]]]:
    return list(zip(_rows(count), _rows(count, 1), strict=True))


def test_bucket_length_takes_the_shortest_that_holds_the_row():
    assert [batches.bucket_length(n, BUCKETS) for n in (1, 4, 5, 8, 16)] == [
        4,
        4,
        8,
        8,
        16,
    ]


@pytest.mark.parametrize(
    ("length", "message"),
    [(17, "row 3 .* has 17 tokens, more than the longest bucket, 16"), (0, "row 3")],
)
def test_bucket_length_names_the_row(length, message):
    with pytest.raises(errors.InputError, match=message):
        batches.bucket_length(length, BUCKETS, 3)


@pytest.mark.parametrize("buckets", [(), (0, 4), (8, 4), (4, 4)])
def test_wrong_buckets_are_refused(buckets):
    with pytest.raises(errors.InputError, match="buckets"):
        batches.check_buckets(buckets)
    with pytest.raises(errors.InputError, match="buckets"):
        batches.bucket_length(1, buckets)


def test_padding_is_masked():
    ids, mask = batches.pad_to_bucket([[5, 1], [7, 0, 8, 1]], 4, 3)
    np.testing.assert_array_equal(ids, [[5, 1, 0, 0], [7, 0, 8, 1], [0, 0, 0, 0]])
    np.testing.assert_array_equal(mask.sum(1), [2, 4, 0])
    assert mask[1, 1] and ids.dtype == np.int32 and mask.dtype == bool
    with pytest.raises(errors.InputError, match="row 0"):
        batches.pad_to_bucket([[1] * 5], 4)
    with pytest.raises(errors.InputError, match="2 rows"):
        batches.pad_to_bucket([[1], [1]], 4, 1)


@pytest.mark.parametrize("batch_size", [1, 3, 7, 64])
def test_inference_restores_the_order(batch_size):
    rows = _rows(41)
    restored = [None] * len(rows)
    shapes = set()
    for batch in batches.inference_batches(rows, batch_size, BUCKETS):
        shapes.add(batch.inputs.shape)
        assert batch.inputs.shape[0] == batch_size
        assert batch.mask.any(1).all(), "a row without any input makes NaN"
        np.testing.assert_array_equal(batch.valid, batch.rows >= 0)
        for row, ids, mask in zip(batch.rows, batch.inputs, batch.mask, strict=True):
            if row >= 0:
                assert restored[row] is None
                restored[row] = ids[mask].tolist()
    assert restored == rows
    assert shapes == {(batch_size, bucket) for bucket in BUCKETS}


def test_inference_refuses_before_the_first_batch():
    with pytest.raises(errors.InputError, match="row 1"):
        batches.inference_batches([[1], [1] * 17], 2, BUCKETS)
    with pytest.raises(errors.InputError, match="batch_size is 0"):
        batches.inference_batches([[1]], 0, BUCKETS)


def _epoch(examples, epoch=0, seed=0, start=0):
    plan = batches.plan_batches(examples, 48, BUCKETS)
    return list(batches.epoch_batches(examples, plan, seed, epoch, start))


def test_an_epoch_holds_every_example_once():
    examples = _examples(200)
    seen = collections.Counter()
    for batch in _epoch(examples):
        for at, row in enumerate(batch.rows.tolist()):
            if row < 0:
                assert not batch.target_mask[at].any()
                assert batch.input_mask[at].sum() == 1
                continue
            seen[row] += 1
            source, target = examples[row]
            assert batch.inputs[at][batch.input_mask[at]].tolist() == source
            assert batch.targets[at][batch.target_mask[at]].tolist() == target
    assert seen == collections.Counter(range(200))


def test_shapes_are_few_and_equal_in_tokens():
    shapes = {batch.targets.shape for batch in _epoch(_examples(200))}
    assert shapes == {(12, 4), (6, 8), (3, 16)}


def test_order_depends_on_seed_and_epoch_alone():
    examples = _examples(100)

    def order(**settings):
        return [batch.rows.tolist() for batch in _epoch(examples, **settings)]

    assert order() == order()
    assert order() != order(epoch=1)
    assert order() != order(seed=1)
    # A twin that adds seed and epoch would repeat itself.
    assert order(seed=1, epoch=0) != order(seed=0, epoch=1)


def test_batches_come_in_mixed_lengths():
    lengths = [batch.targets.shape[1] for batch in _epoch(_examples(400))]
    assert lengths != sorted(lengths)


def test_training_resumes_at_any_position():
    examples = _examples(60)

    def run(count, position):
        stream = batches.training_batches(examples, 48, BUCKETS, 3, position)
        return [
            (batch.rows.tolist(), after)
            for batch, after in itertools.islice(stream, count)
        ]

    per_epoch = batches.plan_batches(examples, 48, BUCKETS).num_batches
    whole = run(2 * per_epoch + 3, batches.Position())
    assert whole[per_epoch - 1][1] == batches.Position(1, 0)
    for done in (1, 5, per_epoch - 1, per_epoch, per_epoch + 1):
        rest = run(len(whole) - done, whole[done - 1][1])
        assert rest == whole[done:]


def test_a_position_of_other_data_is_refused():
    with pytest.raises(errors.InputError, match="not in this data"):
        batches.training_batches(_examples(10), 48, BUCKETS, 0, batches.Position(0, 99))


def test_rows_divide_by_the_devices():
    plan = batches.plan_batches(_examples(100), 48, BUCKETS, multiple_of=4)
    assert plan.num_rows == (12, 4, 4)


def test_source_and_target_may_have_their_own_buckets():
    examples = [([1] * 30, [1] * 2), ([1] * 3, [1] * 7), ([1] * 3, [1] * 2)]
    plan = batches.plan_batches(examples, 16, [(4, 4), (32, 8)])
    assert plan.lengths == ((4, 4), (32, 8))
    assert [members.tolist() for members in plan.members] == [[2], [0, 1]]
    # As many positions a batch, of both sides together.
    assert plan.num_rows == (4, 1)


def test_each_example_goes_to_the_smallest_bucket_that_holds_it():
    """Long sources with short targets beside rows of equal sides, in any order."""
    buckets = [(32, 4), (8, 8), (4, 4), (16, 16)]
    sizes = [(30, 4), (8, 5), (4, 4), (5, 4), (9, 3), (9, 16), (32, 5), (0, 3), (33, 1)]
    examples = [([1] * source, [1] * target) for source, target in sizes]
    which = batches.which_bucket(examples, buckets)
    assert which.tolist() == [0, 1, 2, 1, 3, 3, -1, -1, -1]
    assert batches.source_lengths(buckets) == (4, 8, 16, 32)
    assert batches.source_lengths((4, 8)) == (4, 8)


@pytest.mark.parametrize(
    "buckets",
    [
        ((4, 4), 8),
        ((4,),),
        ((4, 0),),
        ((4, 4), (4, 4)),
        ((1, 2, 3),),
        ((4.5, 8),),
        (None,),
        None,
        1.5,
        ("ab",),
        (True, 4),
    ],
)
def test_wrong_pairs_of_lengths_are_refused(buckets):
    with pytest.raises(errors.InputError, match="length buckets .* are wrong"):
        inspect.unwrap(batches.bucket_shapes)(buckets)


def test_examples_that_fit_nowhere_are_named():
    examples = [([1], [1]), ([1], [1] * 17), ([1] * 18, [1])]
    with pytest.raises(errors.InputError, match=r"example 1 .*2 such in all.* 17 targ"):
        batches.plan_batches(examples, 48, BUCKETS)
    with pytest.raises(errors.InputError, match="example 0"):
        batches.plan_batches([([], [1])], 48, BUCKETS)
    with pytest.raises(errors.InputError, match="no examples"):
        batches.plan_batches([], 48, BUCKETS)
    with pytest.raises(errors.InputError, match="tokens_per_batch is 0"):
        batches.plan_batches(examples[:1], 0, BUCKETS)
    with pytest.raises(errors.InputError, match="buckets"):
        batches.plan_batches(examples[:1], 48, (8, 4))
