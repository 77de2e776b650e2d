"""Prompt lookup: what followed the last time that the text had come to the same end, in prompt or output.

Saxena 2023 (prompt lookup decoding); the length of a draft by that of the match is from Oliaro et al. 2024 (suffix
decoding).
"""

from __future__ import annotations

from collections.abc import Sequence as Sequence_

from services.executor.backends.base import KvShape
from services.executor.batch import BlockTables
from services.executor.sequences import Sequence
from services.executor.speculation.proposer import DraftRequest
from services.executor.speculation.suffix_automaton import SuffixAutomaton

LEAST_MATCH = 2
"""Tokens that must agree: a single one says next to nothing of the next."""
MOST_TAKEN = 2048
"""Tokens that automata take in before one step: a long prompt is taken in over several, which go on without drafts."""


class NgramProposer:
    """Keeps a suffix automaton with each sequence."""

    name = "ngram"
    detail = ""

    def warm_up(self, shape: KvShape) -> float:
        return 0.0

    def propose(self, requests: Sequence_[DraftRequest], tables: BlockTables) -> list[list[int]]:
        left = MOST_TAKEN
        drafts: list[list[int]] = []
        for sequence, most in requests:
            automaton = sequence.drafting
            if not isinstance(automaton, SuffixAutomaton):
                automaton = sequence.drafting = SuffixAutomaton()
            known = automaton.size
            automaton.add(sequence.tokens[known : known + left])
            left -= automaton.size - known
            drafts.append(_continue(sequence, automaton, most) if automaton.size == len(sequence.tokens) else [])
        return drafts


def _continue(sequence: Sequence, automaton: SuffixAutomaton, most: int) -> list[int]:
    length, end = automaton.match()
    if length < LEAST_MATCH:
        return []
    draft_ids: list[int] = sequence.tokens[end : end + min(most, length)].tolist()
    wanted, period = min(most, length), len(sequence.tokens) - end
    while len(draft_ids) < wanted:  # the match overlaps the end: the text repeats itself with this period
        draft_ids.append(draft_ids[len(draft_ids) - period])
    return draft_ids
