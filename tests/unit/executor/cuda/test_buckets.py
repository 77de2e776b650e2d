"""Sizes that are captured, and which one serves a batch."""

from __future__ import annotations

import pytest

from services.executor.backends.cuda.buckets import Bucket, buckets, find_bucket


def test_every_batch_within_the_limits_has_a_bucket_and_little_of_it_is_padding() -> None:
    found = buckets(64, 4, 20_000)
    for sequences in range(1, 65):
        for queries in range(1, 5):
            bucket = find_bucket(found, sequences, queries, 20_000)
            assert bucket is not None
            assert bucket.sequences >= sequences
            assert bucket.queries >= queries
            assert bucket.sequences <= max(2 * sequences, sequences + 8)
    assert find_bucket(found, 65, 1, 10) is None
    assert find_bucket(found, 1, 5, 10) is None
    assert find_bucket(found, 1, 1, 20_001) is None


def test_large_sizes_come_first_and_contexts_decide_into_how_many_parts_they_are_split() -> None:
    found = buckets(2, 1, 20_000)
    assert found[0] == Bucket(2, 1, 20_000)
    assert [bucket.rows for bucket in found] == sorted((bucket.rows for bucket in found), reverse=True)
    assert find_bucket(found, 1, 1, 2048) == Bucket(1, 1, 2048)
    assert find_bucket(found, 1, 1, 2049) == Bucket(1, 1, 16384)


@pytest.mark.parametrize(("most", "count"), [(1, 1), (3, 3), (64, 15), (256, 24)])
def test_there_are_few_sizes(most: int, count: int) -> None:
    sizes = [bucket.sequences for bucket in buckets(most, 1, 100)]
    assert sizes[0] == most
    assert sizes[-1] == 1
    assert len(sizes) <= count
