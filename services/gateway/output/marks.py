"""Finds marks in growing text."""

from __future__ import annotations

SPACES = " \t\n\r"


def until_mark(text: str, mark: str) -> tuple[str, str, str | None]:
    """(What is ahead of the mark for certain, what is held back, what follows the mark or None where it is not there).

    Held back are blanks, for they may touch the mark, and what may be its beginning; the mark itself once it is there.
    """
    found = text.find(mark)
    end = found if found >= 0 else len(text) - _begun(text, mark)
    certain = text[:end].rstrip(SPACES)
    if found < 0:
        return certain, text[len(certain) :], None
    behind = found + len(mark)
    return certain, text[len(certain) : behind], text[behind:]


def may_begin(text: str, mark: str) -> bool:
    """Whether more of the text may make it begin with the mark, which it does not yet."""
    return len(text) < len(mark) and mark.startswith(text)


def _begun(text: str, mark: str) -> int:
    """How much of the text's end may be the beginning of the mark."""
    at = text.find(mark[0], max(0, len(text) - len(mark) + 1))
    while at >= 0 and not mark.startswith(text[at:]):
        at = text.find(mark[0], at + 1)
    return len(text) - at if at >= 0 else 0
