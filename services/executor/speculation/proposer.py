"""What proposes draft tokens. A proposer never decides what is generated, only how many tokens a step may give."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple, Protocol

from services.executor.backends.base import KvShape
from services.executor.batch import BlockTables
from services.executor.sequences import Sequence


class DraftRequest(NamedTuple):
    """A sequence all of whose tokens are computed in the coming step."""

    sequence: Sequence
    most: int  # drafts that may follow its tokens, at least 1


class Proposer(Protocol):
    """Not thread-safe: used by the step thread."""

    name: str  # "ngram", "early_exit" or "draft"
    detail: str  # what drafts, for people; may be empty
    weighs_drafts: bool  # proposes only what pays, by what steps take here

    def warm_up(self, shape: KvShape) -> float:
        """Seconds that one draft for one sequence takes, 0 for next to nothing. Computes in the pool's first blocks."""
        ...

    def catch_up(self, requests: Sequence_[DraftRequest]) -> list[bool]:
        """Takes in what it is behind with of these texts, as far as one step allows; which of them may have drafts."""
        ...

    def propose(self, requests: Sequence_[DraftRequest], tables: BlockTables, tokens: int) -> list[list[int]]:
        """For each request, none of which it is behind with, the tokens that are likely to follow: at most as many as
        it allows, perhaps none.

        `tables` are the target's block tables: they hold slots for the drafts. `tokens` the step has without drafts.
        """
        ...

    def computed(self, plain: int, tokens: int, seconds: float) -> None:
        """Hears what each step of decodes took, with so many tokens, `plain` of them not drafts."""
        ...
