"""The thread that moves blocks."""

import threading

import pytest

from services.executor.operations import Move
from services.executor.tiers.mover import Mover
from services.executor.tiers.store import Outcome


def move(operation_id: int, kind: str = "offload") -> Move:
    return Move(1, operation_id, kind, "disk", 0, 1, bytes(32))


class Bench:
    """A mover whose moves wait for `gate`; number 13 fails."""

    def __init__(self, rest: float = 0) -> None:
        self.gate, self.begun = threading.Semaphore(0), threading.Semaphore(0)
        self.made: list[int] = []
        self.ended: dict[int, Outcome] = {}
        self.news = threading.Semaphore(0)
        self.mover = Mover("test", self.perform, self.on_ended, rest)

    def perform(self, move: Move) -> Outcome:
        self.begun.release()
        assert self.gate.acquire(timeout=20)
        if move.operation_id == 13:
            raise RuntimeError("staged")
        self.made.append(move.operation_id)
        return Outcome.DONE

    def on_ended(self, move: Move, outcome: Outcome) -> None:
        assert move.operation_id not in self.ended
        self.ended[move.operation_id] = outcome
        self.news.release()

    def finish(self, count: int) -> None:
        for _ in range(count):
            self.gate.release()
        for _ in range(count):
            assert self.news.acquire(timeout=20)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    for _ in range(20):
        made.gate.release()
    made.mover.stop()


def test_loads_go_first(bench):
    bench.mover.submit(move(1))
    assert bench.begun.acquire(timeout=20)
    for operation_id, kind in ((2, "offload"), (3, "load"), (4, "export"), (5, "import")):
        bench.mover.submit(move(operation_id, kind))
    bench.finish(5)
    assert bench.made == [1, 3, 5, 2, 4]


def test_drop_ends_what_has_not_begun(bench):
    for operation_id in (1, 2, 3):
        bench.mover.submit(move(operation_id, "load"))
    assert bench.begun.acquire(timeout=20)
    bench.mover.drop()
    assert bench.ended == {2: Outcome.DROPPED, 3: Outcome.DROPPED}
    bench.finish(1)
    assert bench.news.acquire(timeout=20)
    assert bench.news.acquire(timeout=20)
    assert bench.ended[1] is Outcome.DONE


def test_stop_waits_for_the_move_in_hand(bench):
    for operation_id in (1, 2):
        bench.mover.submit(move(operation_id))
    assert bench.begun.acquire(timeout=20)
    stopping = threading.Thread(target=bench.mover.stop)
    stopping.start()
    assert bench.news.acquire(timeout=20)
    assert bench.ended == {2: Outcome.DROPPED}
    assert stopping.is_alive()
    bench.gate.release()
    stopping.join(20)
    assert bench.ended == {1: Outcome.DONE, 2: Outcome.DROPPED}
    bench.mover.submit(move(3))
    assert bench.ended[3] is Outcome.DROPPED


def test_a_fault_ends_one_move_and_not_the_thread(bench, caplog):
    bench.mover.submit(move(13))
    bench.mover.submit(move(14))
    bench.finish(2)
    assert bench.ended == {13: Outcome.ERROR, 14: Outcome.DONE}
    assert "staged" in caplog.text


def test_moves_that_nobody_waits_for_leave_pauses_that_loads_do_not_wait_for():
    bench = Bench(rest=1e9)
    try:
        bench.mover.submit(move(1))
        bench.finish(1)
        bench.mover.submit(move(2))
        for operation_id in (3, 4):
            bench.mover.submit(move(operation_id, "load"))
        bench.finish(2)
        assert bench.made == [1, 3, 4]
    finally:
        bench.mover.stop()
    assert bench.ended[2] is Outcome.DROPPED
