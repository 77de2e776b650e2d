"""What proposes draft tokens. A proposer never decides what is generated, only how many tokens a step may give."""

from __future__ import annotations

from collections.abc import Sequence as Sequence_
from typing import NamedTuple, Protocol

from services.executor.sequences import Sequence


class DraftRequest(NamedTuple):
    """A sequence whose tokens all are computed in the coming step."""

    sequence: Sequence
    most: int  # drafts that may follow its tokens, at least 1


class Proposer(Protocol):
    """Not thread-safe: used by the step thread."""

    name: str

    def propose(self, requests: Sequence_[DraftRequest]) -> list[list[int]]:
        """For each request, the tokens that are likely to follow: at most as many as it allows, perhaps none."""
        ...
