"""Where a stream stands, as its clients say it."""

from __future__ import annotations

import pytest

from services.common.errors import QuireError, Reason
from services.gateway.positions import Seen, Track, event_id, parse_event_id, request_id_of


def test_there_and_back() -> None:
    for request_id in ("r", "a:b", "x" * 128, "with space"):
        for seen in ([Seen()], [Seen(12), Seen(7, True)], [Seen(999_999_999, True)] * 64):
            text = event_id(request_id, seen)
            assert parse_event_id(text, len(seen)) == (request_id, seen)
            assert request_id_of(text) == request_id
    assert event_id("r", [Seen(12), Seen(7, True)]) == "r:12,7e"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r",
        "r:",
        ":1",
        "r:1,",
        "r:-1",
        "r:01",
        "r:1x",
        "r:e",
        "r:1,2",
        "r:1e1",
        "r:9999999999",
        "é:1",
        "r:1 ",
        "r" * 2000,
    ],
)
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(QuireError, match=r"^last_event_id: ") as caught:
        parse_event_id(text, 1)
    assert caught.value.reason is Reason.INVALID_FIELD


def test_many_places_are_refused_before_they_are_read() -> None:
    with pytest.raises(QuireError):
        parse_event_id("r:" + "1," * 500 + "1", 501)


def test_track() -> None:
    track = Track(2)
    track.take(1, 3, False)
    track.take(1, 4, True)
    assert event_id("r", track.seen) == "r:0,4e"
