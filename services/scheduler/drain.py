"""What becomes of the sequences on an executor that takes no more: they end there, or go on elsewhere. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.scheduler.lifecycle import leave, requeue
from services.scheduler.sequence import Sequence
from services.scheduler.state import Executor, State


@dataclass(slots=True)
class _Room:
    """What another executor can take now."""

    executor: Executor
    sequences: int
    blocks: float  # beyond one for each sequence that runs there


def drain(state: State, executor: Executor, now: float) -> None:
    """Moves sequences as far as others have room now: those that would be cut off here, and those that would take
    longer to end than others take to compute them again.

    The rest is looked at again with the next turn. Where nobody else has the model, all stay until the executor ends.
    """
    if not executor.running:
        return
    rooms = _rooms(state, executor)
    if not rooms:
        return
    ends_at = executor.ends_at if executor.ends_at is not None else float("inf")
    lefts = {stay: seconds_left(executor, sequence) for stay, sequence in executor.running.items()}
    for stay in sorted(lefts, key=lambda stay: -lefts[stay]):
        sequence = executor.running[stay]
        room = next((room for room in rooms if _fits(state, sequence, room)), None)
        if room is None:
            continue
        if now + lefts[stay] <= ends_at and lefts[stay] <= seconds_to_repeat(sequence, room.executor):
            continue
        room.sequences -= 1
        room.blocks -= _blocks(state, sequence, room.executor) + 1
        here = f"{executor.target} takes no more, and it would take {lefts[stay]:.1f} s to end there"
        state.decisions.note(now, "moved", sequence, here)
        leave(state, sequence)
        requeue(state, sequence)


def seconds_left(executor: Executor, sequence: Sequence) -> float:
    """What a sequence takes to its end where it is, if it uses all tokens that it may."""
    unknown = sequence.length_limit + 1 - len(sequence.token_ids)
    prompt = len(sequence.token_ids) - sequence.computed_length
    return executor.step_time.prefill(prompt) + unknown * executor.step_seconds


def seconds_to_repeat(sequence: Sequence, executor: Executor) -> float:
    """What it takes to compute there what is computed already, should none of it be cached."""
    return executor.step_time.prefill(sequence.computed_length)


def _rooms(state: State, executor: Executor) -> list[_Room]:
    assert executor.model is not None
    model = state.models.get(executor.model.name)
    if model is None or not state.kv_connected or model.asked_count >= model.window:
        return []  # nobody is placed anywhere just now
    rooms = []
    for other in state.serving(executor.model.name):
        if other.takes and not other.starved and other.free_sequences > 0:
            blocks = float("inf") if other.available_blocks is None else other.available_blocks - len(other.running)
            rooms.append(_Room(other, other.free_sequences, blocks))
    return rooms


def _fits(state: State, sequence: Sequence, room: _Room) -> bool:
    return room.sequences > 0 and _blocks(state, sequence, room.executor) <= room.blocks


def _blocks(state: State, sequence: Sequence, executor: Executor) -> int:
    return executor.blocks_of(len(sequence.token_ids) + state.limits.lookahead_tokens)
