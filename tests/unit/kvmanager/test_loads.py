"""Loads of executors: once a message, for all of its reservations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from quire.v1 import kvmanager_pb2
from services.common.errors import QuireError
from services.kvmanager.requests import apply_request
from services.kvmanager.reservations import AllowedExecutor
from tests.unit.kvmanager.helpers import MODEL, executor, manager, pool

NAMES = ["a", "b", "c"]


def loads(running: Iterable[int], **changes: Any) -> kvmanager_pb2.ExecutorLoads:
    fields: dict[str, Any] = {
        "executor_ids": NAMES,
        "epochs": [1, 1, 1],
        "running_counts": running,
        "queued_tokens": [0, 0, 0],
        "output_tokens": [0, 0, 0],
        "slownesses": [1, 1, 1],
    }
    return kvmanager_pb2.ExecutorLoads(**fields | changes)


def placed(message: kvmanager_pb2.ExecutorLoads, *indexes: list[int], tokens: int = 9, output: int = 0) -> list[str]:
    """Where reservations of one message go, each of which may go to the loads of these indexes."""
    made, session = manager(*(executor(name, pool(64)) for name in NAMES))
    reservations = [
        kvmanager_pb2.Reservation(
            sequence_id=number,
            model_fingerprint=MODEL,
            token_ids=[number] * tokens,
            load_indexes=allowed,
            expected_output_tokens=output,
        )
        for number, allowed in enumerate(indexes, 1)
    ]
    request = kvmanager_pb2.ReserveRequest(loads=message, reservations=reservations)
    response = apply_request(made, session, request).to(session)
    return [result.executor_id for result in response.reservations]


def test_each_reservation_may_go_to_all_or_to_those_it_names() -> None:
    assert placed(loads([2, 1, 0]), [], tokens=1) == ["c"]
    assert placed(loads([2, 1, 0]), [0, 1], tokens=1) == ["b"]


def test_what_was_granted_before_counts() -> None:
    assert placed(loads([0, 0, 0]), [], [], [], []) == ["a", "b", "c", "a"]
    assert placed(loads([9, 0, 0]), [], [], [], []) == ["b", "c", "b", "c"]


def test_a_slow_executor_gets_less() -> None:
    assert placed(loads([0, 1, 1], slownesses=[5.0, 1, 1]), []) == ["b"]


def test_sequences_that_soon_end_weigh_less_beside_a_long_newcomer() -> None:
    soon = loads([8, 4, 4], output_tokens=[8, 4000, 4000])
    assert placed(soon, []) == ["b"]
    assert placed(soon, [], output=800) == ["a"]
    assert AllowedExecutor("e", 1, 8, output_tokens=40).running_beside(20) == 2.0


def test_arrays_that_differ_in_length_and_unknown_indexes_end_the_stream() -> None:
    with pytest.raises(QuireError, match="loads: the arrays differ in length"):
        placed(loads([0, 0]), [])
    for index in (-1, 3):
        with pytest.raises(QuireError, match="load_indexes: the message has 3 loads"):
            placed(loads([0, 0, 0]), [index])


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (loads([0, 0, 0], executor_ids=["a", "b", "a"]), "named twice"),
        (loads([0, -1, 0]), "at least 0"),
        (loads([0, 0, 0], queued_tokens=[0, 0, -1]), "at least 0"),
        (loads([0, 0, 0], slownesses=[0.5, 1, 1]), "at least 1"),
        (loads([0, 0, 0], slownesses=[float("nan"), 1, 1]), "at least 1"),
        (loads([0, 0, 0], slownesses=[float("inf"), 1, 1]), "finite"),
    ],
)
def test_impossible_loads_end_the_stream(message: kvmanager_pb2.ExecutorLoads, said: str) -> None:
    with pytest.raises(QuireError, match=said):
        placed(message, [])
