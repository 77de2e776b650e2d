"""The kvmanager's real core behind the stream of one scheduler, without sockets."""

from __future__ import annotations

from quire.v1 import kvmanager_pb2
from services.kvmanager.executors import InventoryBlock
from services.kvmanager.manager import KvManager
from services.kvmanager.messages import read_description
from services.kvmanager.requests import apply_request
from services.kvmanager.responses import Responses
from tests.unit.scheduler.sim_executor import SimExecutor

OPERATIONS = 1_000_000
"""Operation ids of one process."""


class RealKv:
    """Takes and gives the messages of the wire. What was not asked for waits in `take_pushes`."""

    def __init__(self) -> None:
        self._first_operation_id = 1
        self.refusals = 0
        self._sims: dict[str, SimExecutor] = {}
        self.restart()

    def restart(self) -> None:
        """Another process, which knows nothing."""
        self._first_operation_id += OPERATIONS
        self.manager = KvManager(10.0, self._first_operation_id)
        self.session = self.manager.open_session("s", 0.0)
        self._pushes: list[kvmanager_pb2.ReserveResponse] = []

    def reopen(self) -> None:
        """A new stream of the same scheduler."""
        self.manager.end_session(self.session, 0.0)
        self._pushes = []
        self.session = self.manager.open_session("s", 0.0)
        self._say(Responses(self.manager))

    def register(self, sim: SimExecutor) -> None:
        """An executor that is known only has a new epoch."""
        name = sim.description.executor_id
        self._sims[name] = sim
        if name not in self.manager.executors:
            self.manager.enter(read_description(sim.description), sim.epoch)
            while sim.operations and sim.operations[0].operation_id < self._first_operation_id:
                sim.operations.popleft()
        self.report(sim)

    def report(self, sim: SimExecutor) -> None:
        name = sim.description.executor_id
        self.manager.report(name, sim.epoch, range(1, sim.epoch), sim.done)
        self.manager.reclaim(0.0)
        self._take_inventories()
        self._say(Responses(self.manager))

    def stand_still(self) -> None:
        """Nothing has happened for long."""
        responses = Responses(self.manager)
        for _ in range(2):
            responses.add_answers(self.manager.answer_stale())
        self._say(responses)

    def handle(self, request: kvmanager_pb2.ReserveRequest) -> kvmanager_pb2.ReserveResponse:
        response = apply_request(self.manager, self.session, request).to(self.session)
        assert self.manager.verify() == []
        self._take_inventories()
        return response

    def take_pushes(self) -> list[kvmanager_pb2.ReserveResponse]:
        pushes, self._pushes = self._pushes, []
        return pushes

    def assert_idle(self, sims: list[SimExecutor]) -> None:
        assert self.manager.sequence_count == 0
        assert not len(self.manager.waiting)
        for sim in sims:
            executor = self.manager.executors[sim.description.executor_id]
            assert not list(executor.moves)
            assert [pool.blocks.leased_count for pool in executor.pools] == [0] * len(executor.pools)

    def _take_inventories(self) -> None:
        """Executors that are asked answer at once."""
        for name, executor in self.manager.executors.items():
            if executor.asked:
                executor.settle(InventoryBlock(0, block, key) for block, key in self._sims[name].inventory.items())

    def _say(self, responses: Responses) -> None:
        responses.finish()
        assert self.manager.verify() == []
        self._pushes += [response for session, response in responses if session is self.session]
