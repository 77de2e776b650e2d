"""A harness that runs the scheduler's core between tiny executors and a tiny kvmanager, and what must always hold."""

import random
from collections import deque
from dataclasses import dataclass, field

from quire.v1 import executor_pb2, kvmanager_pb2, scheduler_pb2, types_pb2
from services.scheduler import epochs, requests
from services.scheduler.alarms import next_alarm
from services.scheduler.aliases import Alias
from services.scheduler.apply import apply
from services.scheduler.batcher import is_due
from services.scheduler.reserve import take
from services.scheduler.restate import restate
from services.scheduler.state import Executor, Gateway, Limits, State
from services.scheduler.turn import turn
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim_executor import SimExecutor, reference
from tests.unit.scheduler.sim_kv import SimKv


@dataclass(eq=False)
class Client:
    """What one request's gateway saw."""

    submit: scheduler_pb2.Submit
    outputs: dict[int, list[int]]
    ends: dict[int, scheduler_pb2.ChoiceEnd] = field(default_factory=dict)
    started: list[scheduler_pb2.RequestStarted] = field(default_factory=list)
    logprobs: dict[int, types_pb2.TokenLogprobs] = field(default_factory=dict)  # of the output, by choice
    cut: dict[int, int] = field(default_factory=dict)  # choice -> output length kept
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return len(self.ends) == self.submit.choice_count


class Harness:
    """The scheduler's core between simulated peers. Messages of one link keep their order; links race."""

    def __init__(
        self,
        *descriptions: types_pb2.ExecutorDescription,
        limits: Limits | None = None,
        seed: int = 0,
        kv: SimKv | RealKv | None = None,
        aliases: tuple[Alias, ...] = (),
    ):
        self.random = random.Random(seed)
        self.now = 100.0
        self.kv = kv or SimKv()
        self.sims = [SimExecutor(d) for d in descriptions]
        self.state = State(
            tuple(f"t{i}" for i in range(len(self.sims))), limits or Limits(lookahead_tokens=8), aliases=aliases
        )
        self.plans: list[deque[executor_pb2.StepPlan]] = [deque() for _ in self.sims]
        self.results: list[deque[executor_pb2.StepResults]] = [deque() for _ in self.sims]
        self.to_kv: deque[kvmanager_pb2.ReserveRequest] = deque()
        self.from_kv: deque[kvmanager_pb2.ReserveResponse] = deque()
        self.clients: dict[int, Client] = {}
        self.gateway: Gateway = requests.open_gateway(self.state, "g", self.now)
        epochs.kvmanager_opened(self.state)
        for index in range(len(self.sims)):
            self.open(index)
        self.turn()

    # Events

    def open(self, index: int) -> None:
        """A new epoch of an executor: what was under way on its stream is gone."""
        sim, executor = self.sims[index], self.executor(index)
        self.plans[index].clear()
        self.results[index].clear()
        epoch = sim.reset()
        self.kv.register(sim)
        self.from_kv.extend(self.kv.take_pushes())
        epochs.executor_opened(self.state, executor, epoch, sim.description, self.now)

    def lose(self, index: int) -> None:
        self.plans[index].clear()
        self.results[index].clear()
        epochs.executor_lost(self.state, self.executor(index), self.now)

    def executor(self, index: int) -> Executor:
        """The scheduler's side of one that was not removed."""
        return next(e for e in self.state.executors if e.index == index)

    def join(self, description: types_pb2.ExecutorDescription) -> int:
        """One more executor; returns its index."""
        index = epochs.executor_added(self.state, f"t{len(self.sims)}").index
        assert index == len(self.sims)
        self.sims.append(SimExecutor(description))
        self.plans.append(deque())
        self.results.append(deque())
        self.open(index)
        self.turn()
        return index

    def remove(self, index: int) -> None:
        """The scheduler forgets an executor, which is not told."""
        self.plans[index].clear()
        self.results[index].clear()
        epochs.executor_removed(self.state, self.executor(index), self.now)
        self.sims[index].reset()
        self.turn()

    def restart_kv(self) -> None:
        """The kvmanager died and came back empty; the executors register again, what runs is stated again."""
        self._lose_kv()
        self.kv.restart()
        for executor in self.state.executors:
            if executor.connected:
                self.kv.register(self.sims[executor.index])
        self._open_kv()

    def reconnect_kv(self) -> None:
        """The stream to the kvmanager broke, and with it was lost whatever was on its way."""
        self._lose_kv()
        self.kv.reopen()
        self._open_kv()

    def _lose_kv(self) -> None:
        epochs.kvmanager_lost(self.state, self.now)
        self.to_kv.clear()
        self.from_kv.clear()

    def _open_kv(self) -> None:
        self.to_kv.extend(restate(self.state))
        epochs.kvmanager_opened(self.state)
        self.from_kv.extend(self.kv.take_pushes())

    def send(self, *submits: scheduler_pb2.Submit, **parts: object) -> None:
        for submit in submits:
            known = {p.choice: list(p.token_ids) for p in submit.progress}
            outputs = {c: known.get(c, []) for c in range(submit.choice_count)}
            self.clients.setdefault(submit.handle, Client(submit, outputs))
        message = scheduler_pb2.ServeRequest(submits=submits, **parts)  # type: ignore[arg-type]
        requests.serve(self.state, self.gateway, message, self.now)
        self.turn()

    def cancel(self, handle: int) -> None:
        self.clients[handle].cancelled = True
        self.send(cancels=[scheduler_pb2.Cancel(handle=handle)])

    def turn(self) -> None:
        """The scheduler acts on what it knows, and the gateway reads what there is."""
        outgoing = turn(self.state, self.now)
        for executor, plan in outgoing.plans:
            self.plans[executor.index].append(plan)
        self.to_kv.extend(outgoing.reservations)
        for executor in self.state.executors:
            untouched = executor.serves and not executor.stream_failure and executor not in self.state.touched
            assert not (untouched and is_due(executor)), "its plan is due, but nothing says so"
        self._read_gateway()
        check(self.state)

    def step(self) -> bool:
        """One random event; False where nothing is under way."""
        options: list[tuple[str, int]] = []
        options += [("plan", i) for i, queue in enumerate(self.plans) if queue]
        options += [("results", i) for i, queue in enumerate(self.results) if queue]
        options += [("run", e.index) for e in self.state.executors if e.connected]
        options += [("move", i) for i, sim in enumerate(self.sims) if sim.operations]
        if self.to_kv:
            options.append(("to_kv", 0))
        if self.from_kv:
            options.append(("from_kv", 0))
        self.random.shuffle(options)
        for kind, index in options:
            if self._do(kind, index):
                self.now += 0.001
                self.turn()
                return True
        return False

    def _do(self, kind: str, index: int) -> bool:
        if kind == "plan":
            self.sims[index].take(self.plans[index].popleft())
        elif kind == "results":
            apply(self.state, self.executor(index), self.results[index].popleft(), self.now)
        elif kind == "run":
            message = self.sims[index].run()
            if message is not None:
                self.results[index].append(message)
            return message is not None or any(s.credit for s in self.sims[index].sequences.values())
        elif kind == "move":
            self.sims[index].move()
            self.kv.report(self.sims[index])
            self.from_kv.extend(self.kv.take_pushes())
        elif kind == "to_kv":
            self.from_kv.append(self.kv.handle(self.to_kv.popleft()))
            self.from_kv.extend(self.kv.take_pushes())
        else:
            take(self.state, self.from_kv.popleft(), self.now)
        return True

    def settle(self, limit: int = 200_000) -> None:
        """Runs until nothing is under way, waiting for short timers."""
        for _ in range(limit):
            if not self.step():
                self.kv.stand_still()
                self.from_kv.extend(self.kv.take_pushes())
                if self.from_kv:
                    continue
                alarm = next_alarm(self.state)
                if alarm is None or alarm > self.now + 1.0:
                    return
                self.now = max(self.now, alarm)
                self.turn()
        raise AssertionError("no end in sight")

    def _read_gateway(self) -> None:
        if not self.gateway.has_output:
            return
        message = self.gateway.take_output()
        for started in message.started:
            assert not self.clients[started.handle].started
            self.clients[started.handle].started.append(started)
        at = 0
        for handle, choice, position, count in zip(
            message.handles, message.choices, message.positions, message.token_counts, strict=True
        ):
            client = self.clients[handle]
            assert client.started
            assert choice not in client.ends
            assert position == len(client.outputs[choice]), "a token twice, or a gap"
            client.outputs[choice] += message.token_ids[at : at + count]
            at += count
        assert at == len(message.token_ids)
        for scores in message.logprobs:
            known = self.clients[scores.handle].logprobs.setdefault(scores.choice, types_pb2.TokenLogprobs())
            known.MergeFrom(scores.output)
        for end in message.ended:
            client = self.clients[end.handle]
            assert end.choice not in client.ends, "ended twice"
            client.ends[end.choice] = end


def check(state: State) -> None:
    """What must hold after every event."""
    assert state.running == {stay: s for executor in state.executors for stay, s in executor.running.items()}
    for executor in state.executors:
        assert len(executor.running) <= (executor.description.max_sequences if executor.description else 0)
        assert executor.prefilling.keys() | executor.decoding.keys() == executor.running.keys()
        assert not executor.prefilling.keys() & executor.decoding.keys()
        assert executor.capped.keys() <= executor.decoding.keys()
        assert executor.starved.keys() <= executor.running.keys()
        assert not executor.leaving.keys() & executor.running.keys()
        for stay, sequence in executor.running.items():
            assert sequence.sequence_id == stay
            assert sequence.executor is executor
            assert sequence.computed_length <= sequence.projected_length <= sequence.slots_held
            assert sequence.projected_length <= sequence.length_limit
            assert sequence.granted_steps >= 0
            if sequence.granted_steps == 0:
                assert sequence.projected_length == sequence.computed_length
    live = sum(not s.executor and s.phase.name != "ENDED" for r in state.request_ids.values() for s in r.sequences)
    assert live == state.waiting_count


def submit(handle: int, prompt: list[int], max_tokens: int = 8, **fields: object) -> scheduler_pb2.Submit:
    stop = fields.pop("stop", [])
    made = scheduler_pb2.Submit(
        handle=handle,
        request_id=f"r{handle}",
        model="m",
        prompt_token_ids=prompt,
        sampling=types_pb2.SamplingParams(seed=handle),
        stop=types_pb2.StopCriteria(max_tokens=max_tokens, ignore_eos=bool(fields.pop("ignore_eos", False)), stop=stop),  # type: ignore[arg-type]
        choice_count=1,
        tenant="default",
    )
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(made, name).extend(value)
        else:
            setattr(made, name, value)
    return made


def assert_correct(harness: Harness, handle: int) -> None:
    """Every choice ended and equals the output of the request alone."""
    client = harness.clients[handle]
    for choice in range(client.submit.choice_count):
        output, reason = reference(client.submit, choice)
        end = client.ends[choice]
        if client.cancelled or choice in client.cut:
            assert client.outputs[choice] == output[: len(client.outputs[choice])]
            continue
        assert (client.outputs[choice], end.reason) == (output, reason), f"request {handle} choice {choice}: {end}"
