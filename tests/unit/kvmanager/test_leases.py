"""What becomes of a lost scheduler's blocks."""

from __future__ import annotations

import pytest

from services.kvmanager.holdings import Refused
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor
from tests.unit.kvmanager.helpers import LEASE, compute, executor, free_order, ids, manager, only_executor, reservation


def test_d2_blocks_stay_held_until_the_lease_ended_and_the_epoch_is_closed() -> None:
    """D2: a frozen executor may still write, however long ago its scheduler died."""
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.end_session(session, now=100.0)
    assert made.reclaim(now=1e9) == set()
    assert made.sequence_count == 1
    made.report("e", 2, [1])
    assert made.reclaim(now=1e9) == {"e"}
    assert free_order(made) == list(range(8))
    assert made.sessions == []
    assert made.verify() == []


def test_d2_a_closed_epoch_alone_frees_nothing_before_the_lease_ended() -> None:
    """D2: the scheduler's stream may come back."""
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.end_session(session, now=100.0)
    made.report("e", 2, [1])
    assert made.reclaim(now=100.0 + LEASE - 0.01) == set()
    assert made.reclaim(now=100.0 + LEASE) == {"e"}
    assert made.reclaim(now=100.0 + LEASE) == set()


def test_d2_late_and_repeated_confirmations_change_nothing() -> None:
    """D2: they are ignored, not fatal."""
    made, session = manager(epoch=5)
    made.reserve(session, reservation(1, range(8), on=[AllowedExecutor("e", 5)]))
    made.end_session(session, now=0.0)
    for closed in ([3], [3], [4], []):
        made.report("e", 5, closed)
        assert made.reclaim(now=1e9) == set()
    with pytest.raises(Refused, match="epoch 9 cannot be closed: the newest is 5"):
        made.report("e", 5, [9])
    made.report("e", 4, [])  # older than known
    assert only_executor(made).epoch == 5
    assert only_executor(made).closed_through == 4
    made.report("e", 5, [5, 5])
    assert made.reclaim(now=1e9) == {"e"}
    made.report("e", 5, [5])
    assert made.reclaim(now=1e9) == set()
    assert made.verify() == []


def test_a_closed_epoch_takes_no_sequences() -> None:
    made, session = manager()
    made.report("e", 1, [1])
    assert made.reserve(session, reservation(1, [1])).outcome == Outcome.NO_EXECUTOR


def test_a_live_schedulers_blocks_are_its_own_to_release() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.report("e", 2, [1])
    assert made.reclaim(now=1e9) == set()
    made.unregister("e")
    assert made.reclaim(now=1e9) == set()
    assert made.release(session, 1) == "e"
    assert made.executors == {}


def test_a_lost_schedulers_blocks_on_a_lost_executor_go_with_the_lease() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.end_session(session, now=0.0)
    made.unregister("e")
    assert made.reclaim(now=LEASE - 1) == set()
    assert list(made.executors) == ["e"]
    assert made.reclaim(now=LEASE) == {"e"}
    assert made.executors == {}
    assert made.verify() == []


def test_a_new_stream_of_the_same_scheduler_ends_the_old_ones_lease() -> None:
    """It says that it holds nothing: only the epochs are waited for. Its ids are free to use again."""
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    newer = made.open_session("s", now=1.0)
    assert made.reclaim(now=1.0) == set()
    assert ids(made.reserve(newer, reservation(1, range(8)))) == [2, 3]
    made.report("e", 2, [1])
    assert made.reclaim(now=1.0) == {"e"}
    assert free_order(made) == [0, 1, 4, 5, 6, 7]
    made.end_session(session, now=2.0)  # the older stream's end comes late
    assert made.sessions == [newer]
    assert made.verify() == []


def test_another_schedulers_stream_ends_nothing() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    made.open_session("other", now=1.0)
    made.report("e", 2, [1])
    assert made.reclaim(now=1e9) == set()


def test_reclaimed_prefixes_stay_cached() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(8)))
    compute(made, session, 1)
    newer = made.open_session("s", now=1.0)
    made.report("e", 2, [1])
    made.reclaim(now=1.0)
    assert made.reserve(newer, reservation(1, range(9), on=["e2"])).outcome == Outcome.NO_EXECUTOR
    assert made.reserve(newer, reservation(1, range(9), on=[AllowedExecutor("e", 2)])).cached_tokens == 8


def test_d2_a_hundred_lost_schedulers_leak_nothing() -> None:
    """D2: on a small pool, with the executor gone in every other round."""
    made, session = manager()
    for round_number in range(1, 101):
        now = 100.0 * round_number
        epoch = only_executor(made).epoch
        on = [AllowedExecutor("e", epoch)]
        for sequence in (1, 2, 3):
            assert made.reserve(session, reservation(sequence, [sequence] * 7, on=on)).outcome == Outcome.GRANTED
        made.end_session(session, now)
        if round_number % 2:
            made.report("e", epoch + 1, [epoch])
        else:
            made.unregister("e")
            made.register(executor(), [], epoch + 1)
        made.reclaim(now + LEASE)
        assert only_executor(made).available_count == 8
        assert made.verify() == []
        session = made.open_session("s", now + LEASE)
