"""When results leave: prefill in time for its next chunk, tokens no later than the plan allows, each part once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from quire.v1 import executor_pb2
from services.executor.credit import Credit
from services.executor.results import Ledger, StepTaken
from services.executor.sequences import Unreported


def ledger(report_credit: int, report_seconds: float) -> Ledger:
    made = Ledger(1)
    made.plan_taken(executor_pb2.StepPlan(step=1, report_credit=report_credit, report_seconds=report_seconds))
    return made


def sequence(sequence_id: int, steps: int, *, spoke: bool) -> Any:
    credit = Credit()
    credit.add(1, steps)
    return SimpleNamespace(sequence_id=sequence_id, credit=credit, spoke=spoke, computed=0, unreported=Unreported())


def step(made: Ledger, seconds: float, *rows: Any, chunks: tuple[Any, ...] = ()) -> list[int]:
    """One step of rows that get a token each, and chunks that get none; the sequences of the message that leaves."""
    for row in (*rows, *chunks):
        row.credit.use()
        row.unreported.steps += 1
        row.computed += 1
        if row in rows:
            row.unreported.token_ids.append(7)
        made.computed(row)
    made.step_taken(StepTaken(seconds, 0.0, tokens=len(rows) + 8 * len(chunks), sampled=len(rows)))
    message = made.after_step()
    return list(message.sequence_ids) if message is not None else []


def test_a_prefill_speaks_while_a_chunk_of_it_is_left() -> None:
    made, long = ledger(9, 0.0), sequence(1, 3, spoke=False)
    assert step(made, 0.1, chunks=(long,)) == []
    assert step(made, 0.1, chunks=(long,)) == [1]
    assert step(made, 0.1, chunks=(long,)) == [1]


def test_chunks_that_report_do_not_keep_tokens_waiting() -> None:
    """Time counts from the last message that held all, not from any."""
    made, reader = ledger(2, 0.040), sequence(1, 50, spoke=True)
    for _ in range(3):
        long = sequence(2, 2, spoke=False)
        assert step(made, 0.025, reader, chunks=(long,)) == [2]
        assert step(made, 0.025, reader, chunks=(long,)) == [1, 2]


def test_a_step_longer_than_tokens_may_wait_reports_alone() -> None:
    made, reader = ledger(2, 0.040), sequence(1, 50, spoke=True)
    assert step(made, 0.050, reader) == [1]
    assert step(made, 0.050, reader) == [1]
    assert [step(made, 0.015, reader) for _ in range(3)] == [[], [], [1]]


def test_messages_say_how_much_of_their_steps_is_prefill() -> None:
    made, reader, long = ledger(2, 0.001), sequence(1, 50, spoke=True), sequence(2, 9, spoke=False)
    step(made, 0.5, reader, chunks=(long,))
    made.moved(4096, 0.25)
    timings = made.unacknowledged[-1].timings
    assert (timings.step_count, timings.token_count, timings.sampled_count) == (1, 9, 1)
    step(made, 0.5, reader, chunks=(long,))
    timings = made.unacknowledged[-1].timings
    assert (timings.moved_bytes, timings.move_seconds) == (4096, 0.25)
