"""What the kvmanager is told of executors that may take sequences: once a message, for all that it asks for."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from quire.v1 import kvmanager_pb2
from services.scheduler.room import queued_tokens
from services.scheduler.state import Executor


def state_loads(executors: SequenceOf[Executor]) -> kvmanager_pb2.ExecutorLoads:
    """Their load at this moment, in this order."""
    return kvmanager_pb2.ExecutorLoads(
        executor_ids=[executor.executor_id for executor in executors],
        epochs=[executor.epoch for executor in executors],
        running_counts=[len(executor.running) for executor in executors],
        queued_tokens=[queued_tokens(executor) if executor.prefilling else 0 for executor in executors],
        output_tokens=[max(executor.expected_tokens, len(executor.running)) for executor in executors],
        slownesses=[executor.slowness.factor for executor in executors],
    )
