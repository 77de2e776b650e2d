"""Reservations that wait for a prefix which another sequence is computing."""

from __future__ import annotations

import pytest

from services.kvmanager.holdings import Session
from services.kvmanager.manager import KvManager
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor
from tests.unit.kvmanager.helpers import LEASE, compute, executor, ids, manager, only_executor, pool, reservation

PROMPT = list(range(14))  # three full blocks of four, and two tokens


def made_with_filler() -> tuple[KvManager, Session]:
    """Sequence 1 computes the prompt; 2 has asked for the same."""
    made, session = manager(executor("e", pool(32)))
    first = made.reserve(session, reservation(1, PROMPT))
    assert first is not None
    assert ids(first) == [0, 1, 2, 3]
    assert made.reserve(session, reservation(2, PROMPT)) is None
    assert made.answer_due() == []
    assert len(made.waiting) == 1
    return made, session


def outcomes(made: KvManager) -> list[tuple[int, str, int]]:
    """Due answers: sequence, outcome, cached tokens."""
    found = [(a.sequence_id, a.outcome.name, a.cached_tokens) for _, a in made.answer_due()]
    assert made.verify() == []
    return found


def test_two_equal_prompts_together_are_computed_once() -> None:
    made, session = made_with_filler()
    made.progress(session, 1, 8, [])
    assert outcomes(made) == []
    made.progress(session, 1, 12, [])
    ((owner, answer),) = made.answer_due()
    assert owner is session
    assert (answer.sequence_id, answer.cached_tokens, ids(answer)) == (2, 12, [0, 1, 2, 4])
    assert (made.prefix_query_tokens, made.prefix_hit_tokens) == (28, 12)
    assert made.outcomes == {Outcome.GRANTED: 2}


def test_a_shorter_prompt_waits_for_what_it_shares() -> None:
    made, session = manager(executor("e", pool(32)))
    made.reserve(session, reservation(1, PROMPT))
    assert made.reserve(session, reservation(2, [*PROMPT[:8], 99])) is None
    made.progress(session, 1, 8, [])
    assert outcomes(made) == [(2, "GRANTED", 8)]


def test_nothing_shared_waits_for_nothing() -> None:
    made, session = manager(executor("e", pool(32)))
    made.reserve(session, reservation(1, PROMPT))
    assert made.reserve(session, reservation(2, [99, *PROMPT])) is not None
    assert made.reserve(session, reservation(3, PROMPT[:4])) is not None  # its last token is computed anyway


def test_whoever_wants_every_position_computed_waits_for_nobody_and_is_waited_for() -> None:
    made, session = manager(executor("e", pool(32)))
    made.reserve(session, reservation(1, PROMPT, skip_prefix_cache=True))
    assert made.reserve(session, reservation(2, PROMPT, skip_prefix_cache=True)) is not None
    assert made.reserve(session, reservation(3, PROMPT)) is None
    made.progress(session, 1, 14, [])
    assert outcomes(made) == [(3, "GRANTED", 12)]


def test_content_that_another_had_first_still_ends_the_wait() -> None:
    """The filler's own blocks become nobody's content: it has come that far all the same."""
    made, session = manager(executor("e", pool(32)))
    made.reserve(session, reservation(1, PROMPT))
    made.reserve(session, reservation(2, PROMPT, skip_prefix_cache=True))
    assert made.reserve(session, reservation(3, PROMPT)) is None
    made.progress(session, 2, 14, [])
    _, sealed = made.progress(session, 1, 14, [])
    assert sealed == []
    assert outcomes(made) == [(3, "GRANTED", 12)]


def test_a_filler_that_is_released_leaves_what_it_computed() -> None:
    made, session = made_with_filler()
    made.progress(session, 1, 5, [])
    made.release(session, 1)
    assert outcomes(made) == [(2, "GRANTED", 4)]


def test_who_waits_longest_fills_next() -> None:
    made, session = made_with_filler()
    assert made.reserve(session, reservation(3, PROMPT)) is None
    assert made.reserve(session, reservation(4, PROMPT)) is None
    made.release(session, 1)
    assert outcomes(made) == [(2, "GRANTED", 0)]
    assert len(made.waiting) == 2
    compute(made, session, 2)
    assert outcomes(made) == [(3, "GRANTED", 12), (4, "GRANTED", 12)]


def test_answers_come_in_the_order_of_arrival_whatever_they_waited_for() -> None:
    made, session = manager(executor("e", pool(64)))
    other = [50 + token for token in PROMPT]
    made.reserve(session, reservation(1, PROMPT))
    made.reserve(session, reservation(2, other))
    for sequence_id, prompt in ((3, other), (4, PROMPT), (5, other[:9]), (6, PROMPT[:6])):
        assert made.reserve(session, reservation(sequence_id, prompt)) is None
    compute(made, session, 1)
    compute(made, session, 2)
    assert [sequence_id for sequence_id, _, _ in outcomes(made)] == [3, 4, 5, 6]


def test_namespaces_never_wait_for_each_other() -> None:
    made, session = made_with_filler()
    answer = made.reserve(session, reservation(3, PROMPT, namespace="other"))
    assert answer is not None
    assert answer.cached_tokens == 0


def test_a_scheduler_waits_for_anothers_sequence_until_its_stream_ends() -> None:
    made, session = made_with_filler()
    other = made.open_session("other", 0.0)
    assert made.reserve(other, reservation(2, PROMPT)) is None
    made.end_session(session, 1.0)
    ((owner, answer),) = made.answer_due()  # nothing says any more how far that sequence comes
    assert owner is other
    assert answer.cached_tokens == 0
    assert not len(made.waiting)  # nobody is there to hear the other one
    assert made.verify() == []


def test_a_lost_executor_is_waited_for_until_its_sequences_are_given_back() -> None:
    made, session = made_with_filler()
    made.unregister("e")
    assert outcomes(made) == []
    made.release(session, 1)
    assert outcomes(made) == [(2, "NO_EXECUTOR", 0)]


def test_a_replaced_executor_answers_anew() -> None:
    made, _ = made_with_filler()
    made.replace(executor("e", pool(32)), epoch=1).settle([])
    assert outcomes(made) == [(2, "GRANTED", 0)]


def test_a_cancelled_one_is_answered_no_more_and_its_id_is_free() -> None:
    made, session = made_with_filler()
    assert made.release(session, 2) == ""
    compute(made, session, 1)
    assert outcomes(made) == []
    answer = made.reserve(session, reservation(2, PROMPT))
    assert answer is not None
    assert answer.cached_tokens == 12


def test_one_that_asks_again_under_its_id_after_a_cancel_is_answered_once() -> None:
    made, session = made_with_filler()
    made.release(session, 2)
    assert made.reserve(session, reservation(2, PROMPT[:6])) is None
    made.progress(session, 1, 4, [])
    assert outcomes(made) == [(2, "GRANTED", 4)]
    compute(made, session, 1)
    assert outcomes(made) == []


def test_a_parked_id_is_in_use() -> None:
    made, session = made_with_filler()
    answer = made.reserve(session, reservation(2, PROMPT))
    assert answer is not None
    assert answer.outcome == Outcome.INVALID


def test_a_filler_that_stands_still_is_not_waited_for() -> None:
    made, session = made_with_filler()
    made.progress(session, 1, 4, [])
    assert made.answer_stale() == []  # the first look
    made.progress(session, 1, 5, [])
    assert made.answer_stale() == []  # it moved
    ((_, answer),) = made.answer_stale()
    assert (answer.outcome, answer.cached_tokens) == (Outcome.GRANTED, 4)
    assert made.verify() == []
    compute(made, session, 1)
    assert outcomes(made) == []


def test_room_is_seen_to_before_anyone_waits() -> None:
    made, session = manager(executor("e", pool(6)))
    made.reserve(session, reservation(1, PROMPT))
    answer = made.reserve(session, reservation(2, PROMPT))
    assert answer is not None
    assert answer.outcome == Outcome.NO_BLOCKS


def test_what_was_to_be_shared_may_be_gone_when_its_turn_comes() -> None:
    made, session = made_with_filler()
    made.progress(session, 1, 12, [])
    made.release(session, 1)
    answer = made.reserve(session, reservation(3, [7] * 120))  # all that is free, and some of what was cached
    assert answer is not None
    assert answer.outcome == Outcome.GRANTED
    assert outcomes(made) == [(2, "NO_BLOCKS", 0)]


def test_leases_end_a_wait_too() -> None:
    made, session = made_with_filler()
    later = made.open_session("later", 0.0)
    made.end_session(session, 0.0)
    made.report("e", 2, [1])
    made.reclaim(LEASE)
    answer = made.reserve(later, reservation(1, PROMPT, on=[AllowedExecutor("e", 2)]))
    assert answer is not None
    assert answer.outcome == Outcome.GRANTED
    assert not only_executor(made).places[0].filling.keys() - set(later.holdings[1].groups[0].known_keys)


@pytest.mark.parametrize("count", [1, 300])
def test_many_wait_for_one(count: int) -> None:
    made, session = manager(executor("e", pool(2 * count + 8)))
    made.reserve(session, reservation(1, PROMPT))
    for sequence_id in range(2, count + 2):
        assert made.reserve(session, reservation(sequence_id, PROMPT)) is None
    for sequence_id in range(2, count + 2, 3):
        made.release(session, sequence_id)
    compute(made, session, 1)
    answered = [sequence_id for sequence_id, _, cached in outcomes(made) if cached == 12]
    assert answered == [i for i in range(2, count + 2) if (i - 2) % 3]
    assert not len(made.waiting)
