"""Prompt lookup: what it copies, how far, and what it leaves alone."""

from __future__ import annotations

import pytest

from services.executor.backends.base import SamplingRule
from services.executor.batch import BlockTables
from services.executor.sequences import Ending, Sequence
from services.executor.speculation.ngram import TRIED_EVERY, UNMEASURED, NgramProposer
from services.executor.speculation.proposer import DraftRequest
from tests.unit.executor.fake_backend import FakeBackend

TABLES = BlockTables(4)


def sequence(tokens: list[int]) -> Sequence:
    return Sequence(1, list(tokens), len(tokens), 0, SamplingRule(), Ending(frozenset(), 1000))


def proposer(*costs: tuple[int, float]) -> NgramProposer:
    """Without costs, drafts are free."""
    return NgramProposer(FakeBackend(), costs or UNMEASURED)


def drafts(tokens: list[int], most: int = 4) -> list[int]:
    (found,) = proposer().propose([DraftRequest(sequence(tokens), most)], TABLES, 1)
    return found


def test_continues_as_the_text_did_before() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5]
    assert drafts(text) == [6, 7, 8, 9]
    assert drafts(text, most=2) == [6, 7]
    assert drafts(text, most=7) == [6, 7, 8, 9, 2, 3, 4]


@pytest.mark.parametrize("text", [[9], [9, 1, 2, 3]], ids=len)
def test_text_without_a_match_says_nothing(text: list[int]) -> None:
    assert drafts(text) == []


def test_a_match_that_overlaps_the_end_goes_on_with_its_period() -> None:
    assert drafts([4, 5, 6, 4, 5, 6, 4, 5, 6], most=7) == [4, 5, 6, 4, 5, 6, 4]
    assert drafts([7, 7, 7, 7, 7]) == [7, 7, 7, 7]


def test_output_counts_as_well_as_the_prompt_and_is_taken_in_once() -> None:
    made, one = proposer(), sequence([1, 2, 3])
    assert made.propose([DraftRequest(one, 2)], TABLES, 1) == [[]]
    one.tokens.extend([8, 9, 1, 2])
    assert made.propose([DraftRequest(one, 2)], TABLES, 1) == [[3, 8]]
    one.tokens.extend([3, 8, 9])
    assert made.propose([DraftRequest(one, 1)], TABLES, 1) == [[1]]


def test_drafts_that_cost_more_than_they_give_are_not_proposed() -> None:
    """A long match pays where a short one does not; and nothing does where a token more is as dear as the first."""
    short, long = [1, 2, 3, 4, 9, 1, 2], [*range(40), *range(38)]
    for costs, lengths in (
        (((1, 1.0), (2, 1.1), (9, 1.8)), (True, True)),
        (((1, 1.0), (2, 1.7), (9, 3.9)), (False, True)),
        (((1, 1.0), (2, 2.0), (9, 9.0)), (False, False)),
    ):
        for text, pays in zip((short, long), lengths, strict=True):
            (found,) = proposer(*costs).propose([DraftRequest(sequence(text), 8)], TABLES, 1)
            assert bool(found) == pays


def test_a_batch_is_weighed_as_a_whole() -> None:
    """Beside many others, a draft must be nearly sure."""
    made = proposer((1, 1.0), (2, 1.5), (16, 5.0), (32, 10.0))
    long = [*range(40), *range(38)]
    (alone,) = made.propose([DraftRequest(sequence(long), 8)], TABLES, 1)
    (beside,) = made.propose([DraftRequest(sequence(long), 8)], TABLES, 24)
    assert len(alone) > len(beside)
    found = made.propose([DraftRequest(sequence(text), 8) for text in (long, [1, 2, 3, 4, 1])], TABLES, 2)
    assert len(found[0]) > len(found[1])


def test_learns_from_what_came() -> None:
    """Of matches that never hold, none is followed any more, though what they found was not proposed for long."""
    made = proposer((1, 1.0), (2, 1.2), (9, 2.0))
    unsure = [1, 2, 3, 4, 5, 6, 9, 1, 2, 3, 4, 5]
    (before,) = made.propose([DraftRequest(sequence(unsure), 8)], TABLES, 1)
    assert before
    for _ in range(200):
        one = sequence(unsure)
        made.propose([DraftRequest(one, 8)], TABLES, 1)
        one.tokens.append(77)
        made.propose([DraftRequest(one, 8)], TABLES, 1)
    (after,) = made.propose([DraftRequest(sequence(unsure), 8)], TABLES, 1)
    assert not after
    for _ in range(400):
        one = sequence(unsure)
        made.propose([DraftRequest(one, 8)], TABLES, 1)
        one.tokens.extend([6, 9, 1, 2, 3, 4, 5, 6, 9])
        made.propose([DraftRequest(one, 8)], TABLES, 1)
    (again,) = made.propose([DraftRequest(sequence(unsure), 8)], TABLES, 1)
    assert again


def test_a_match_that_misled_is_not_followed_where_others_are() -> None:
    """What followed it was different each time; of the others, nothing is known yet."""
    made, one = proposer((1, 1.0), (2, 1.3), (9, 3.0)), sequence([1, 2, 30, 1, 2])
    (first,) = made.propose([DraftRequest(one, 4)], TABLES, 1)
    assert first
    one.tokens.extend([31, 1, 2])
    (misled,) = made.propose([DraftRequest(one, 4)], TABLES, 1)
    one.tokens.extend([40, 41, 42, 40, 41])
    (other,) = made.propose([DraftRequest(one, 4)], TABLES, 1)
    assert (misled, bool(other)) == ([], True)


def test_tries_now_and_then_what_seems_not_to_pay() -> None:
    """Else steps that were once believed to be too long would stay so."""
    made = proposer((1, 1.0), (2, 5.0))
    text = [*range(40), *range(38)]
    found = [made.propose([DraftRequest(sequence(text), 4)], TABLES, 1) for _ in range(TRIED_EVERY)]
    assert found == [[[]]] * (TRIED_EVERY - 1) + [[[38]]]
    for _ in range(8):
        made.computed(1, 1, 0.1)
        made.computed(1, 2, 0.11)
    (now,) = made.propose([DraftRequest(sequence(text), 2)], TABLES, 1)
    assert now == [38, 39]


def test_long_texts_are_taken_in_over_several_steps() -> None:
    made = NgramProposer(FakeBackend(), most_taken=6)
    requests = [DraftRequest(sequence([1, 2, 3, 4, 1, 2]), 2), DraftRequest(sequence([1, 2, 3, 4, 5, 1, 2, 3]), 2)]
    for expected in ([[3, 4], []], [[3, 4], []], [[3, 4], [4, 5]]):
        assert made.propose(requests, TABLES, 2) == expected


def test_a_text_keeps_what_was_taken_in() -> None:
    made, one = proposer(), sequence([1, 2, 3, 1, 2])
    assert made.propose([DraftRequest(one, 2)], TABLES, 1) == [[3, 1]]
    one.tokens.append(9)  # nothing holds on to the tokens
    one.tokens = one.tokens[:4]
    with pytest.raises(ValueError, match="shorter"):
        made.propose([DraftRequest(one, 2)], TABLES, 1)
