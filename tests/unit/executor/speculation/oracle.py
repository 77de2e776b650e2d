"""A proposer that knows what comes, and errs where it is told to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from services.executor.backends.base import KvShape
from services.executor.batch import BlockTables
from services.executor.speculation.proposer import DraftRequest

Truth = Callable[[list[int]], int]


class Oracle:
    """Each draft is the true token with probability `accuracy`, else another one; sometimes there are fewer."""

    name = "oracle"
    detail = ""
    weighs_drafts = False

    def __init__(self, truth: Truth, accuracy: float, vocab: int, seed: int = 0) -> None:
        self._truth, self._accuracy, self._vocab = truth, accuracy, vocab
        self._random = random.Random(seed)
        self.asked: list[int] = []
        self.proposed: list[list[int]] = []

    def warm_up(self, shape: KvShape) -> float:
        return 0.0

    def catch_up(self, requests: Sequence[DraftRequest]) -> list[bool]:
        """Knows all."""
        return [True] * len(requests)

    def propose(self, requests: Sequence[DraftRequest], tables: BlockTables, tokens: int) -> list[list[int]]:
        drafts = [self._draft(list(request.sequence.tokens), request.most) for request in requests]
        self.asked += [request.most for request in requests]
        self.proposed += drafts
        return drafts

    def computed(self, plain: int, tokens: int, seconds: float) -> None:
        """Drafts whatever steps take."""

    def _draft(self, tokens: list[int], most: int) -> list[int]:
        draft: list[int] = []
        for _ in range(most if self._accuracy in (0, 1) else self._random.randint(0, most)):
            token = self._truth(tokens + draft)
            if self._random.random() >= self._accuracy:
                token = (token + 1 + self._random.randrange(self._vocab - 1)) % self._vocab
            draft.append(token)
        return draft
