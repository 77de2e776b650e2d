"""Reserving, extending and releasing: exact blocks, all or nothing."""

from __future__ import annotations

import pytest

from services.kvmanager.holdings import Refused
from services.kvmanager.keys import KeySpace
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor, Reservation
from tests.unit.kvmanager.helpers import compute, eviction_order, executor, free_order, ids, manager, pool, reservation


@pytest.mark.parametrize(
    ("tokens", "lookahead", "blocks"), [(1, 0, 1), (4, 0, 1), (4, 1, 2), (5, 0, 2), (5, 3, 2), (5, 4, 3), (32, 0, 8)]
)
def test_exactly_the_blocks_for_tokens_and_lookahead(tokens: int, lookahead: int, blocks: int) -> None:
    made, session = manager()
    answer = made.reserve(session, reservation(1, range(tokens), lookahead=lookahead))
    assert answer.outcome == Outcome.GRANTED
    assert ids(answer) == list(range(blocks))
    assert free_order(made) == list(range(blocks, 8))
    assert (answer.executor_id, answer.node, answer.cached_tokens) == ("e", -1, 0)


def test_block_ids_start_at_the_pools_first() -> None:
    made, session = manager(executor("e", pool(first=100)))
    assert ids(made.reserve(session, reservation(1, range(6)))) == [100, 101]
    (group,) = made.extend(session, 1, 9).blocks
    assert (group.group_id, group.block_ids) == (0, [102])


def test_no_blocks_changes_nothing() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(20)))
    before = free_order(made)
    answer = made.reserve(session, reservation(2, range(16)))
    assert (answer.outcome, answer.reasons) == (Outcome.NO_BLOCKS, ["e node -1: needs 4 new blocks, 3 available"])
    assert made.extend(session, 1, 33).outcome == Outcome.NEVER_FITS
    made.reserve(session, reservation(3, range(4)))
    assert made.extend(session, 1, 32).outcome == Outcome.NO_BLOCKS
    assert free_order(made) == before[1:]
    assert 2 not in session.holdings
    assert made.verify() == []


def test_never_fits_is_told_apart_from_no_blocks() -> None:
    made, session = manager()
    assert made.reserve(session, reservation(1, range(33))).outcome == Outcome.NEVER_FITS
    assert made.reserve(session, reservation(1, range(30), lookahead=3)).outcome == Outcome.NEVER_FITS
    assert made.reserve(session, reservation(1, range(32))).outcome == Outcome.GRANTED


def test_extend_adds_up_to_a_total_and_nothing_below_what_is_held() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(5)))
    assert made.extend(session, 1, 8) == made.extend(session, 1, 1)
    assert made.extend(session, 1, 8).outcome == Outcome.GRANTED
    assert not made.extend(session, 1, 8).blocks
    assert made.extend(session, 1, 9).blocks == [(0, [2])]
    assert not made.extend(session, 1, 9).blocks
    assert made.extend(session, 1, 32).blocks == [(0, [3, 4, 5, 6, 7])]


@pytest.mark.parametrize(("sequence_id", "slots"), [(2, 8), (1, 0), (1, -1)])
def test_malformed_extensions_are_invalid(sequence_id: int, slots: int) -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(5)))
    answer = made.extend(session, sequence_id, slots)
    assert (answer.outcome, answer.blocks) == (Outcome.INVALID, ())
    assert answer.problem
    assert free_order(made) == [2, 3, 4, 5, 6, 7]


def test_release_frees_once_and_the_same_blocks_come_back_in_order() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(12)))
    made.reserve(session, reservation(2, range(100, 104)))
    made.release(session, 1)
    assert free_order(made) == [0, 1, 2, 4, 5, 6, 7]
    with pytest.raises(Refused, match="unknown sequence"):
        made.release(session, 1)
    assert free_order(made) == [0, 1, 2, 4, 5, 6, 7]
    assert ids(made.reserve(session, reservation(3, range(8)))) == [0, 1]
    assert made.verify() == []


def good() -> Reservation:
    return reservation(2, range(5))


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (reservation(1, range(5)), "sequence_id: already reserved"),
        (reservation(0, range(5)), "sequence_id: must be positive, not 0"),
        (reservation(2, []), "token_ids: at least one is needed"),
        (reservation(2, [3, -1]), "token_ids: negative token id"),
        (reservation(2, [3], lookahead=-1), "lookahead_tokens: must not be negative, not -1"),
        (reservation(2, [3], model=""), "model_fingerprint: must be set"),
        (
            Reservation(2, KeySpace("m", "n", adapter="lora"), good().tokens, 0, good().executors),
            "adapter: not supported",
        ),
        (
            Reservation(2, KeySpace("m", "n", kv_policy="int4"), good().tokens, 0, good().executors),
            "kv_policy: 'int4' is no KV policy such as 'hot:512,int8:2048,int4'",
        ),
    ],
)
def test_malformed_reservations_are_invalid_and_say_why(wanted: Reservation, problem: str) -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(5)))
    answer = made.reserve(session, wanted)
    assert (answer.outcome, answer.reasons, answer.blocks) == (Outcome.INVALID, [problem], ())
    assert list(session.holdings) == [1]
    assert free_order(made) == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "wanted",
    [
        reservation(1, [1], on=()),
        reservation(1, [1], on=("unknown",)),
        reservation(1, [1], model="b" * 64),
        reservation(1, [1], on=[AllowedExecutor("e", 0)]),  # an epoch that is over
    ],
)
def test_no_executor(wanted: Reservation) -> None:
    made, session = manager()
    assert made.reserve(session, wanted).outcome == Outcome.NO_EXECUTOR


def test_a_scheduler_may_know_a_newer_epoch_than_the_executor_has_reported() -> None:
    made, session = manager()
    assert made.reserve(session, reservation(1, [1], on=[AllowedExecutor("e", 2)])).outcome == Outcome.GRANTED


def test_schedulers_have_sequence_ids_of_their_own() -> None:
    made, session = manager()
    other = made.open_session("other", now=0.0)
    assert ids(made.reserve(session, reservation(1, [1]))) == [0]
    assert ids(made.reserve(other, reservation(1, [1]))) == [1]
    made.release(session, 1)
    assert free_order(made) == [0, 2, 3, 4, 5, 6, 7]


def test_the_less_loaded_executor_is_chosen_and_the_full_one_avoided() -> None:
    made, session = manager(executor("a"), executor("b"))
    busy, idle = AllowedExecutor("a", 1, running_count=3), AllowedExecutor("b", 1)
    assert made.reserve(session, reservation(1, range(30), on=(busy, idle))).executor_id == "b"
    assert made.reserve(session, reservation(2, range(30), on=(busy, idle))).executor_id == "a"
    assert made.reserve(session, reservation(3, range(30), on=(busy, idle))).outcome == Outcome.NO_BLOCKS


def test_pools_of_several_nodes_are_separate_places() -> None:
    made, session = manager(executor("e", pool(4, nodes=(0,)), pool(4, first=4, pool_id=1, nodes=(1,))))
    first = made.reserve(session, reservation(1, range(9)))
    second = made.reserve(session, reservation(2, range(100, 109)))
    assert (first.node, ids(first)) == (0, [0, 1, 2])
    assert (second.node, ids(second)) == (1, [4, 5, 6])
    assert made.reserve(session, reservation(3, range(9))).outcome == Outcome.NO_BLOCKS  # no sequence spans nodes
    assert made.reserve(session, reservation(3, range(17))).outcome == Outcome.NEVER_FITS
    assert made.verify() == []


def test_groups_have_lists_of_their_own() -> None:
    """A draft with blocks of 8 beside a target with blocks of 4; ids of different groups may coincide."""
    made, session = manager(executor("e", pool(8, 4), pool(3, 8, pool_id=1, group=1)))
    answer = made.reserve(session, reservation(1, range(9), lookahead=1))
    assert answer.blocks == [(0, [0, 1, 2]), (1, [0, 1])]
    assert made.extend(session, 1, 13).blocks == [(0, [3])]
    assert made.extend(session, 1, 17).blocks == [(0, [4]), (1, [2])]
    assert made.extend(session, 1, 25).outcome == Outcome.NEVER_FITS  # of group 1
    assert made.reserve(session, reservation(2, range(4))).outcome == Outcome.NO_BLOCKS  # in group 1
    compute(made, session, 1)
    made.release(session, 1)
    assert made.reserve(session, reservation(2, range(10))).cached_tokens == 8
    assert made.verify() == []


def test_eviction_makes_room_oldest_and_leaf_first() -> None:
    made, session = manager()
    made.reserve(session, reservation(1, range(12)))
    made.reserve(session, reservation(2, range(50, 58)))
    for sequence in (2, 1):
        compute(made, session, sequence)
        made.release(session, sequence)
    assert eviction_order(made) == [4, 3, 2, 1, 0]
    assert ids(made.reserve(session, reservation(3, range(80, 104)))) == [5, 6, 7, 4, 3, 2]
    assert made.evicted_count == 3
    assert made.reserve(session, reservation(4, range(12), lookahead=0)).outcome == Outcome.NO_BLOCKS
    made.release(session, 3)
    answer = made.reserve(session, reservation(4, range(12)))
    assert (answer.cached_tokens, ids(answer)) == (8, [0, 1, 5])
    assert made.verify() == []
