"""Forks: what is shared, what is copied, what comes back; and where a fork is a reservation like any other."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from services.kvmanager import messages
from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import GroupBlocks, Reservation, ReservationAnswer, Restated
from tests.unit.kvmanager.helpers import MODEL, ids, manager, only_executor, reservation

BLOCK = 4


def forked(sequence_id: int, tokens: list[int], length: int, parent: int = 1) -> Reservation:
    wanted = reservation(sequence_id, tokens)
    return replace(wanted, tokens=array("i", tokens), parent_sequence_id=parent, parent_length=length)


def granted(answer: ReservationAnswer | None) -> ReservationAnswer:
    assert answer is not None
    assert answer.outcome == Outcome.GRANTED
    return answer


def test_full_blocks_are_shared_and_the_rest_is_copied() -> None:
    made, session = manager()
    parent = granted(made.reserve(session, reservation(1, range(10))))
    made.progress(session, 1, 10, [])
    answer = granted(made.reserve(session, forked(2, [*range(10), 77], 10)))
    assert answer.cached_tokens == 10
    assert ids(answer)[:2] == ids(parent)[:2]
    assert not set(ids(answer)[2:]) & set(ids(parent))
    (copy,) = messages.write_reservation(answer).copies
    assert (copy.source_block_id, copy.destination_block_id) == (ids(parent)[2], ids(answer)[2])
    assert copy.operation_id >= made.first_operation_id
    made.progress(session, 2, 11, [])
    assert made.verify() == []
    made.release(session, 1)
    made.progress(session, 2, 12, [78, 79])
    assert made.verify() == []
    made.release(session, 2)
    assert made.verify() == []
    assert only_executor(made).pools[0].blocks.leased_count == 0


def test_blocks_are_found_by_what_a_fork_computed() -> None:
    made, session = manager()
    granted(made.reserve(session, reservation(1, range(6))))
    made.progress(session, 1, 6, [])
    tokens = [*range(6), 50, 51]
    answer = granted(made.reserve(session, forked(2, tokens, 6)))
    made.progress(session, 2, 8, [])
    made.release(session, 2)
    again = granted(made.reserve(session, reservation(3, [*tokens, 52])))
    assert again.cached_tokens == 8
    assert ids(again)[:2] == ids(answer)[:2]


def test_at_the_end_of_a_block_nothing_is_copied() -> None:
    made, session = manager()
    parent = granted(made.reserve(session, reservation(1, range(8))))
    made.progress(session, 1, 8, [])
    answer = granted(made.reserve(session, forked(2, [*range(8), 5], 8)))
    assert answer.copies == []
    assert ids(answer)[:2] == ids(parent)


@pytest.mark.parametrize(
    ("tokens", "length", "parent"),
    [
        ([*range(10), 9], 10, 3),  # nobody's
        ([*range(9), 55, 9], 10, 1),  # other tokens
        ([*range(10), 9], 11, 1),  # nothing would be left to compute
        ([*range(10), 9], 0, 1),
        ([*range(16)], 13, 1),  # more than the parent has computed
    ],
)
def test_what_cannot_be_forked_is_reserved_like_any_other(tokens: list[int], length: int, parent: int) -> None:
    made, session = manager()
    granted(made.reserve(session, reservation(1, range(10))))
    made.progress(session, 1, 10, [])
    answer = granted(made.reserve(session, forked(2, tokens, length, parent)))
    assert answer.copies == ()
    assert answer.cached_tokens == 8
    assert made.verify() == []


def test_neither_another_namespace_nor_what_is_not_computed_is_shared() -> None:
    made, session = manager()
    granted(made.reserve(session, reservation(1, range(10))))
    wanted = forked(2, [*range(10), 9], 10)
    other = replace(wanted, key_space=replace(wanted.key_space, namespace="other"))
    for answer in (made.reserve(session, other), made.reserve(session, replace(wanted, sequence_id=3))):
        assert answer is None or (answer.cached_tokens, answer.copies) == (0, ())
    assert made.verify() == []


def test_without_room_for_its_copy_a_fork_waits() -> None:
    made, session = manager()
    pool = only_executor(made).pools[0]
    granted(made.reserve(session, reservation(1, range(10))))
    made.progress(session, 1, 10, [])
    granted(made.reserve(session, reservation(2, range(100, 100 + BLOCK * pool.blocks.available_count))))
    answer = made.reserve(session, forked(3, [*range(10), 9], 10))
    assert answer is not None
    assert answer.outcome == Outcome.NO_BLOCKS
    assert made.verify() == []


def test_forks_are_held_again_after_a_restart() -> None:
    """Blocks that two hold are stated twice, the copied one once."""
    made, session = manager()
    parent = granted(made.reserve(session, reservation(1, range(10))))
    made.progress(session, 1, 10, [])
    answer = granted(made.reserve(session, forked(2, [*range(10), 77], 10)))
    again, anew = manager()
    for sequence_id, tokens, held in ((1, range(10), parent), (2, [*range(10), 77], answer)):
        groups = [GroupBlocks(0, ids(held))]
        key_space = KeySpace(MODEL, "default")
        again.restate(anew, Restated(sequence_id, "e", 1, key_space, array("i", tokens), 10, groups, []))
    assert [rebuilt.problem for rebuilt in again.take_restated()] == ["", ""]
    assert again.verify() == []
    _assert_released(again, anew)


def _assert_released(made: KvManager, session: object) -> None:
    for sequence_id in (2, 1):
        made.release(session, sequence_id)  # type: ignore[arg-type]
    assert made.verify() == []
    assert only_executor(made).pools[0].blocks.leased_count == 0
