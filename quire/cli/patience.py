"""What a request without an answer waits for, said on standard error."""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from quire.client import Client, ClientError
from quire.v1 import admin_pb2

SECONDS = 4.0
"""Who sees nothing for so long wants to know why."""


class Watch(NamedTuple):
    """The id that the request is to have, and what to call as soon as something of its answer has come."""

    request_id: str
    heard: Callable[[], None]


@contextmanager
def patience(client: Client, seconds: float = SECONDS) -> Iterator[Watch]:
    """Says why no answer comes, after a while."""
    request_id = f"cli-{uuid.uuid4().hex}"

    def tell() -> None:
        try:
            why = reason(client.status(), request_id)
        except ClientError as error:
            why = f"no answer yet, nor does the gateway say why: {error.message}"
        except ValueError:  # the client was closed meanwhile
            return
        if not timer.finished.is_set():
            print(f"quire: {why}", file=sys.stderr, flush=True)

    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()
    try:
        yield Watch(request_id, timer.cancel)
    finally:
        timer.cancel()


def reason(status: admin_pb2.GetStatusResponse, request_id: str) -> str:
    """What the services state of the request."""
    if not status.HasField("scheduler"):
        return "the request waits: the scheduler does not answer"
    queues = status.scheduler.queues
    for queue in queues:
        for one in queue.waiting:
            if one.request_id == request_id:
                return f"the request waits: {one.reason}"
        for admission in queue.admissions:
            if admission.request_id == request_id:
                return f"{admission.target} computes the prompt"
    if unlisted := sum(queue.waiting_count - len(queue.waiting) for queue in queues):
        return f"the request waits far back in the queue, among {unlisted:,} sequences"
    return "the prompt is being computed"
