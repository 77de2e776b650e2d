"""What one results message costs the scheduler's core: apply, then a turn that tops every sequence up.

    python -m benchmarks.scheduler [SEQUENCES ...]

CPU time of this thread, medians; the last line is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from statistics import median

from quire.v1 import executor_pb2
from services.scheduler.apply import apply
from services.scheduler.reserve import take
from services.scheduler.state import Limits
from services.scheduler.turn import turn
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe

ROUNDS = 100


def measure(count: int) -> dict[str, float]:
    """Microseconds per message with `count` sequences in steady decode."""
    description = describe(blocks=200 * count, block_size=32, max_sequences=count, max_step_tokens=64 * count)
    harness = Harness(description, limits=Limits(lookahead_tokens=64))
    for handle in range(1, count + 1):
        harness.send(submit(handle, [1] * 20, 4000, ignore_eos=True))
    state, executor = harness.state, harness.state.executors[0]
    while len(executor.decoding) < count or executor.chunking:
        harness.step()
    while harness.results[0]:
        apply(state, executor, harness.results[0].popleft(), harness.now)
    applied, turned = [], []
    for _ in range(ROUNDS):
        while harness.to_kv:
            harness.from_kv.append(harness.kv.handle(harness.to_kv.popleft()))
        while harness.from_kv:
            take(state, harness.from_kv.popleft(), harness.now)
        harness.turn()
        steps = min(executor.grant_steps, *(sequence.granted_steps for sequence in executor.running.values()))
        assert steps > 0
        message = executor_pb2.StepResults(
            epoch=executor.epoch,
            sequence_number=executor.acknowledged_results + 1,
            last_plan=executor.step,
            sequence_ids=list(executor.running),
            token_counts=[steps] * count,
            token_ids=[5] * (steps * count),
            computed_lengths=[sequence.computed_length + steps for sequence in executor.running.values()],
            step_counts=[steps] * count,
            timings=executor_pb2.StepTimings(step_count=steps, compute_seconds=0.01 * steps),
        )
        start = time.thread_time()
        apply(state, executor, message, harness.now)
        middle = time.thread_time()
        outgoing = turn(state, harness.now)
        end = time.thread_time()
        harness.to_kv.extend(outgoing.reservations)
        harness.gateway.take_output()
        applied.append((middle - start) * 1e6)
        turned.append((end - middle) * 1e6)
    return {"sequences": count, "apply_us": round(median(applied)), "turn_us": round(median(turned))}


def main() -> None:
    points = [measure(int(count)) for count in sys.argv[1:] or (1, 32, 256)]
    for point in points:
        print(f"{point['sequences']:5} sequences: apply {point['apply_us']} us, turn {point['turn_us']} us")
    print(json.dumps({"points": points}))


if __name__ == "__main__":
    main()
