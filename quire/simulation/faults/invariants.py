"""What must hold after every event, and what clients must get. All of it raises Violation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from quire.simulation.faults.scenario import BLOCK_SIZE, Scenario, Wanted
from quire.simulation.faults.truth import EOS, answer
from quire.v1 import types_pb2
from services.common.errors import QuireError, Reason
from services.executor.batch import Step
from services.executor.core import StepCore
from services.gateway.requests import OpenRequest
from services.kvmanager.manager import KvManager
from services.scheduler.sequence import Phase
from services.scheduler.state import Executor, State
from services.scheduler.turn import Outgoing

if TYPE_CHECKING:
    from quire.v1 import executor_pb2

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
GIVEN_UP = frozenset(
    {Reason.EXECUTOR_LOST, Reason.KVMANAGER_LOST, Reason.SCHEDULER_LOST, Reason.NO_EXECUTOR, Reason.DEADLINE}
)
"""How requests may end where something is away for too long."""


class Violation(AssertionError):
    """What must hold does not."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


class KvChecks:
    """Blocks are conserved, and none is held by two that both may write it."""

    def after_event(self, manager: KvManager) -> None:
        violations = manager.verify()
        require(not violations, f"the kvmanager's books: {'; '.join(violations)}")


class HasCore(Protocol):
    """An executor as its checks see it."""

    name: str
    life: int
    core: StepCore


class ExecutorChecks:
    """No step exceeds its limits, and no block is written that another present sequence has in its table."""

    def __init__(self, scenario: Scenario) -> None:
        self._shapes = {f"executor-{index}": shape for index, shape in enumerate(scenario.executors)}
        self._tables: dict[str, dict[int, frozenset[int]]] = {}  # executor -> sequence -> blocks as last computed
        self._epochs: dict[str, tuple[int, int]] = {}  # executor -> its process and epoch

    def before_step(self, executor: HasCore, step: Step) -> None:
        shape, sequences = self._shapes[executor.name], executor.core.sequences
        require(len(sequences) <= shape.max_sequences, f"{executor.name} holds {len(sequences)} sequences")
        require(len(step.inputs.token_ids) <= shape.max_step_tokens, f"{executor.name}: a step of too many tokens")
        epoch = (executor.life, executor.core.epoch)
        if self._epochs.get(executor.name) != epoch:  # ids mean other sequences now
            self._epochs[executor.name], self._tables[executor.name] = epoch, {}
        before = self._tables[executor.name]
        held = self._tables[executor.name] = {
            sequence_id: blocks for sequence_id, blocks in before.items() if sequence_id in sequences
        }
        tables = step.inputs.block_tables.tolist()
        ends = step.inputs.context_lengths.tolist()
        for row, table, end in zip(step.rows, tables, ends, strict=True):
            used = table[: -(-end // BLOCK_SIZE)]
            require(len(set(used)) == len(used), f"{executor.name}: a block twice in the table of one sequence")
            held[row.sequence.sequence_id] = frozenset(used)
        for row, table, end in zip(step.rows, tables, ends, strict=True):
            writes = set(table[(end - row.count - len(row.draft_ids)) // BLOCK_SIZE : -(-end // BLOCK_SIZE)])
            for sequence_id, blocks in held.items():
                if sequence_id != row.sequence.sequence_id and not writes.isdisjoint(blocks):
                    what = f"sequences {row.sequence.sequence_id} and {sequence_id} share {sorted(writes & blocks)}"
                    raise Violation(f"{executor.name} writes a block of two owners: {what}")


class SchedulerChecks:
    """The scheduler's books agree with each other, and what has expired is never computed."""

    def after_turn(self, state: State, outgoing: Outgoing, now: float) -> None:
        by_stay = {stay: s for executor in state.executors for stay, s in executor.running.items()}
        require(state.running == by_stay, "what runs is not what runs on executors")
        for executor in state.executors:
            self._check_executor(executor)
        waiting = sum(
            sequence.executor is None and sequence.phase is not Phase.ENDED
            for request in state.request_ids.values()
            for sequence in request.sequences
        )
        require(waiting == state.waiting_count, f"{waiting} sequences wait, {state.waiting_count} are counted")
        for executor, plan in outgoing.plans:
            self._check_plan(executor, plan, now)

    def _check_executor(self, executor: Executor) -> None:
        running = executor.running
        limit = executor.description.max_sequences if executor.description is not None else 0
        require(len(running) <= limit, f"{len(running)} sequences run on {executor.target}")
        parts = executor.prefilling.keys() | executor.decoding.keys()
        require(parts == running.keys(), f"{executor.target}: neither prefilling nor decoding")
        require(not executor.prefilling.keys() & executor.decoding.keys(), f"{executor.target}: both at once")
        require(executor.starved.keys() <= running.keys(), f"{executor.target}: starved, and not running")
        require(not executor.leaving.keys() & running.keys(), f"{executor.target}: leaving, and running")
        for stay, sequence in running.items():
            lengths = (sequence.computed_length, sequence.projected_length, sequence.slots_held)
            require(sequence.sequence_id == stay and sequence.executor is executor, f"stay {stay} is another's")
            require(lengths[0] <= lengths[1] <= lengths[2], f"stay {stay}: computed, projected, slots: {lengths}")
            require(lengths[1] <= sequence.length_limit, f"stay {stay} is granted more than it can use")
            require(sequence.granted_steps >= 0, f"stay {stay} has {sequence.granted_steps} steps granted")
            if sequence.granted_steps == 0:
                require(lengths[0] == lengths[1], f"stay {stay}: granted tokens without steps")

    def _check_plan(self, executor: Executor, plan: executor_pb2.StepPlan, now: float) -> None:
        for stay in (*plan.sequence_ids, *(entering.sequence_id for entering in plan.enter)):
            sequence = executor.running.get(stay)
            require(sequence is not None, f"a plan grants steps to stay {stay}, which does not run")
            deadline = sequence.request.deadline_at if sequence is not None else None
            require(deadline is None or now < deadline, f"stay {stay} is computed after its deadline")


class ClientChecks:
    """Every token once, in its place and equal to what the choice is alone; every request ends once, for a reason."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._truth: dict[tuple[int, int], list[int]] = {}
        self._seen: dict[tuple[int, int], int] = {}  # tokens compared so far
        self.outcomes: dict[int, str] = {}  # by request

    def seen(self, wanted: Wanted, request: OpenRequest) -> None:
        """Compares what came since the last call."""
        for choice in request.choices:
            key = (wanted.number, choice.index)
            start, output = self._seen.get(key, 0), choice.output
            if len(output) > start:
                truth = self._answer(wanted, choice.index)
                if output[start:] != truth[start : len(output)]:
                    what = f"{output[start:]} at {start} where {truth[start : len(output)]} is right"
                    raise Violation(f"request {wanted.number} choice {choice.index}: {what}")
                self._seen[key] = len(output)

    def ended(self, wanted: Wanted, request: OpenRequest) -> None:
        """Every choice ended by itself, or by its stop string."""
        self._close(wanted, "whole")
        for choice in request.choices:
            truth = self._answer(wanted, choice.index)
            if wanted.stop_token is not None and wanted.stop_token in truth:
                truth, reason = truth[: truth.index(wanted.stop_token)], STOP
            else:
                reason = STOP if wanted.ends and truth[-1] == EOS else LENGTH
            if (choice.output, choice.end) != (truth, reason):
                what = f"ended as {choice.end} with {choice.output}, where {reason} with {truth} is right"
                raise Violation(f"request {wanted.number} choice {choice.index} {what}")
        started = request.started
        require(started is not None, f"request {wanted.number} ended and never started")
        cached = started.cached_tokens if started is not None else 0
        require(0 <= cached < len(wanted.prompt), f"request {wanted.number}: {cached} cached tokens")

    def failed(self, wanted: Wanted, request: OpenRequest, error: QuireError) -> None:
        """The request ended with an error: only some reasons are good ones."""
        self._close(wanted, error.reason.name)
        slots = max(shape.blocks for shape in self._scenario.executors) * BLOCK_SIZE
        smallest = min(shape.blocks for shape in self._scenario.executors) * BLOCK_SIZE
        good = {
            Reason.DEADLINE: wanted.deadline is not None,
            Reason.NEVER_FITS: len(wanted.prompt) + wanted.max_tokens > min(slots, smallest),
            Reason.QUEUE_FULL: self._scenario.max_queued < 1000,
        }.get(error.reason, False)
        if self._scenario.may_give_up and error.reason in GIVEN_UP:
            good = True
        require(good, f"request {wanted.number} ended with {error.reason.name}: {error.message}")

    def cancelled(self, wanted: Wanted) -> None:
        self._close(wanted, "cancelled")

    def abandoned(self, wanted: Wanted) -> None:
        """Its gateway died, and the client with it."""
        self._close(wanted, "abandoned")

    def _close(self, wanted: Wanted, outcome: str) -> None:
        before = self.outcomes.get(wanted.number)
        require(before is None, f"request {wanted.number} ended twice: {before}, then {outcome}")
        self.outcomes[wanted.number] = outcome

    def _answer(self, wanted: Wanted, choice: int) -> list[int]:
        key = (wanted.number, choice)
        if key not in self._truth:
            self._truth[key] = answer(wanted.prompt, wanted.seed, choice, wanted.max_tokens, ends=wanted.ends)
        return self._truth[key]
