"""Which tokens of a text are scored in which window.

A model sees a text in windows of `context` tokens that begin `stride` tokens apart. Each window scores the tokens that
no earlier one has scored, so every token counts once, with at least context - stride tokens before it (fewer at the
beginning of the text). What stands before every window, the beginning-of-text token where the model's tokenizer adds
one, takes a place in the window; without it, a token that begins a window has nothing before it and is not scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Frame:
    """How a text is cut into windows."""

    context: int
    stride: int


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens [start, stop) of a text; those from `first` on are scored."""

    start: int
    first: int
    stop: int

    @property
    def scored(self) -> int:
        return self.stop - self.first


def windows(count: int, context: int, stride: int, prefix: int) -> list[Window]:
    """The windows of a text of `count` tokens, each with `prefix` tokens (0 or 1) before it; none is empty."""
    room = context - prefix
    found = []
    start = scored = 0
    while scored < count:
        stop = min(start + room, count)
        first = scored if prefix else max(scored, start + 1)
        if first < stop:
            found.append(Window(start, first, stop))
        scored = stop
        start += min(stride, room)
    return found


def pieces(start: int, stop: int, most: int) -> Iterator[range]:
    """[start, stop) in consecutive ranges of at most `most`."""
    for at in range(start, stop, most):
        yield range(at, min(at + most, stop))
