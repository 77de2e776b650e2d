"""What a gateway has not yet told its scheduler: one message carries everything since the last one."""

from __future__ import annotations

from quire.v1 import scheduler_pb2
from services.common.constraints.limits import weight
from services.common.limits import MESSAGE_TOKENS
from services.gateway.requests import OpenRequest


class Outbox:
    """Collected changes for one stream. Submits are built when they leave, with the time that is left by then."""

    def __init__(self) -> None:
        self._submits: dict[int, OpenRequest] = {}
        self._attaches: dict[int, OpenRequest] = {}
        self._stops: list[scheduler_pb2.StopAt] = []
        self._holds: dict[int, bool] = {}
        self._cancels: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._submits or self._attaches or self._stops or self._holds or self._cancels)

    def submit(self, request: OpenRequest) -> None:
        self._submits[request.handle] = request

    def attach(self, request: OpenRequest) -> None:
        self._attaches[request.handle] = request

    def stop_at(self, handle: int, choice: int, length: int) -> None:
        self._stops.append(scheduler_pb2.StopAt(handle=handle, choice=choice, output_length=length))

    def hold(self, handle: int, held: bool) -> None:
        self._holds[handle] = held

    def cancel(self, handle: int) -> None:
        """Ends a request at the scheduler; one that was not sent yet is just dropped.

        One that may run there under an older handle can be ended only by whoever attached to it.
        """
        self._holds.pop(handle, None)
        if self._submits.pop(handle, None) is None:
            self._cancels.append(handle)

    def take(self, now: float) -> scheduler_pb2.ServeRequest:
        """The next message."""
        message = scheduler_pb2.ServeRequest()
        message.attaches.extend(request.to_attach() for request in self._attaches.values())
        self._attaches = {}
        tokens = 0
        while self._submits and tokens < MESSAGE_TOKENS:
            handle = next(iter(self._submits))
            submit = self._submits.pop(handle).to_submit(now)
            tokens += len(submit.prompt_token_ids) + sum(len(p.token_ids) for p in submit.progress)
            tokens += weight(submit.constraint)
            message.submits.append(submit)
        if not self._submits:  # what follows may speak of a request that has not left yet
            message.stops.extend(self._stops)
            message.holds.extend(scheduler_pb2.Hold(handle=h, held=held) for h, held in self._holds.items())
            message.cancels.extend(scheduler_pb2.Cancel(handle=handle) for handle in self._cancels)
            self._stops, self._holds, self._cancels = [], {}, []
        return message
