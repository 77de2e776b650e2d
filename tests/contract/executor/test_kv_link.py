"""What an executor says of a kvmanager that is not there."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import grpc
import pytest

from quire.v1 import executor_pb2, kvmanager_pb2, types_pb2
from services.common.backoff import NAMED_ABSENCES, Backoff
from services.executor.kv_link import KvLink
from tests.contract.executor.conftest import eventually


class NobodyAsks:
    async def registration(self) -> types_pb2.ExecutorDescription:
        return types_pb2.ExecutorDescription()

    async def inventory(self) -> list[executor_pb2.SealedBlock]:
        return []

    def registered(self, response: kvmanager_pb2.ReportResponse) -> None:
        raise AssertionError("nobody answers")


async def test_one_that_is_a_little_late_is_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts: list[int] = []  # warnings that had been given at each failed attempt

    async def pause(backoff: Backoff) -> None:
        attempts.append(len([record for record in caplog.records if record.levelno >= logging.WARNING]))
        await asyncio.sleep(0)

    monkeypatch.setattr(Backoff, "pause", pause)
    link = KvLink(lambda: grpc.aio.insecure_channel(f"unix:{tmp_path}/absent.sock"))
    link.start(NobodyAsks())
    await eventually(lambda: len(attempts) > 2 * NAMED_ABSENCES)
    await link.stop()
    assert set(attempts[: NAMED_ABSENCES - 1]) == {0}
    assert set(attempts[NAMED_ABSENCES - 1 :]) == {1}
