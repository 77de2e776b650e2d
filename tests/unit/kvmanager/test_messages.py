"""The core's numbers are those of the wire."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from quire.v1 import kvmanager_pb2
from services.kvmanager.blocks import BlockState
from services.kvmanager.placement import Outcome


@pytest.mark.parametrize(
    ("ours", "theirs", "prefix"),
    [
        (Outcome, kvmanager_pb2.ReservationOutcome, "RESERVATION_OUTCOME_"),
        (BlockState, kvmanager_pb2.BlockState, "BLOCK_STATE_"),
    ],
)
def test_enumerations_agree(ours: type[enum.IntEnum], theirs: Any, prefix: str) -> None:
    wire = {name.removeprefix(prefix): value for name, value in theirs.items() if value}
    assert {member.name: member.value for member in ours if member.value} == wire
