"""Where a stream stands, as its clients say it: tokens of each choice, and which choices have ended. Pure.

An event id is REQUEST_ID:12,7e: 12 tokens of choice 0 came, and choice 1 ended with its 7th. Positions, and not numbers
of events: how tokens are cut into events differs from gateway to gateway.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from services.common.errors import invalid
from services.common.limits import MAX_CHOICES

FIELD = "last_event_id"
MOST_CHARACTERS = 1024
_PLACE = re.compile(r"(0|[1-9][0-9]{0,8})(e?)")


class Seen(NamedTuple):
    """What a client has of one choice."""

    tokens: int = 0
    ended: bool = False


def event_id(request_id: str, seen: Sequence[Seen]) -> str:
    """What stands for this place of a stream."""
    return f"{request_id}:{','.join(f'{one.tokens}e' if one.ended else str(one.tokens) for one in seen)}"


def parse_event_id(text: str, choices: int) -> tuple[str, list[Seen]]:
    """The request's id and what its client has of each choice. INVALID_FIELD where it is none of such a request."""
    if len(text) > MOST_CHARACTERS or not text.isascii():
        raise invalid(FIELD, f"must be at most {MOST_CHARACTERS} ASCII characters")
    request_id, separator, places = text.rpartition(":")
    found = [_PLACE.fullmatch(place) for place in places.split(",", MAX_CHOICES)]
    if not request_id or not separator or not all(found):
        raise invalid(FIELD, f"{text[:40]!r} is no id of an event")
    if len(found) != choices:
        raise invalid(FIELD, f"is of a request with {len(found)} choices, and not {choices}")
    return request_id, [Seen(int(match[1]), bool(match[2])) for match in found if match is not None]


def request_id_of(text: str) -> str:
    """The request that an event id is of; empty where it is none."""
    return text.rpartition(":")[0]


class Track:
    """Where a stream of several choices stands."""

    def __init__(self, choices: int) -> None:
        self.seen = [Seen()] * choices

    def take(self, choice: int, length: int, ended: bool) -> None:
        """A choice has so many tokens now."""
        self.seen[choice] = Seen(length, ended)


def check_ahead(seen: Seen, length: int, choice: int) -> None:
    """INVALID_FIELD where a client claims more than a choice that ended ever had."""
    if seen.tokens > length:
        raise invalid(FIELD, f"choice {choice} ended with {length} tokens, and not {seen.tokens}")
