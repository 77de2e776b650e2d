"""The choice among places."""

from __future__ import annotations

import dataclasses

from services.kvmanager.placement import RUNNING_TOKENS, Candidate, Need, Outcome, choose


def candidate(
    name: str = "e",
    *,
    cached: int = 0,
    running: int = 0,
    queued: int = 0,
    room: int = 50,
    total: int = 100,
    node: int = -1,
) -> Candidate:
    """A prompt of 128 tokens in blocks of 16."""
    new = 8 - cached // 16
    return Candidate(name, node, running, queued, 128, cached, (Need(new, room, 8, total),))


def chosen(*candidates: Candidate) -> str:
    decision = choose(candidates)
    assert decision.outcome == Outcome.GRANTED
    return candidates[decision.position].executor_id


def test_an_idle_executor_is_taken_before_a_busy_one() -> None:
    assert chosen(candidate("a", running=1), candidate("b")) == "b"


def test_a_cached_prefix_outweighs_a_few_running_sequences_but_not_many() -> None:
    assert chosen(candidate("a", cached=96, running=96 // RUNNING_TOKENS - 1), candidate("b")) == "a"
    assert chosen(candidate("a", cached=96, running=96 // RUNNING_TOKENS + 1), candidate("b")) == "b"


def test_queued_tokens_count_like_ones_own() -> None:
    assert chosen(candidate("a", cached=64, queued=65), candidate("b")) == "b"
    assert chosen(candidate("a", cached=64, queued=63), candidate("b")) == "a"


def test_equal_costs_go_to_the_emptiest_then_to_the_first_name_and_node() -> None:
    assert chosen(candidate("a", room=20), candidate("b", room=40)) == "b"
    assert chosen(candidate("b"), candidate("a")) == "a"
    assert choose([candidate(node=1), candidate(node=0)]).position == 1


def test_a_full_executor_is_passed_over_whatever_it_has_cached() -> None:
    assert chosen(candidate("a", cached=112, room=0), candidate("b", running=9)) == "b"


def test_exactly_enough_room_is_enough() -> None:
    assert choose([candidate(room=8)]).outcome == Outcome.GRANTED
    assert choose([candidate(room=7)]).outcome == Outcome.NO_BLOCKS


def test_never_fits_only_where_no_pool_is_large_enough() -> None:
    assert choose([candidate(total=7)]).outcome == Outcome.NEVER_FITS
    assert choose([candidate(total=8, room=8)]).outcome == Outcome.GRANTED
    assert choose([candidate(total=7), candidate(total=8, room=1)]).outcome == Outcome.NO_BLOCKS


def test_every_cache_group_must_fit() -> None:
    groups = Candidate("e", -1, 0, 0, 128, 0, (Need(8, 8, 8, 8), Need(4, 3, 4, 8)))
    assert choose([groups]).outcome == Outcome.NO_BLOCKS


def test_no_candidates_is_no_executor() -> None:
    assert choose([]).outcome == Outcome.NO_EXECUTOR


def test_reasons_name_what_decided() -> None:
    assert choose([candidate("a", cached=32, running=2, queued=5), candidate("b", room=0)]).reasons == [
        "32 of 128 tokens cached",
        "2 running, 5 tokens queued",
        f"cost {96 + 5 + 3 * RUNNING_TOKENS}, the least with room among 2",
    ]
    assert choose([candidate("b", room=3, node=1)]).reasons == ["b node 1: needs 8 new blocks, 3 available"]
    assert choose([candidate("b", total=6)]).reasons == ["b node -1: needs 8 KV blocks, has 6"]


def test_sequences_that_soon_end_weigh_less_than_those_that_stay() -> None:
    busy = dataclasses.replace(candidate("a", running=8), running_beside=1.0)
    assert chosen(busy, candidate("b", running=2)) == "a"
    assert chosen(candidate("a", running=8), candidate("b", running=2)) == "b"
