"""Finds stop strings in streamed text and holds back what may still become one.

The result does not depend on how the text is cut into pieces: the string that completes first wins, and the longest
of those that complete together.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class _Pattern:
    """One stop string as a Knuth-Morris-Pratt automaton; `state` is how much of it the stream's end may begin."""

    __slots__ = ("_fallback", "reads_hidden", "state", "text")

    def __init__(self, text: str, reads_hidden: bool) -> None:
        self.text = text
        self.reads_hidden = reads_hidden
        self.state = 0
        self._fallback = fallback = [0] * len(text)
        length = 0
        for i in range(1, len(text)):
            while length and text[i] != text[length]:
                length = fallback[length - 1]
            length += text[i] == text[length]
            fallback[i] = length

    def feed(self, piece: str) -> int:
        """Advances over `piece`. Returns the end of the first occurrence, exclusive, or -1."""
        text, fallback, state = self.text, self._fallback, self.state
        at = 0
        while at < len(piece):
            if not state:
                at = piece.find(text[0], at)
                if at < 0:
                    break
            char = piece[at]
            while state and char != text[state]:
                state = fallback[state - 1]
            state += char == text[state]
            at += 1
            if state == len(text):
                self.state = 0
                return at
        self.state = state
        return -1


class StopMatcher:
    """Watches one choice's text. Text goes in by `push`; what is certain to stay comes out.

    Special tokens that the client does not see are pushed as hidden text. Stop strings that spell a special token
    are matched against all text, the others against what the client sees.
    """

    def __init__(self, stops: Sequence[str], specials: Collection[str], include_stop: bool) -> None:
        self._patterns = [_Pattern(stop, any(s in stop for s in specials if s)) for stop in dict.fromkeys(stops)]
        self._include_stop = include_stop
        self._pending = ""  # visible text held back
        self._longest = max((len(p.text) for p in self._patterns if p.reads_hidden), default=0)
        self._shown: list[bool] = []  # of the stream's last characters, hidden ones included: which are visible
        self.matched: str | None = None

    @property
    def reads_hidden(self) -> bool:
        """Whether hidden text matters at all."""
        return self._longest > 0

    def push(self, text: str, *, hidden: bool = False) -> str:
        """Takes the next text and returns what may be shown. After a match `matched` is set and the rest is dropped."""
        if self.matched is not None or not text:
            return ""
        best, winner = len(text) + 1, None
        for pattern in self._patterns:
            if hidden and not pattern.reads_hidden:
                continue
            end = pattern.feed(text[: min(best, len(text))])
            if end >= 0 and (end < best or winner is None or len(pattern.text) > len(winner.text)):
                best, winner = end, pattern
        taken = text if winner is None else text[:best]
        if self._longest:
            self._shown = (self._shown + [not hidden] * len(taken))[-self._longest :]
        if not hidden:
            self._pending += taken
        if winner is None:
            return self._release(max(map(self._visible, self._patterns), default=0))
        self.matched = winner.text
        shown = self._release(sum(self._shown[-len(winner.text) :]) if winner.reads_hidden else len(winner.text))
        self._pending = ""
        return shown + winner.text if self._include_stop else shown

    def flush(self) -> str:
        """The text still held back, once no more comes."""
        return self._release(0) if self.matched is None else ""

    def _visible(self, pattern: _Pattern) -> int:
        """Visible characters among those that may begin the pattern."""
        if not pattern.reads_hidden or not pattern.state:
            return pattern.state
        return sum(self._shown[-pattern.state :])

    def _release(self, held: int) -> str:
        cut = len(self._pending) - held
        shown, self._pending = self._pending[:cut], self._pending[cut:]
        return shown
