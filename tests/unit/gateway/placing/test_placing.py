"""Which scheduler has which request, through refusals, losses and drains."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire.v1 import scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.gateway.dispatch import Dispatch
from services.gateway.placing.breaker import Rules
from services.gateway.placing.placing import Placing, PlacingRules
from services.gateway.requests import OpenRequest

MODEL = types_pb2.ModelDescription(name="m", fingerprint="f", tokenizer_fingerprint="t")
STOP = types_pb2.FINISH_REASON_STOP


class World:
    """Some schedulers, and a clock."""

    def __init__(self, count: int = 2, **rules: Any) -> None:
        self.now = 0.0
        self.placing = Placing([f"s{i}" for i in range(count)], PlacingRules(**rules), random.Random(1))
        self._handle = 0
        for side in self.placing.sides:
            self.come(side)

    def come(self, side: Dispatch, model: types_pb2.ModelDescription = MODEL) -> None:
        side.apply(scheduler_pb2.ServeResponse(models=[model], models_changed=True), self.now)
        self.placing.connect(side, self.now)

    def ask(self, prompt: int = 1, **fields: Any) -> OpenRequest:
        self._handle += 1
        submit = scheduler_pb2.Submit(
            handle=self._handle, request_id=f"r{self._handle}", model="m", choice_count=1, tenant="t", **fields
        )
        submit.prompt_token_ids.append(prompt)
        submit.stop.max_tokens = 100
        request = OpenRequest(submit, MODEL, frozenset(), self.now, None, lambda choice, count, now: None)
        self.placing.submit(request, self.now)
        return request

    def at(self, request: OpenRequest) -> list[Dispatch]:
        """Who has it."""
        return [side for side in self.placing.sides if request.handle in side._mine]

    def the(self, request: OpenRequest) -> Dispatch:
        (side,) = self.at(request)
        return side

    def start(self, request: OpenRequest, side: Dispatch | None = None, tokens: int = 1) -> None:
        side = side or self.the(request)
        started = scheduler_pb2.RequestStarted(handle=request.handle)
        position = len(request.choices[0].output)
        columns = {"handles": [request.handle], "choices": [0], "positions": [position], "token_counts": [tokens]}
        side.apply(scheduler_pb2.ServeResponse(started=[started], token_ids=[7] * tokens, **columns), self.now)

    def refuse(self, request: OpenRequest, reason: Reason, side: Dispatch | None = None) -> None:
        error = QuireError(reason, "no").to_detail()
        end = scheduler_pb2.ChoiceEnd(handle=request.handle, reason=types_pb2.FINISH_REASON_ERROR, error=error)
        (side or self.the(request)).apply(scheduler_pb2.ServeResponse(ended=[end]), self.now)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.placing.expire(self.now)


def test_what_runs_goes_on_elsewhere_when_its_scheduler_is_lost() -> None:
    world = World(resume_seconds=5.0)
    request = world.ask()
    first = world.the(request)
    world.start(request, tokens=3)
    world.placing.lose(first, world.now)
    other = world.the(request)
    assert other is not first
    (submit,) = other.outbox.take(world.now).submits
    assert list(submit.progress[0].token_ids) == [7] * 3
    world.placing.lose(other, world.now)
    assert world.at(request) == []
    world.wait(4.9)
    assert request.error is None
    world.wait(0.2)
    assert request.error is not None
    assert request.error.reason is Reason.SCHEDULER_LOST


def test_a_scheduler_that_comes_back_is_attached_to() -> None:
    """Its stream broke: where requests are kept nothing is computed twice."""
    world = World(1)
    side = world.placing.sides[0]
    kept, plain = world.ask(keep_ms=1000), world.ask()
    scored = world.ask(keep_ms=1000)
    scored.wants_scores = True
    for request in (kept, plain):
        world.start(request)
    side.outbox.take(world.now)
    world.placing.lose(side, world.now)
    world.come(side)
    message = side.outbox.take(world.now)
    assert [(one.handle, one.tenant, list(one.next_positions)) for one in message.attaches] == [(kept.handle, "t", [1])]
    assert {one.handle for one in message.submits} == {plain.handle, scored.handle}
    world.refuse(kept, Reason.NOT_FOUND)  # it was another process
    message = side.outbox.take(world.now)
    assert [one.handle for one in message.submits] == [kept.handle]
    assert kept.error is None
    world.refuse(kept, Reason.NOT_FOUND)  # of a submission that is a failure
    assert kept.error is not None


def test_a_draining_scheduler_gets_nothing_new_and_ends_what_it_has() -> None:
    world = World()
    running = [world.ask(prompt) for prompt in range(20)]
    drains = world.the(running[0])
    for request in running:
        world.start(request)
    mine = [request for request in running if world.the(request) is drains]
    refused = next(
        request for request in iter(lambda: world.ask(world._handle + 50), None) if world.the(request) is drains
    )
    world.refuse(refused, Reason.DRAINING)
    assert world.the(refused) is not drains
    assert all(world.the(world.ask(prompt)) is not drains for prompt in range(20))
    assert all(world.the(request) is drains for request in mine)
    world.placing.lose(drains, world.now)
    world.come(drains)
    assert any(world.the(world.ask(prompt)) is drains for prompt in range(20))


def test_only_what_never_began_is_tried_again() -> None:
    world = World()
    request = world.ask()
    first = world.the(request)
    world.refuse(request, Reason.NO_EXECUTOR)
    assert world.the(request) is not first
    assert request.error is None
    begun = world.ask()
    world.start(begun)
    world.refuse(begun, Reason.EXECUTOR_LOST)
    assert begun.error is not None
    assert begun.error.reason is Reason.EXECUTOR_LOST
    assert world.placing.counts["retry"] == 1


@pytest.mark.parametrize("reason", [Reason.INVALID_FIELD, Reason.QUEUE_FULL, Reason.NEVER_FITS, Reason.INTERNAL])
def test_what_is_no_absence_is_not_tried_again(reason: Reason) -> None:
    world = World()
    request = world.ask()
    world.refuse(request, reason)
    assert request.error is not None
    assert request.error.reason is reason


def test_attempts_are_few_and_apart() -> None:
    """One scheduler: it is asked again soon, but not at once, and not for ever; one that waited is believed."""
    world = World(1)
    request = world.ask()
    for _ in range(2):
        world.refuse(request, Reason.NO_EXECUTOR)
        assert world.at(request) == []
        world.wait(2.0)
        assert len(world.at(request)) == 1
    world.refuse(request, Reason.NO_EXECUTOR)
    assert request.error is not None
    late = world.ask()
    world.now += 30.0
    world.refuse(late, Reason.NO_EXECUTOR)
    assert late.error is not None


def test_attempts_have_a_budget() -> None:
    world = World(breaker=Rules(least=10**6))
    for prompt in range(300):
        request = world.ask(prompt)
        while request.error is None:
            world.refuse(request, Reason.NO_EXECUTOR)
    assert world.placing.counts["retry"] <= 10 + 0.1 * 300 + 1


def test_a_breaker_keeps_requests_away_and_lets_some_try() -> None:
    world = World(1, breaker=Rules(least=10, probes=1))
    for prompt in range(10):
        world.placing.check("m", 0, world.now)
        world.refuse(world.ask(prompt), Reason.INTERNAL)
    with pytest.raises(QuireError) as caught:
        world.placing.check("m", 0, world.now)
    assert caught.value.reason is Reason.CIRCUIT_OPEN
    assert caught.value.retry_after == pytest.approx(2.0)
    world.wait(2.1)
    world.placing.check("m", 0, world.now)
    probe = world.ask()
    with pytest.raises(QuireError):
        world.placing.check("m", 0, world.now)
    world.start(probe)
    world.placing.check("m", 0, world.now)
    assert set(world.placing.phases().values()) == {0}


def test_a_breaker_of_one_scheduler_sends_requests_to_the_other() -> None:
    world = World(breaker=Rules(least=10))
    bad = world.the(world.ask())
    for prompt in range(200):
        request = world.ask(prompt)
        if world.the(request) is bad:
            world.refuse(request, Reason.INTERNAL)
        else:
            world.start(request)
            world.placing.forget(request, world.now)
    world.placing.check("m", 0, world.now)
    assert all(world.the(world.ask(prompt)) is not bad for prompt in range(50))


def test_what_waits_longer_than_is_meant_is_shed() -> None:
    world = World(1, max_queue_seconds=20.0)
    world.ask(priority=1)
    world.now += 25.0
    with pytest.raises(QuireError) as caught:
        world.placing.check("m", 0, world.now)
    assert caught.value.reason is Reason.QUEUE_FULL
    assert caught.value.retry_after == pytest.approx(6.0)
    world.placing.check("m", 2, world.now)  # more urgent: nothing is ahead of it


def test_hedging() -> None:
    """Whoever begins first has it; the other one hears that it is over."""
    world = World(hedge_seconds=1.0)
    request = world.ask()
    first = world.the(request)
    world.wait(0.9)
    assert world.at(request) == [first]
    world.wait(0.2)
    second = next(side for side in world.at(request) if side is not first)
    for side in (first, second):
        side.outbox.take(world.now)
    world.start(request, second)
    assert world.at(request) == [second]
    assert [cancel.handle for cancel in first.outbox.take(world.now).cancels] == [request.handle]
    again = world.ask()
    first = world.the(again)
    world.wait(1.1)
    world.refuse(again, Reason.NO_EXECUTOR, first)  # the other one still tries
    assert again.error is None
    assert world.the(again) is not first


def test_other_weights_under_the_same_name_are_another_model() -> None:
    world = World(1)
    side, request = world.placing.sides[0], world.ask()
    world.placing.lose(side, world.now)
    world.come(side, types_pb2.ModelDescription(name="m", fingerprint="other", tokenizer_fingerprint="t"))
    assert request.error is not None
    assert "changed" in request.error.message


def test_nothing_is_left_behind() -> None:
    world = World()
    for prompt in range(30):
        request = world.ask(prompt)
        if prompt % 3:
            world.start(request)
        (world.placing.forget if prompt % 2 else world.placing.cancel)(request, world.now)
    placing = world.placing
    assert not placing._placed
    assert not placing._parked
    assert [side.load for side in placing.sides] == [0, 0]
    assert all(len(waits) == 0 for waits in placing._waits.values())
