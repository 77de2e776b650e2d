"""Seeds of scenarios in which things go wrong: what must hold does, and what is broken on purpose is noticed."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from quire.cli import simulate
from quire.simulation.faults import run
from quire.simulation.faults.invariants import Violation
from quire.simulation.faults.scenario import FaultKind, draw
from quire.simulation.faults.slots import Slots
from quire.simulation.faults.world import REST_SECONDS, START_SECONDS, World
from services.kvmanager.manager import KvManager
from services.scheduler import reserve
from services.scheduler.state import State

SEEDS = 24
FULL_SEEDS = 10_000


@pytest.mark.parametrize("first", range(0, SEEDS, 6))
def test_seeds_hold(first: int) -> None:
    for result in run.play_all(first, 6, processes=1):
        assert not result.failure, f"seed {result.seed}: {result.failure}\n" + "\n".join(result.tail)


@pytest.mark.full
@pytest.mark.timeout(7200)
def test_ten_thousand_seeds_hold() -> None:
    failed = [result for result in run.play_all(SEEDS, FULL_SEEDS, os.cpu_count() or 1) if result.failure]
    assert not failed, "\n".join(f"seed {result.seed}: {result.failure}" for result in failed)


def test_the_seeds_of_every_run_see_every_kind_of_fault_and_of_end() -> None:
    kinds = {fault.kind for seed in range(SEEDS) for fault in draw(seed).faults}
    assert kinds == set(FaultKind)


def test_a_seed_replays_event_by_event() -> None:
    """The same from the first event to the last, whatever ran before it."""
    seed = next(seed for seed in range(100) if len(draw(seed).faults) >= 3)
    runs: list[list[tuple[float, str]]] = []
    for _ in range(2):
        events: list[tuple[float, str]] = []
        World(draw(seed), lambda seconds, what, events=events: events.append((seconds, what))).play()  # type: ignore[misc]
        runs.append(events)
    assert runs[0] == runs[1]
    assert len(runs[0]) > 100


def test_what_is_told_late_is_heard_before_nothing_must_be_held() -> None:
    """That blocks have moved to a disk, on a stream that was silent when it became slow."""
    scenario = draw(6219)
    told: list[float] = []

    def hear(seconds: float, what: str) -> None:
        if "done_operation_ids" in what:
            told.append(seconds)

    World(scenario, hear).play()
    assert told[-1] > START_SECONDS + scenario.quiet_from + REST_SECONDS


# What the checks notice


def fails(count: int = 40) -> Violation:
    """What the first seed that notices it says."""
    for seed in range(count):
        try:
            World(draw(seed)).play()
        except Violation as violation:
            return violation
    raise AssertionError("nothing noticed it")


def test_a_token_computed_from_wrong_kv_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block copied for a fork, or brought up from a disk, that does not arrive."""
    monkeypatch.setattr(Slots, "copy", lambda self, pairs: None)
    assert "is right" in str(fails())


def test_a_sequence_that_is_never_given_blocks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was refused blocks is not asked for again."""
    real = reserve._take_extension

    def forget(state: State, result: Any) -> None:
        real(state, result)
        for executor in state.executors:
            executor.starved.clear()

    monkeypatch.setattr(reserve, "_take_extension", forget)
    assert "hang" in str(fails())


def test_blocks_that_nobody_gives_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = KvManager.release

    def keep(self: KvManager, session: Any, sequence_id: int, *args: Any, **named: Any) -> str:
        if sequence_id % 7:
            return real(self, session, sequence_id, *args, **named)
        return str(session.holdings[sequence_id].executor.spec.executor_id)

    monkeypatch.setattr(KvManager, "release", keep)
    assert fails()


# The command


def test_the_command_tells_what_came_of_its_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.run(["--faults", "--seeds", "2", "--first", "3", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["seeds"], said["failures"]) == (2, [])
    assert sum(said["outcomes"].values()) == len(draw(3).requests) + len(draw(4).requests)


def test_the_command_shows_a_failing_seed_with_its_last_events(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KvManager, "verify", lambda self: ["a block is lost"])
    assert simulate.run(["--faults", "--seeds", "1", "--first", "5"]) == 1
    said = capsys.readouterr().out
    assert "seed 5: Violation: the kvmanager's books: a block is lost" in said
    assert "executor-0>kvmanager to kvmanager: description" in said
    assert "again: quire simulate --faults --first 5 --seeds 1" in said


def test_wrong_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        simulate.run(["--faults", "--seeds", "0"])
    assert ended.value.code == 2
    assert "--seeds: at least 1" in capsys.readouterr().err
