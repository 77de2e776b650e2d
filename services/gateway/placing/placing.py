"""Which scheduler has which request, and what becomes of those that none has. Pure but for the requests.

A request goes to the scheduler that had it last, else to one chosen by prefix and load among those that have its model,
take requests and are not held back by their breaker. Where there is none it waits, `resume_seconds` at most.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from quire.v1 import types_pb2
from services.common.errors import QuireError, Reason
from services.gateway.dispatch import Dispatch
from services.gateway.placing import choice, retries
from services.gateway.placing.breaker import Breaker, Outcome, Phase, Rules
from services.gateway.placing.retries import RetryBudget
from services.gateway.placing.waits import Waits
from services.gateway.requests import OpenRequest

PROMPT_SECONDS = 1.0
"""A scheduler that refuses within this time has not waited for anything: it is worth asking again."""


@dataclass(frozen=True, slots=True)
class PlacingRules:
    """What an operator sets, in seconds."""

    resume_seconds: float = 30.0  # how long a request waits for a scheduler
    slow_seconds: float = 60.0  # to the first token, from which on an answer counts as slow; 0 for never
    hedge_seconds: float = 0.0  # without a beginning, after which another scheduler is asked as well; 0 for never
    max_queue_seconds: float = 0.0  # that a new request may be expected to wait for its beginning; 0 for any
    hold_tokens: int = 1024
    breaker: Rules = field(default_factory=Rules)


@dataclass(slots=True)
class Placed:
    """Where a request is."""

    request: OpenRequest
    model: str  # as it was asked for there
    since: float
    sides: list[Dispatch] = field(default_factory=list)
    untold: set[str] = field(default_factory=set)  # schedulers whose breakers have not heard what became of it


class Placing:
    """Owns what is at no scheduler, the breakers and the queue times. Times are seconds of one monotonic clock."""

    def __init__(self, names: Sequence[str], rules: PlacingRules, rng: random.Random | None = None) -> None:
        self._rules = rules
        self.sides = [Dispatch(name, self, rules.hold_tokens) for name in names]
        self._placed: dict[int, Placed] = {}
        self._parked: dict[int, OpenRequest] = {}
        self._later: dict[int, tuple[float, OpenRequest]] = {}  # attempts that are due then
        self._breakers: dict[tuple[str, str], Breaker] = {}  # by scheduler and model
        self._clock = 0.0  # the latest time that is known
        self._waits: dict[str, Waits] = {}  # by model
        self.counts: Counter[str] = Counter()  # retries, hedges, requests shed: for metrics
        self._budget = RetryBudget()
        self._rng = rng or random.Random()

    @property
    def models(self) -> dict[str, types_pb2.ModelDescription]:
        """All that can be asked for, by name. Where schedulers differ about one, the first of them counts."""
        return {name: model for side in reversed(self.sides) for name, model in side.models.items()}

    @property
    def connected(self) -> bool:
        return any(side.connected for side in self.sides)

    def phases(self) -> dict[tuple[str, str], Phase]:
        """How each breaker stands, by scheduler and model."""
        now = self._clock
        return {key: breaker.phase(now) for key, breaker in list(self._breakers.items())}

    # What the gateway asks for.

    def check(self, model: str, priority: int, now: float) -> None:
        """Raises CIRCUIT_OPEN or QUEUE_FULL where a new request would fail, or wait too long."""
        self._clock = now
        breakers = [self._breaker(side, model) for side in self.sides if side.takes and model in side.models]
        if breakers and not any(breaker.admits(now) for breaker in breakers):
            self.counts["circuit_open"] += 1
            wait = min(breaker.retry_after(now) for breaker in breakers)
            what = f"model {model}: most of the latest requests failed or were slow; it is asked again in {wait:.2g} s"
            raise QuireError(Reason.CIRCUIT_OPEN, what, retry_after=wait)
        most = self._rules.max_queue_seconds
        expected = self._queue(model).expected(priority, now) if most else 0.0
        if expected > most:
            self.counts["queue_time"] += 1
            what = f"model {model}: a request would wait {expected:.0f} s, more than {most:g} (max_queue_seconds)"
            raise QuireError(Reason.QUEUE_FULL, what, retry_after=min(expected - most + 1.0, 60.0))

    def submit(self, request: OpenRequest, now: float) -> None:
        """Sends a request as soon as a scheduler with its model is there."""
        self._budget.earn()
        if request.started is None:
            self._queue(request.model.name).enter(request.handle, request.template.priority, now)
        self._place(request, now)

    def cancel(self, request: OpenRequest, now: float) -> None:
        """Ends a request wherever it is."""
        for side in self._drop(request, now):
            side.cancel(request)

    def forget(self, request: OpenRequest, now: float) -> None:
        """A request is complete: nothing is to be submitted again."""
        for side in self._drop(request, now):
            side.forget(request)

    def stop_at(self, request: OpenRequest, index: int, length: int) -> None:
        """Ends a choice behind `length` output tokens."""
        for side in self._sides_of(request):
            side.stop_at(request, index, length)

    def hold(self, request: OpenRequest, held: bool) -> None:
        """Pauses or resumes a request. The state is kept and told again after a loss."""
        request.held = held
        for side in self._sides_of(request):
            side.hold(request, held)

    def expire(self, now: float) -> None:
        """Fails requests that waited too long for a scheduler, and makes attempts that are due. Called regularly.

        The end of a scheduler that drains is near: until then nobody is late.
        """
        self._clock = now
        for handle, (due, request) in list(self._later.items()):
            if now >= due:
                del self._later[handle]
                self._place(request, now)
        if self._rules.hedge_seconds:
            self._hedge(now)
        self._unpark(now)  # a breaker may let them through by now
        wait = self._rules.resume_seconds
        for request in [] if any(side.drains for side in self.sides) else list(self._parked.values()):
            if request.parked_at is not None and now - request.parked_at >= wait:
                self._drop(request, now)
                what = f"no scheduler with model {request.model.name} came back in {wait:g} s"
                request.fail(QuireError(Reason.SCHEDULER_LOST, what))

    # What schedulers' streams bring; see Home.

    def connect(self, side: Dispatch, now: float) -> None:
        """A stream is up, and its first message was applied."""
        side.connect()
        self._unpark(now)

    def lose(self, side: Dispatch, now: float) -> None:
        """A stream is gone. What a draining scheduler refused waits from now on."""
        if side.drains:
            for request in self._parked.values():
                request.parked_at = now
        side.lose(now)

    def changed(self, dispatch: Dispatch, now: float) -> None:
        self._unpark(now)

    def returned(self, request: OpenRequest, dispatch: Dispatch, now: float) -> None:
        if self._leave(request, dispatch, Outcome.UNKNOWN, now):
            self._place(request, now)

    def refused(self, request: OpenRequest, dispatch: Dispatch, error: QuireError, now: float) -> bool:
        placed = self._placed.get(request.handle)
        if placed is None:
            return False
        self._tell(placed, dispatch, Outcome.FAILED if retries.is_failure(error) else Outcome.UNKNOWN, now)
        if request.started is not None or not retries.is_unavailable(error):
            return False
        if len(placed.sides) > 1:  # the other one still tries
            placed.sides.remove(dispatch)
            return True
        other = self._choose(request, now, but=dispatch)
        again = now - placed.since < PROMPT_SECONDS and placed.model in dispatch.models
        if request.attempts >= retries.MOST_ATTEMPTS or not (other or again) or not self._budget.spend():
            return False
        self.counts["retry"] += 1
        request.attempts += 1
        request.may_run_at = ""
        del self._placed[request.handle]
        if other is not None:
            self._put(request, other, now)
        else:
            self._later[request.handle] = (now + retries.pause(request.attempts, self._rng), request)
        return True

    def began(self, request: OpenRequest, dispatch: Dispatch, now: float) -> None:
        self._queue(request.model.name).begin(request.handle, now)
        placed = self._placed.get(request.handle)
        if placed is None or len(placed.sides) < 2:
            return
        for other in placed.sides:
            if other is not dispatch:
                other.cancel(request)
                self._tell(placed, other, Outcome.UNKNOWN, now)
        placed.sides = [dispatch]
        request.may_run_at = dispatch.name

    def answered(self, request: OpenRequest, dispatch: Dispatch, now: float) -> None:
        request.answered = True
        if (placed := self._placed.get(request.handle)) is not None:
            slow = self._rules.slow_seconds
            is_slow = slow > 0 and now - request.arrived_at > slow
            self._tell(placed, dispatch, Outcome.SLOW if is_slow else Outcome.GOOD, now)

    # Decisions.

    def _place(self, request: OpenRequest, now: float) -> None:
        """Gives a request to a scheduler, or lets it wait for one."""
        name = request.model.name
        side = self._choose(request, now)
        if side is not None:
            self._put(request, side, now)
            return
        known = [side.models[name] for side in self.sides if side.takes and name in side.models]
        if known and all(_identity(model) != _identity(request.model) for model in known):
            self._drop(request, now)
            request.fail(QuireError(Reason.SCHEDULER_LOST, f"model {name} changed while it was away"))
        elif request.handle not in self._parked:
            request.parked_at = now
            self._parked[request.handle] = request

    def _choose(self, request: OpenRequest, now: float, but: Dispatch | None = None) -> Dispatch | None:
        sides = {side.name: side for side in self._having(request, now) if side is not but}
        if (last := sides.get(request.may_run_at)) is not None:
            return last
        if len(sides) < 2:
            return next(iter(sides.values()), None)
        key = choice.prefix_key(request.tenant, request.model.name, request.prompt_ids)
        return sides[choice.choose(key, {name: side.load for name, side in sides.items()})]

    def _having(self, request: OpenRequest, now: float) -> Iterator[Dispatch]:
        """Schedulers that may be given a request now. What runs already is not held back by a breaker."""
        for side in self.sides:
            model = side.models.get(request.model.name)
            if model is None or not side.takes or _identity(model) != _identity(request.model):
                continue
            if request.started is not None or self._breaker(side, model.name).admits(now):
                yield side

    def _put(self, request: OpenRequest, side: Dispatch, now: float) -> None:
        self._parked.pop(request.handle, None)
        request.parked_at = None
        placed = self._placed.setdefault(request.handle, Placed(request, request.model.name, now))
        placed.sides.append(side)
        if not request.answered:
            self._breaker(side, placed.model).begin(now)
            placed.untold.add(side.name)
        side.submit(request)

    def _hedge(self, now: float) -> None:
        """Asks a second scheduler for requests that have not begun at theirs for long."""
        for placed in list(self._placed.values()):
            request = placed.request
            if request.started is not None or len(placed.sides) > 1 or now - placed.since < self._rules.hedge_seconds:
                continue
            last, request.may_run_at = request.may_run_at, ""
            other = self._choose(request, now, but=placed.sides[0])
            request.may_run_at = last
            if other is not None and self._budget.spend():
                self.counts["hedge"] += 1
                self._put(request, other, now)

    def _unpark(self, now: float) -> None:
        for request in list(self._parked.values()):
            self._place(request, now)

    def _sides_of(self, request: OpenRequest) -> list[Dispatch]:
        placed = self._placed.get(request.handle)
        return placed.sides if placed is not None else []

    def _leave(self, request: OpenRequest, side: Dispatch, outcome: Outcome, now: float) -> bool:
        """A scheduler has a request no more. Whether none has it now."""
        placed = self._placed.get(request.handle)
        if placed is None:
            return True
        placed.sides.remove(side)
        self._tell(placed, side, outcome, now)
        if placed.sides:
            return False
        del self._placed[request.handle]
        return True

    def _drop(self, request: OpenRequest, now: float) -> list[Dispatch]:
        """Forgets a request; returns who has it."""
        self._parked.pop(request.handle, None)
        self._later.pop(request.handle, None)
        self._queue(request.model.name).leave(request.handle)
        placed = self._placed.pop(request.handle, None)
        if placed is None:
            return []
        for side in placed.sides:
            self._tell(placed, side, Outcome.UNKNOWN, now)
        return placed.sides

    def _tell(self, placed: Placed, side: Dispatch, outcome: Outcome, now: float) -> None:
        """What became of a request, to the breaker that let it through: once."""
        if side.name in placed.untold:
            placed.untold.discard(side.name)
            self._breaker(side, placed.model).end(outcome, now)

    def _breaker(self, side: Dispatch, model: str) -> Breaker:
        return self._breakers.setdefault((side.name, model), Breaker(self._rules.breaker))

    def _queue(self, model: str) -> Waits:
        return self._waits.setdefault(model, Waits())


def _identity(model: types_pb2.ModelDescription) -> tuple[str, str]:
    """What must not change under a request. An alias has no weights of its own: none were chosen yet."""
    return model.fingerprint, model.tokenizer_fingerprint
