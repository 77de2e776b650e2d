"""How far speculation may go, as people say it: "auto", "off", or a number of draft tokens."""

from __future__ import annotations

import re
from typing import Protocol

from services.common.errors import QuireError, Reason, invalid

MAX_DRAFT_TOKENS = 16
"""Of one sequence in one step."""
LEAST_PACE = 0.5
"""Of its speed without drafts, what each sequence keeps, whatever others gain by theirs."""
AUTO, OFF = "auto", "off"

_NUMBER = re.compile(r"0|[1-9][0-9]?")


class Speculating(Protocol):
    """What a request says that matters here."""

    speculation: str
    beam_width: int


def parse_speculation(text: str) -> int | None:
    """The number of draft tokens, 0 for "off", None for "auto". Raises ValueError for anything else."""
    if text == AUTO:
        return None
    if text == OFF:
        return 0
    if not _NUMBER.fullmatch(text) or int(text) > MAX_DRAFT_TOKENS:
        raise ValueError(f'must be "auto", "off" or a number from 0 to {MAX_DRAFT_TOKENS}, not {text[:40]!r}')
    return int(text)


def most_drafts(request: Speculating) -> int:
    """The most draft tokens of a step that a request admits; none where it is a beam search.

    Raises INVALID_FIELD for what is no such thing, UNSUPPORTED where a beam search asks for drafts.
    """
    try:
        stated = parse_speculation(request.speculation or AUTO)
    except ValueError as error:
        raise invalid("speculation", str(error)) from None
    if request.beam_width:
        if stated:
            raise QuireError(Reason.UNSUPPORTED, "speculation: does not go with beam search", field="speculation")
        return 0
    return MAX_DRAFT_TOKENS if stated is None else stated
