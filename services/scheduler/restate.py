"""A new stream to the kvmanager: what is held is stated again, what was asked is asked again; sequences run on."""

from __future__ import annotations

from collections.abc import Iterator

from quire.v1 import kvmanager_pb2
from services.common.limits import MESSAGE_TOKENS
from services.scheduler.lifecycle import leave, requeue, wait_again
from services.scheduler.state import State


def restate(state: State) -> list[kvmanager_pb2.ReserveRequest]:
    """The first messages of the new stream, of bounded size. Forgets what the older one was told or asked.

    The other side may be another process, or may have missed any number of messages: nothing is assumed of it.
    """
    _ask_again(state)
    messages = [kvmanager_pb2.ReserveRequest()]
    tokens = 0
    for held in _held(state):
        tokens += len(held.token_ids)
        if tokens > MESSAGE_TOKENS and messages[-1].held:
            messages.append(kvmanager_pb2.ReserveRequest())
            tokens = len(held.token_ids)
        messages[-1].held.append(held)
    messages[-1].all_held_stated = True
    return messages


def lose(state: State, sequence_ids: list[int]) -> None:
    """The kvmanager gave these blocks to others, or never had them: the sequences are computed anew."""
    for sequence_id in sequence_ids:
        sequence = state.running.get(sequence_id)
        if sequence is not None:
            leave(state, sequence)
            requeue(state, sequence)


def _held(state: State) -> Iterator[kvmanager_pb2.HeldSequence]:
    for executor in state.executors:
        for sequence in executor.running.values():
            assert sequence.stay is not None
            yield sequence.stay.held(sequence.token_ids, sequence.computed_length)
        for leaving in executor.leaving.values():
            yield leaving.stay.held(leaving.token_ids, leaving.computed_length)


def _ask_again(state: State) -> None:
    for asked in list(state.asked.values()):
        asked.model.asked_count = 0
        if (sequence := asked.sequence) is not None:
            wait_again(state, sequence)
    state.asked.clear()
    # What was released is not stated as held; what was computed is stated with the sequence.
    state.releases, state.keeps, state.progress, state.extends = [], [], [], []
    for executor in state.executors:
        executor.asked_count, executor.available_blocks = 0, None
        executor.operations = []  # the kvmanager sends again what it still wants
        executor.starved.clear()
        for sequence in executor.running.values():
            sequence.note_reported(executor.block_size)
            if sequence.slots_asked > sequence.slots_held:
                state.extends.append(sequence)
