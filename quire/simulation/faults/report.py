"""What an executor tells the kvmanager: registrations, epochs, block operations that ended."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from quire.simulation.faults.link import Client
from quire.simulation.faults.party import Party
from quire.simulation.faults.stream import Wires
from quire.v1 import kvmanager_pb2, types_pb2
from services.executor.core import StepCore

IDLE_POLL_SECONDS = 0.02


class Ended(NamedTuple):
    """A block operation, and whether its destination holds the content."""

    operation_id: int
    is_done: bool


class Reporter(Party):
    """An executor as its link to the kvmanager sees it."""

    core: StepCore
    description: types_pb2.ExecutorDescription

    @abstractmethod
    def between_steps(self, command: Callable[[], None]) -> None:
        """Does something on the step thread."""


class ReportLink:
    """What the executor's KvLink does."""

    def __init__(self, wires: Wires, party: Reporter, kvmanager: Party) -> None:
        self._party = party
        self._client = Client(
            wires,
            "Report",
            party,
            kvmanager,
            hello=self._begin,
            opened=self._answered,
            received=self._asked,
            lost=lambda: None,
        )
        self._opening = 0  # counts streams
        self._is_registered = False  # on the present stream
        self._epoch = 0
        self._closed: list[int] = []
        self._unsent_closed: list[int] = []
        self._ended: list[Ended] = []
        self._unsent_ended: list[Ended] = []
        self._is_due = False

    def connect(self) -> None:
        self._client.connect()

    def epoch_opened(self, epoch: int, closed_epochs: list[int]) -> None:
        self._epoch = epoch
        self.epochs_closed(closed_epochs)
        self._say_soon()

    def epochs_closed(self, epochs: list[int]) -> None:
        if epochs:
            self._closed += epochs
            self._unsent_closed += epochs
            self._say_soon()

    def operation_ended(self, ended: Ended) -> None:
        self._ended.append(ended)
        self._unsent_ended.append(ended)
        self._say_soon()

    def _begin(self) -> None:
        """A new stream: registers once nothing is being moved, and states its inventory when it is asked for.

        A kvmanager that has restarted knows of no move, and what it takes for free must not be written any more.
        """
        self._opening += 1
        self._is_registered = False
        self._party.core.operations.hold()
        self._register(self._opening)

    def _register(self, opening: int) -> None:
        if opening != self._opening:
            return
        core = self._party.core
        if not core.operations.idle:
            self._party.after(IDLE_POLL_SECONDS, self._register, opening)
            return
        self._is_registered = True
        self._unsent_closed, self._unsent_ended = [], []
        request = self._request(self._closed, self._ended)
        request.description.CopyFrom(self._party.description)
        self._client.send(request)

    def _answered(self, response: kvmanager_pb2.ReportResponse) -> None:
        first_id = response.first_operation_id
        self._party.between_steps(lambda: self._party.core.operations.resume(first_id))
        self._asked(response)

    def _asked(self, response: kvmanager_pb2.ReportResponse) -> None:
        if response.ask:
            opening, number = self._opening, response.ask
            self._party.between_steps(lambda: self._state_inventory(opening, number))

    def _state_inventory(self, opening: int, number: int) -> None:
        if opening == self._opening:
            request = self._take_unsent()
            request.answers = number
            request.inventory.extend(self._party.core.inventory.to_sealed_blocks())
            self._client.send(request)

    def _say_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._party.after(0.0, self._say)

    def _say(self) -> None:
        self._is_due = False
        if self._is_registered and (self._unsent_closed or self._unsent_ended or self._epoch):
            self._client.send(self._take_unsent())

    def _take_unsent(self) -> kvmanager_pb2.ReportRequest:
        closed, self._unsent_closed = self._unsent_closed, []
        ended, self._unsent_ended = self._unsent_ended, []
        return self._request(closed, ended)

    def _request(self, closed: list[int], ended: list[Ended]) -> kvmanager_pb2.ReportRequest:
        return kvmanager_pb2.ReportRequest(
            epoch=self._epoch,
            last_step=self._party.core.ledger.last_step,
            closed_epochs=closed,
            done_operation_ids=[operation.operation_id for operation in ended],
            failed_operation_ids=[operation.operation_id for operation in ended if not operation.is_done],
        )
