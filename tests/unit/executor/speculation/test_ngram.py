"""Prompt lookup: what it copies, how far, and what it leaves alone."""

from __future__ import annotations

import pytest

from services.executor.backends.base import SamplingRule
from services.executor.batch import BlockTables
from services.executor.sequences import Ending, Sequence
from services.executor.speculation import ngram
from services.executor.speculation.ngram import NgramProposer
from services.executor.speculation.proposer import DraftRequest

TABLES = BlockTables(4)


def sequence(tokens: list[int], prompt_length: int | None = None) -> Sequence:
    ending = Ending(frozenset(), 1000)
    return Sequence(1, tokens, prompt_length or len(tokens), 0, SamplingRule(), ending)


def drafts(tokens: list[int], most: int = 8) -> list[int]:
    (found,) = NgramProposer().propose([DraftRequest(sequence(tokens), most)], TABLES)
    return found


def test_continues_as_the_text_did_before() -> None:
    assert drafts([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5]) == [6, 7, 8, 9]
    assert drafts([1, 2, 3, 4, 5, 6, 7, 8, 9, 2, 3, 4, 5], most=2) == [6, 7]


def test_longer_matches_are_followed_further() -> None:
    text = list(range(20))
    assert drafts([*text, 5, 6]) == [7, 8]
    assert drafts([*text, 3, 4, 5, 6]) == [7, 8, 9, 10]


@pytest.mark.parametrize("text", [[], [1, 2, 3], [1, 2, 3, 4, 1]], ids=len)
def test_short_matches_say_nothing(text: list[int]) -> None:
    assert drafts([9, *text]) == []


def test_a_match_that_overlaps_the_end_goes_on_with_its_period() -> None:
    assert drafts([4, 5, 6, 4, 5, 6, 4, 5, 6]) == [4, 5, 6, 4, 5, 6]
    assert drafts([7, 7, 7, 7, 7]) == [7, 7, 7, 7]


def test_output_counts_as_well_as_the_prompt_and_is_taken_in_once() -> None:
    proposer, one = NgramProposer(), sequence([1, 2, 3])
    assert proposer.propose([DraftRequest(one, 4)], TABLES) == [[]]
    one.tokens.extend([8, 9, 1, 2])
    assert proposer.propose([DraftRequest(one, 4)], TABLES) == [[3, 8]]
    one.tokens.extend([3, 8, 9])
    assert proposer.propose([DraftRequest(one, 1)], TABLES) == [[1]]


def test_long_texts_are_taken_in_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "MOST_TAKEN", 6)
    proposer = NgramProposer()
    requests = [DraftRequest(sequence([1, 2, 3, 4, 1, 2]), 8), DraftRequest(sequence([1, 2, 3, 4, 5, 1, 2, 3]), 8)]
    assert proposer.propose(requests, TABLES) == [[3, 4], []]
    assert proposer.propose(requests, TABLES) == [[3, 4], []]
    assert proposer.propose(requests, TABLES) == [[3, 4], [4, 5, 1]]
