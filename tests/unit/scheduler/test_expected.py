"""What the scheduler expects of its sequences and executors, and what it learns of answers that end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.v1 import scheduler_pb2, types_pb2
from services.scheduler.expected import expect_output
from services.scheduler.intake import LONG_OUTPUT_TOKENS, PATIENCE_SECONDS, patience
from services.scheduler.predict import Kind, QuantilePredictor
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe, reference


class Recorder(QuantilePredictor):
    """Remembers what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, str, int]] = []

    def ended(self, kind: Kind, length: int) -> None:
        self.told.append(("ended", kind.model, length))
        super().ended(kind, length)

    def cut(self, kind: Kind, length: int) -> None:
        self.told.append(("cut", kind.model, length))
        super().cut(kind, length)


def harness() -> tuple[Harness, Recorder]:
    world, recorder = Harness(describe(), limits=Limits(lookahead_tokens=8)), Recorder()
    world.state.predictor = recorder
    return world, recorder


def prompts_that_stop(most: int) -> Iterator[list[int]]:
    """Prompts whose answers end by themselves within `most` tokens."""
    for first in range(1, 1000):
        wanted = submit(1, [first, 1], most)
        if reference(wanted, 0)[1] == types_pb2.FINISH_REASON_STOP:
            yield [first, 1]


def test_an_answer_that_ended_by_itself_teaches_its_length() -> None:
    world, recorder = harness()
    prompt = next(prompts_that_stop(100))
    world.send(submit(1, prompt, 100))
    world.settle()
    assert recorder.told == [("ended", "m", len(world.clients[1].outputs[0]))]


def test_an_answer_that_used_up_its_budget_was_cut() -> None:
    world, recorder = harness()
    world.send(submit(1, [1] * 5, 3, ignore_eos=True, stop=["x"]))
    world.settle()
    assert recorder.told == [("cut", "m", 3)]


def test_an_answer_that_had_to_use_up_its_budget_teaches_nothing() -> None:
    world, recorder = harness()
    world.send(submit(1, [1] * 5, 30, ignore_eos=True))
    world.settle()
    assert recorder.told == []
    assert world.clients[1].ends


def test_a_cancelled_answer_would_have_been_longer() -> None:
    world, recorder = harness()
    world.send(submit(1, [1] * 5, 400, stop=["x"], ignore_eos=True))
    while not world.clients[1].outputs[0]:
        world.step()
    world.cancel(1)
    ((how, _, length),) = recorder.told
    assert how == "cut"
    assert length >= len(world.clients[1].outputs[0]) > 0


def test_forced_outputs_and_least_lengths_bound_what_is_expected() -> None:
    predictor, kind = QuantilePredictor(), Kind("a", "m", 5)
    for _ in range(20):
        predictor.ended(kind, 10)
    assert expect_output(predictor, kind, types_pb2.StopCriteria(max_tokens=500)) < 15
    assert expect_output(predictor, kind, types_pb2.StopCriteria(max_tokens=500, ignore_eos=True)) == 500
    assert expect_output(predictor, kind, types_pb2.StopCriteria(max_tokens=500, min_tokens=50)) == 51
    assert expect_output(predictor, kind, types_pb2.StopCriteria(max_tokens=7, min_tokens=7)) == 7


@pytest.mark.parametrize("seed", range(3))
def test_what_an_executor_has_before_it_is_the_sum_over_its_sequences(seed: int) -> None:
    """After every event, through chunks, preemption, cancels and a lost epoch; nothing is left at the end."""
    world = Harness(describe(blocks=25, max_sequences=5), limits=Limits(lookahead_tokens=4), seed=seed)
    (executor,) = world.state.executors

    def check() -> None:
        assert executor.expected_tokens == sum(s.expected_output - s.output_length for s in executor.running.values())

    for handle in range(1, 13):
        world.send(submit(handle, [handle] * 10, 30, ignore_eos=handle % 2 == 0))
        for _ in range(12):
            world.step()
            check()
        if handle == 6 and 6 in world.gateway.requests:
            world.cancel(6)
        if handle == 9:
            world.lose(0)
            world.turn()
            check()
            world.open(0)
            world.turn()
    while world.step():
        check()
    assert executor.counters.preemptions > 0
    assert executor.expected_tokens == 0


def test_an_outlived_expectation_is_renewed() -> None:
    world, recorder = harness()
    for _ in range(20):
        recorder.ended(Kind("default", "m", 2), 3)
    prompt = next(p for p in prompts_that_stop(60) if len(reference(submit(1, p, 60), 0)[0]) > 12)
    world.send(submit(1, prompt, 60))
    (sequence,) = next(iter(world.state.request_ids.values())).sequences
    assert sequence.expected_output == 3
    while world.step() and not world.clients[1].done:
        block = world.state.executors[0].block_size if sequence.executor else 0
        assert sequence.output_length <= sequence.expected_output + block + 2 * 32
    assert sequence.expected_output > 3


def test_placement_hears_of_it() -> None:
    world, _ = harness()
    world.send(submit(1, [1] * 4, 40, ignore_eos=True))
    while not world.clients[1].outputs[0]:
        world.step()
    asked: list[scheduler_pb2.Submit] = [submit(2, [2] * 4, 400, ignore_eos=True)]
    world.to_kv.clear()
    world.send(*asked)
    ((loads, (reservation,)),) = [(m.loads, m.reservations) for m in world.to_kv if m.reservations]
    assert list(loads.running_counts) == [1]
    assert 0 < loads.output_tokens[0] < 40
    assert reservation.expected_output_tokens == 400


def test_short_answers_go_ahead_of_long_ones_of_their_tenant_that_came_a_little_before() -> None:
    world, recorder = harness()
    for _ in range(20):
        recorder.ended(Kind("default", "m", 4), 20)
        recorder.ended(Kind("default", "m", 30), 390)
    world.send(*(submit(handle, [handle] * 4, 400, ignore_eos=True) for handle in range(1, 9)))  # fill all seats
    order: list[int] = []
    world.send(submit(20, [1] * 30, 400), submit(21, [2] * 4, 400), submit(22, [3] * 4, 400))
    queue = world.state.models["m"].queue
    while (sequence := queue.peek(world.now, 1e6)) is not None:
        order.append(sequence.request.handle)
        queue.pop(sequence)
    assert order == [21, 22, 20]


def test_nobody_is_overtaken_for_long() -> None:
    assert patience(1) < patience(100) < patience(LONG_OUTPUT_TOKENS) == patience(10**6) == PATIENCE_SECONDS
