"""One sequence's way through its grammar."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLMatcher

from services.common.constraints.compile import refusal
from services.common.errors import QuireError, Reason


class Guide:
    """Pending until the grammar is compiled: `begin` or `fail` is called once, from the thread that compiles.

    Then it belongs to whoever computes the step: the step thread, or the thread of masks while a step is computed. It
    takes output in as late as it can, so `output` is always the whole of it, only ever longer.
    """

    __slots__ = ("_matcher", "_path", "_taken", "end_ids", "error")

    def __init__(self, path: str, end_ids: frozenset[int]) -> None:
        """`path`: the field that the rule came from. `end_ids` end the sequence and are drawn where the grammar may."""
        self._path, self.end_ids = path, end_ids
        self.error: QuireError | None = None  # why nothing more can be drawn
        self._matcher: LLMatcher | None = None
        self._taken = 0  # tokens of the output that the matcher has seen

    def begin(self, matcher: LLMatcher, output: Sequence[int]) -> None:
        """Gives it a matcher of its own, at the grammar's beginning; takes the output so far in."""
        self.follow(output, matcher)
        self._matcher = matcher

    def fail(self, error: QuireError) -> None:
        self.error = error

    def abandon(self) -> None:
        """Its sequence is gone: nothing need be compiled for it."""
        if self.is_pending:
            self.fail(QuireError(Reason.CANCELLED, "the sequence has gone"))

    @property
    def is_pending(self) -> bool:
        return self._matcher is None and self.error is None

    @property
    def matcher(self) -> LLMatcher:
        """Of a guide that is not pending and has not failed."""
        assert self._matcher is not None
        return self._matcher

    def follow(self, output: Sequence[int], matcher: LLMatcher | None = None) -> None:
        """Takes in what was drawn since."""
        matcher = self.matcher if matcher is None else matcher
        new = list(output[self._taken :])
        self._taken = len(output)
        if new and matcher.try_consume_tokens(new) < len(new):
            # Every token was drawn under this grammar's masks: a peer sent other output, or a limit was met.
            self.error = self.error or _lost(self._path, matcher)

    def cut(self, output: Sequence[int], draft_ids: Sequence[int]) -> int:
        """How many leading drafts the grammar would let follow the output."""
        self.follow(output)
        if self.error is not None or not draft_ids:
            return 0
        return self.matcher.validate_tokens(list(draft_ids))

    def check(self) -> None:
        """Notes that the matcher met a limit."""
        if self.error is None and self.matcher.is_error():
            self.error = _lost(self._path, self.matcher)

    def has_ended(self, output: Sequence[int]) -> bool:
        """Whether the output is whole: nothing but an end may follow it."""
        self.follow(output)
        return self.error is None and self.matcher.is_stopped()


def _lost(path: str, matcher: LLMatcher) -> QuireError:
    if matcher.is_error():
        return refusal(path, "cannot be followed any further", matcher)
    return QuireError(Reason.INVALID_FIELD, f"{path}: the output so far does not obey it", field=path)
