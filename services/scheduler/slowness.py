"""How much slower an executor is than its peers: a sick machine gets less. Pure.

Two signs. Its steps take longer than those of the median of its peers; a step grows with its sequences, but at most in
proportion to them, so that is granted to whoever runs more. Or it owes results for longer than they can take: the
present silence is the least that its next step takes.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from quire.v1 import executor_pb2

if TYPE_CHECKING:
    from services.scheduler.state import Executor, State

FAR_BEYOND = 3.0
"""Times as slow. What is less may be the length of contexts, or chance."""
PERIOD = 1.0
"""Seconds between two comparisons."""
KEPT_SECONDS = 10.0
"""Whoever computed nothing for so long is tried again."""
LEAST_SECONDS = 1.0
"""Silence is measured in units of what an answer may take, and of no less than this."""
SMOOTHING = 0.2
"""Weight of the newest message in a pace."""


class Slowness(NamedTuple):
    """How many times longer than its peers an executor takes, at least 1, and how that shows."""

    factor: float
    reason: str


SOUND = Slowness(1.0, "")


@dataclass(slots=True)
class Pace:
    """Steps that decode and nothing else, smoothed."""

    step_seconds: float = 0.0  # 0: none measured
    rows: float = 1.0  # sequences in a step
    measured_at: float = 0.0  # seconds
    heard_at: float = 0.0  # seconds: the last results of any kind


def note(executor: Executor, results: executor_pb2.StepResults, now: float) -> None:
    """Takes in what one message says of an executor's pace."""
    pace, timings = executor.pace, results.timings
    pace.heard_at = now
    if timings.step_count == 0 or timings.token_count > timings.sampled_count + timings.draft_count:
        return  # a prompt was computed as well: how long that took is not known well enough
    seconds = (timings.compute_seconds + timings.host_seconds) / timings.step_count
    rows = max(1.0, timings.token_count / timings.step_count)
    weight = SMOOTHING if pace.step_seconds > 0 else 1.0
    pace.step_seconds += weight * (seconds - pace.step_seconds)
    pace.rows += weight * (rows - pace.rows)
    pace.measured_at = now


def compare(state: State, now: float) -> None:
    """Brings every executor's slowness up to date, once in a while. Costs next to nothing in between."""
    if now < state.slowness_due_at:
        return
    state.slowness_due_at = now + PERIOD
    for name in state.models:
        peers = state.serving(name)
        usual = median([executor.pace for executor in peers])
        for executor in peers:
            by_steps = of_steps(executor.pace, usual, now) if usual is not None else SOUND
            executor.slowness = max(by_steps, of_silence(*_silence(executor, now)))


def median(paces: SequenceOf[Pace]) -> Pace | None:
    """The median by step time, of two the faster; None where fewer than two were measured."""
    measured = sorted((pace for pace in paces if pace.step_seconds > 0), key=lambda pace: pace.step_seconds)
    return measured[(len(measured) - 1) // 2] if len(measured) > 1 else None


def of_steps(pace: Pace, usual: Pace, now: float) -> Slowness:
    """By measured steps, against what is usual among peers."""
    if pace.step_seconds <= 0 or now - pace.measured_at > KEPT_SECONDS:
        return SOUND
    granted = usual.step_seconds * max(1.0, pace.rows / usual.rows)
    factor = pace.step_seconds / granted
    if factor < FAR_BEYOND:
        return SOUND
    return Slowness(
        factor,
        f"a step of {pace.rows:.0f} sequences takes {pace.step_seconds * 1000:.1f} ms, "
        f"{factor:.1f} times as long as those of its peers",
    )


def of_silence(silent_seconds: float, answer_seconds: float) -> Slowness:
    """By how long results are owed, against how long they may take."""
    factor = silent_seconds / max(answer_seconds, LEAST_SECONDS)
    if factor < FAR_BEYOND:
        return SOUND
    return Slowness(factor, f"no results for {silent_seconds:.1f} s, where {answer_seconds:.1f} s are expected")


def _silence(executor: Executor, now: float) -> tuple[float, float]:
    """How long results are owed, and how long what was granted may take until something is heard, in seconds."""
    owed = [sequence for sequence in executor.running.values() if sequence.granted_steps > 0]
    if not owed:
        return 0.0, 0.0
    since = max(executor.pace.heard_at, min(sequence.answered_at for sequence in owed))
    prefill = executor.step_time.prefill(sum(sum(sequence.chunks) for sequence in owed))
    return now - since, prefill + 2 * executor.grant_steps * executor.step_seconds
