"""A tiny executor and a tiny kvmanager as plain objects, and a harness that runs the scheduler's core between them.

The executor's KV is a table of slots: a token is computed from what its blocks really hold, so wrong blocks, lost
tokens or early reuse change the output. The kvmanager asserts every rule that a scheduler must keep.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from dataclasses import dataclass, field

from quire.v1 import executor_pb2, kvmanager_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.scheduler import epochs, requests
from services.scheduler.alarms import next_alarm
from services.scheduler.apply import apply
from services.scheduler.reserve import take
from services.scheduler.state import Gateway, Limits, State
from services.scheduler.turn import turn

VOCAB, EOS = 1000, 0
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


def next_token(tokens: list[int], seed: int, choice: int, output_length: int) -> int:
    """Depends on every earlier token. About one in fifty is the end token."""
    data = repr((tokens, seed, choice, output_length)).encode()
    value = int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big")
    return EOS if value % 50 == 0 else 1 + value % (VOCAB - 1)


def reference(submit: scheduler_pb2.Submit, choice: int) -> tuple[list[int], int]:
    """The output of a choice computed alone, and its finish reason."""
    output: list[int] = []
    prompt = list(submit.prompt_token_ids)
    while True:
        output.append(next_token(prompt + output, submit.sampling.seed, choice, len(output)))
        if output[-1] == EOS and not submit.stop.ignore_eos:
            return output, STOP
        if len(output) >= submit.stop.max_tokens:
            return output, LENGTH


def describe(
    name: str = "m",
    *,
    executor_id: str = "e0",
    blocks: int = 64,
    block_size: int = 4,
    max_sequences: int = 8,
    max_step_tokens: int = 32,
    fingerprint: str = "f0",
    tokenizer: str = "t0",
) -> types_pb2.ExecutorDescription:
    return types_pb2.ExecutorDescription(
        executor_id=executor_id,
        model=types_pb2.ModelDescription(
            name=name,
            fingerprint=fingerprint,
            tokenizer_fingerprint=tokenizer,
            context_length=4096,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
        ),
        groups=[types_pb2.CacheGroup(group_id=0, name="target", block_size=block_size, block_bytes=64)],
        pools=[
            types_pb2.BlockPool(
                pool_id=0, group_id=0, tier=types_pb2.TIER_DEVICE, format=types_pb2.KV_FORMAT_FP32, block_count=blocks
            )
        ],
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        decode_step_seconds=0.01,
        prefill_tokens_per_second=1e6,
    )


@dataclass(eq=False)
class SimSequence:
    state: executor_pb2.SequenceState
    tokens: list[int]
    blocks: list[int]
    computed: int
    credit: deque[list[int]] = field(default_factory=deque)  # [token limit, steps]
    new: list[int] = field(default_factory=list)
    used: int = 0
    fresh: bool = True

    @property
    def steps(self) -> int:
        return sum(steps for _, steps in self.credit)


class SimExecutor:
    """Computes plans by the rules of the wire. One epoch at a time."""

    def __init__(self, description: types_pb2.ExecutorDescription) -> None:
        self.description = description
        self.block_size = description.groups[0].block_size
        count = description.pools[0].block_count
        self.slots: list[list[int | None]] = [[None] * self.block_size for _ in range(count)]
        self.epoch = 0
        self.largest_step = 0
        self.plan_count = 0
        self.reset()

    def reset(self) -> int:
        """Opens a new epoch; contents of blocks stay."""
        self.epoch += 1
        self.sequences: dict[int, SimSequence] = {}
        self.step = self.sent = self.report_credit = 0
        self.unanswered = False
        self.ended: list[executor_pb2.SequenceEnd] = []
        return self.epoch

    def take(self, plan: executor_pb2.StepPlan) -> None:
        if plan.epoch != self.epoch or plan.step != self.step + 1:
            raise QuireError(Reason.PLAN_GAP, f"plan {plan.step} after {self.step}")
        self.plan_count += 1
        self.step, self.report_credit, self.unanswered = plan.step, plan.report_credit, True
        for stay in plan.ended_sequence_ids:
            self.sequences.pop(stay, None)
        for gained in plan.append:
            if gained.sequence_id in self.sequences:
                self.sequences[gained.sequence_id].blocks += [i for b in gained.blocks for i in b.block_ids]
        for state in plan.enter:
            assert state.sequence_id not in self.sequences
            assert 0 <= state.computed_length < len(state.token_ids)
            blocks = [i for b in state.blocks for i in b.block_ids]
            self.sequences[state.sequence_id] = SimSequence(state, list(state.token_ids), blocks, state.computed_length)
        assert len(self.sequences) <= self.description.max_sequences
        assert len(plan.sequence_ids) == len(plan.token_limits) == len(plan.step_counts) == len(plan.draft_limits)
        for stay, limit, steps in zip(plan.sequence_ids, plan.token_limits, plan.step_counts, strict=True):
            assert limit >= 1
            assert steps >= 1
            if stay in self.sequences:
                self.sequences[stay].credit.append([limit, steps])
                if self.sequences[stay].state.stop.stop:
                    assert self.sequences[stay].steps <= 2

    def run(self) -> executor_pb2.StepResults | None:
        """One step, or what is left to say at rest."""
        left, due, hot = self.description.max_step_tokens, False, []
        computed = 0
        for sequence in self.sequences.values():
            if not sequence.credit:
                continue
            count = min(sequence.credit[0][0], len(sequence.tokens) - sequence.computed)
            if sequence.computed + count > len(sequence.blocks) * self.block_size or count > left:
                assert sequence.computed + count <= len(sequence.blocks) * self.block_size, "granted past its blocks"
                continue
            left -= count
            computed += count
            self._compute(sequence, count)
            if sequence.fresh and sequence.new:
                sequence.fresh = False
                hot.append(sequence)
            due = due or sequence.steps in (0, self.report_credit)
        self.largest_step = max(self.largest_step, computed)
        for ended in self.ended:
            hot.append(self.sequences.pop(ended.sequence_id))
        if computed == 0:
            if self.unanswered or any(s.used for s in self.sequences.values()):
                return self._message(list(self.sequences.values()), 0)
            return None
        if due:
            return self._message([*self.sequences.values(), *hot], 1)
        return self._message(hot, 1) if hot else None

    def _compute(self, sequence: SimSequence, count: int) -> None:
        for position in range(sequence.computed, sequence.computed + count):
            block = sequence.blocks[position // self.block_size]
            self.slots[block][position % self.block_size] = sequence.tokens[position]
        sequence.computed += count
        sequence.used += 1
        sequence.credit[0][1] -= 1
        if sequence.credit[0][1] == 0:
            sequence.credit.popleft()
        if sequence.computed < len(sequence.tokens):
            return
        read = [
            self.slots[sequence.blocks[p // self.block_size]][p % self.block_size] for p in range(sequence.computed)
        ]
        state = sequence.state
        output_length = len(sequence.tokens) - state.prompt_length
        token = next_token(read, state.sampling.seed, state.choice, output_length)  # type: ignore[arg-type]
        sequence.tokens.append(token)
        sequence.new.append(token)
        if token == EOS and not state.stop.ignore_eos:
            self.ended.append(executor_pb2.SequenceEnd(sequence_id=state.sequence_id, reason=STOP, stop_token_id=token))
        elif output_length + 1 >= state.stop.max_tokens:
            self.ended.append(executor_pb2.SequenceEnd(sequence_id=state.sequence_id, reason=LENGTH))

    def _message(self, sequences: list[SimSequence], steps: int) -> executor_pb2.StepResults:
        self.sent += 1
        self.unanswered = False
        told = [s for s in dict.fromkeys(sequences) if s.used]
        message = executor_pb2.StepResults(
            epoch=self.epoch,
            sequence_number=self.sent,
            last_plan=self.step,
            sequence_ids=[s.state.sequence_id for s in told],
            token_counts=[len(s.new) for s in told],
            token_ids=[token for s in told for token in s.new],
            computed_lengths=[s.computed for s in told],
            step_counts=[s.used for s in told],
            ended=self.ended,
            timings=executor_pb2.StepTimings(step_count=steps, compute_seconds=0.005 * steps),
        )
        for s in told:
            s.new, s.used = [], 0
        self.ended = []
        return message


@dataclass
class Held:
    executor_id: str
    namespace: str
    blocks: list[int]
    tokens: list[int]
    sealed: int  # blocks known to be ready


class SimKv:
    """Blocks with reference counts and a prefix cache over ready blocks. Asserts what schedulers owe it."""

    def __init__(self) -> None:
        self.used_ids: set[int] = set()
        self.restart()

    def restart(self) -> None:
        self.size: dict[str, int] = {}
        self.references: dict[str, list[int]] = {}
        self.cache: dict[str, dict[tuple[object, ...], int]] = {}
        self.epochs: dict[str, int] = {}
        self.fingerprints: dict[str, str] = {}
        self.held: dict[int, Held] = {}
        self.refusals = 0

    def register(self, executor: SimExecutor) -> None:
        name = executor.description.executor_id
        self.epochs[name] = executor.epoch
        self.fingerprints[name] = executor.description.model.fingerprint
        if name not in self.size:
            self.size[name] = executor.block_size
            self.references[name] = [0] * len(executor.slots)
            self.cache[name] = {}

    def available(self, name: str) -> int:
        return self.references[name].count(0)

    def handle(self, request: kvmanager_pb2.ReserveRequest) -> kvmanager_pb2.ReserveResponse:
        response = kvmanager_pb2.ReserveResponse()
        for stay in request.released_sequence_ids:
            held = self.held.pop(stay)  # KeyError: released twice, or never reserved
            for block in held.blocks:
                self.references[held.executor_id][block] -= 1
        for progress in request.progress:
            self._progress(progress)
        for stay, slots in zip(request.extend_sequence_ids, request.extend_token_counts, strict=True):
            response.extensions.append(self._extend(stay, slots))
        for reservation in request.reservations:
            response.reservations.append(self._reserve(reservation))
        for name, references in self.references.items():
            response.space.append(
                kvmanager_pb2.ExecutorSpace(
                    executor_id=name, available_block_count=self.available(name), total_block_count=len(references)
                )
            )
        return response

    def _progress(self, progress: kvmanager_pb2.SequenceProgress) -> None:
        held = self.held[progress.sequence_id]
        held.tokens += progress.token_ids
        size = self.size[held.executor_id]
        assert progress.computed_length <= min(len(held.tokens), len(held.blocks) * size)
        while (held.sealed + 1) * size <= progress.computed_length:
            key = (self.fingerprints[held.executor_id], held.namespace, *held.tokens[: (held.sealed + 1) * size])
            self.cache[held.executor_id].setdefault(key, held.blocks[held.sealed])
            held.sealed += 1

    def _extend(self, stay: int, slots: int) -> kvmanager_pb2.ExtendResult:
        held = self.held[stay]
        count = -(-slots // self.size[held.executor_id]) - len(held.blocks)
        assert count > 0
        if len(held.blocks) + count > len(self.references[held.executor_id]):
            return kvmanager_pb2.ExtendResult(sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NEVER_FITS)
        if count > self.available(held.executor_id):
            self.refusals += 1
            return kvmanager_pb2.ExtendResult(sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NO_BLOCKS)
        blocks = self._allocate(held.executor_id, count)
        held.blocks += blocks
        return kvmanager_pb2.ExtendResult(
            sequence_id=stay,
            outcome=kvmanager_pb2.RESERVATION_OUTCOME_GRANTED,
            blocks=[executor_pb2.BlockList(group_id=0, block_ids=blocks)],
        )

    def _allocate(self, name: str, count: int) -> list[int]:
        cached = set(self.cache[name].values())
        free = sorted((b for b, n in enumerate(self.references[name]) if n == 0), key=lambda b: (b in cached, b))
        blocks = free[:count]
        assert len(blocks) == count
        self.cache[name] = {k: b for k, b in self.cache[name].items() if b not in blocks}
        for block in blocks:
            self.references[name][block] += 1
        return blocks

    def _reserve(self, wanted: kvmanager_pb2.Reservation) -> kvmanager_pb2.ReservationResult:
        stay = wanted.sequence_id
        assert stay not in self.used_ids
        self.used_ids.add(stay)
        known = [
            e.executor_id
            for e in wanted.executors
            if self.epochs.get(e.executor_id) == e.epoch
            and self.fingerprints[e.executor_id] == wanted.model_fingerprint
        ]
        if not known:
            return kvmanager_pb2.ReservationResult(
                sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NO_EXECUTOR
            )
        name = max(known, key=self.available)
        size, tokens = self.size[name], list(wanted.token_ids)
        shared: list[int] = []
        while not wanted.skip_prefix_cache and (len(shared) + 1) * size < len(tokens):
            key = (wanted.model_fingerprint, wanted.namespace, *tokens[: (len(shared) + 1) * size])
            if key not in self.cache[name]:
                break
            shared.append(self.cache[name][key])
        whole = -(-(len(tokens) + wanted.lookahead_tokens) // size)
        if whole > len(self.references[name]):
            return kvmanager_pb2.ReservationResult(
                sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NEVER_FITS
            )
        for block in shared:
            self.references[name][block] += 1
        if whole - len(shared) > self.available(name):
            for block in shared:
                self.references[name][block] -= 1
            self.refusals += 1
            return kvmanager_pb2.ReservationResult(
                sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NO_BLOCKS
            )
        blocks = shared + self._allocate(name, whole - len(shared))
        self.held[stay] = Held(name, wanted.namespace, blocks, tokens, len(shared))
        return kvmanager_pb2.ReservationResult(
            sequence_id=stay,
            outcome=kvmanager_pb2.RESERVATION_OUTCOME_GRANTED,
            executor_id=name,
            blocks=[executor_pb2.BlockList(group_id=0, block_ids=blocks)],
            cached_tokens=len(shared) * size,
        )


@dataclass(eq=False)
class Client:
    """What one request's gateway saw."""

    submit: scheduler_pb2.Submit
    outputs: dict[int, list[int]]
    ends: dict[int, scheduler_pb2.ChoiceEnd] = field(default_factory=dict)
    started: list[scheduler_pb2.RequestStarted] = field(default_factory=list)
    cut: dict[int, int] = field(default_factory=dict)  # choice -> output length kept
    cancelled: bool = False

    @property
    def done(self) -> bool:
        return len(self.ends) == self.submit.choice_count


class Harness:
    """The scheduler's core between simulated peers. Messages of one link keep their order; links race."""

    def __init__(self, *descriptions: types_pb2.ExecutorDescription, limits: Limits | None = None, seed: int = 0):
        self.random = random.Random(seed)
        self.now = 100.0
        self.kv = SimKv()
        self.sims = [SimExecutor(d) for d in descriptions]
        self.state = State(tuple(f"t{i}" for i in range(len(self.sims))), limits or Limits(lookahead_tokens=8))
        self.plans: list[deque[executor_pb2.StepPlan]] = [deque() for _ in self.sims]
        self.results: list[deque[executor_pb2.StepResults]] = [deque() for _ in self.sims]
        self.to_kv: deque[kvmanager_pb2.ReserveRequest] = deque()
        self.from_kv: deque[kvmanager_pb2.ReserveResponse] = deque()
        self.clients: dict[int, Client] = {}
        self.gateway: Gateway = requests.open_gateway(self.state, "g")
        epochs.kvmanager_opened(self.state)
        for index in range(len(self.sims)):
            self.open(index)
        self.turn()

    # Events

    def open(self, index: int) -> None:
        """A new epoch of an executor: what was under way on its stream is gone."""
        sim, executor = self.sims[index], self.state.executors[index]
        self.plans[index].clear()
        self.results[index].clear()
        epoch = sim.reset()
        self.kv.register(sim)
        epochs.executor_opened(self.state, executor, epoch, sim.description, self.now)

    def lose(self, index: int) -> None:
        self.plans[index].clear()
        self.results[index].clear()
        epochs.executor_lost(self.state, self.state.executors[index], self.now)

    def restart_kv(self) -> None:
        """The kvmanager died and came back empty; every executor opens a new epoch."""
        epochs.kvmanager_lost(self.state, self.now)
        self.to_kv.clear()
        self.from_kv.clear()
        self.kv.restart()
        epochs.forget_reservations(self.state)
        epochs.kvmanager_opened(self.state)
        for index, executor in enumerate(self.state.executors):
            if executor.connected:
                self.open(index)

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
        self._read_gateway()
        check(self.state)

    def step(self) -> bool:
        """One random event; False where nothing is under way."""
        options: list[tuple[str, int]] = []
        options += [("plan", i) for i, queue in enumerate(self.plans) if queue]
        options += [("results", i) for i, queue in enumerate(self.results) if queue]
        options += [("run", i) for i, e in enumerate(self.state.executors) if e.connected]
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
            apply(self.state, self.state.executors[index], self.results[index].popleft(), self.now)
        elif kind == "run":
            message = self.sims[index].run()
            if message is not None:
                self.results[index].append(message)
            return message is not None or any(s.credit for s in self.sims[index].sequences.values())
        elif kind == "to_kv":
            self.from_kv.append(self.kv.handle(self.to_kv.popleft()))
        else:
            take(self.state, self.from_kv.popleft(), self.now)
        return True

    def settle(self, limit: int = 200_000) -> None:
        """Runs until nothing is under way, waiting for short timers."""
        for _ in range(limit):
            if not self.step():
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
        for end in message.ended:
            client = self.clients[end.handle]
            assert end.choice not in client.ends, "ended twice"
            client.ends[end.choice] = end


def check(state: State) -> None:
    """What must hold after every event."""
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
