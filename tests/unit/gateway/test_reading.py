"""From what is known of a request to the events of one reader."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.v1 import scheduler_pb2
from services.gateway.events import Delta, Started
from services.gateway.positions import Seen
from services.gateway.reading import Opened, Reading
from tests.unit.gateway.test_deltas import TOKENIZER, maker
from tests.unit.gateway.test_requests import request


def test_who_comes_back_hears_nothing_before_the_start() -> None:
    """A gateway took the request over before anything of it was written: also a choice without tokens waits."""
    one = request(2)
    grant: Any = SimpleNamespace(headers={})
    meter: Any = None
    opened = Opened(one, TOKENIZER, lambda: [maker(choice) for choice in one.choices], meter, grant, 0, b"", False)
    reading = Reading(opened, [Seen(2), Seen(0)], kept=True)
    assert reading.advance() == ([], [])
    one.start(scheduler_pb2.RequestStarted(handle=1))
    one.accept_tokens(0, 0, [260, 261, 115], [], 0)
    events, _ = reading.advance()
    assert isinstance(events[0], Started)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert [(delta.choice, delta.seen) for delta in deltas] == [(0, True), (0, False), (1, True)]
    assert deltas[1].token_ids == (115,)
