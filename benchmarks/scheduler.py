"""What the scheduler's core costs: a results message and the turn behind it, alone and while many sequences wait.

    python -m benchmarks.scheduler [SEQUENCES ...] [--waiting N --tenants T]

Running: `SEQUENCES` in steady decode; apply, then a turn that tops every sequence up. Waiting: beside them, N sequences
of T tenants with four priorities wait for room; every message ends a sequence, so that every turn admits one. CPU time
of this thread, medians; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median

from quire.v1 import executor_pb2, scheduler_pb2
from services.scheduler import requests
from services.scheduler.apply import apply
from services.scheduler.reserve import take
from services.scheduler.state import Executor, Limits
from services.scheduler.turn import turn
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import STOP, describe

ROUNDS = 100


def running(count: int, tenants: int = 1) -> Harness:
    """`count` sequences in steady decode."""
    description = describe(blocks=200 * count, block_size=32, max_sequences=count, max_step_tokens=64 * count)
    limits = Limits(lookahead_tokens=64, max_queued=1 << 20, max_queued_tenant=1 << 20)
    harness = Harness(description, limits=limits)
    for handle in range(1, count + 1):
        harness.send(submit(handle, [1] * 20, 4000, ignore_eos=True, tenant=f"t{handle % tenants}"))
    executor = harness.state.executors[0]
    while len(executor.decoding) < count or executor.chunking:
        harness.step()
    while harness.results[0]:
        apply(harness.state, executor, harness.results[0].popleft(), harness.now)
    return harness


def measure(harness: Harness, ends: int) -> tuple[float, float]:
    """Microseconds of apply and of the turn behind it; `ends` sequences end with every message."""
    state, executor = harness.state, harness.state.executors[0]
    applied, turned = [], []
    for _ in range(ROUNDS):
        while harness.to_kv:
            harness.from_kv.append(harness.kv.handle(harness.to_kv.popleft()))
        while harness.from_kv:
            take(state, harness.from_kv.popleft(), harness.now)
        harness.now += 0.02
        harness.to_kv.extend(turn(state, harness.now).reservations)
        message = answer(executor, ends)
        start = time.thread_time()
        apply(state, executor, message, harness.now)
        middle = time.thread_time()
        outgoing = turn(state, harness.now)
        end = time.thread_time()
        harness.to_kv.extend(outgoing.reservations)
        harness.gateway.take_output()
        applied.append((middle - start) * 1e6)
        turned.append((end - middle) * 1e6)
    return median(applied), median(turned)


def answer(executor: Executor, ends: int) -> executor_pb2.StepResults:
    """As many steps of every sequence as it is granted, up to a grant."""
    steps = {
        stay: min(executor.grant_steps, sequence.granted_steps)
        for stay, sequence in executor.running.items()
        if sequence.granted_steps and not sequence.chunks
    }
    # What just entered computes its prompt, a chunk at a time.
    chunks = {stay: s.chunks[0] for stay, s in executor.running.items() if s.chunks}
    stays = [*steps, *chunks]
    counts = [*steps.values(), *(int(_ends_prompt(executor, stay)) for stay in chunks)]
    return executor_pb2.StepResults(
        epoch=executor.epoch,
        sequence_number=executor.acknowledged_results + 1,
        last_plan=executor.step,
        sequence_ids=stays,
        token_counts=counts,
        token_ids=[5] * sum(counts),
        computed_lengths=[executor.running[stay].computed_length + (chunks.get(stay) or steps[stay]) for stay in stays],
        step_counts=[*steps.values(), *(1 for _ in chunks)],
        ended=[executor_pb2.SequenceEnd(sequence_id=stay, reason=STOP) for stay in list(steps)[:ends]],
        timings=executor_pb2.StepTimings(
            step_count=executor.grant_steps,
            compute_seconds=0.01 * executor.grant_steps,
            token_count=sum(steps.values()) + sum(chunks.values()),
            sampled_count=sum(counts),
        ),
    )


def _ends_prompt(executor: Executor, stay: int) -> bool:
    sequence = executor.running[stay]
    return sequence.computed_length + sequence.chunks[0] >= len(sequence.token_ids)


def fill(harness: Harness, count: int, tenants: int) -> None:
    """Lets `count` sequences wait, which arrived one after the other in the last minute and a half."""
    first = 1 + max(harness.clients)
    for number in range(count):
        arrived_at = harness.now - 90.0 * (1 - number / count)
        handle, tenant = first + number, f"t{number % tenants}"
        prompt = [1 + number % 7] * 32 + [number % 900 + 1] * (number % 64)
        priority = (0, 0, 0, 1, 5)[number % 5]
        submits = [submit(handle, prompt, 64, tenant=tenant, priority=priority)]
        requests.serve(harness.state, harness.gateway, scheduler_pb2.ServeRequest(submits=submits), arrived_at)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sequences", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--tenants", type=int, default=300)
    given = parser.parse_args()
    points = []
    for count in given.sequences:
        harness = running(count)
        if given.waiting:
            fill(harness, given.waiting, given.tenants)
        applied, turned = measure(harness, ends=1 if given.waiting else 0)
        steps = harness.state.executors[0].grant_steps
        point = {"sequences": count, "apply_us": applied, "turn_us": turned, "step_us": (applied + turned) / steps}
        points.append({name: round(value) for name, value in point.items()})
        beside = f" beside {given.waiting} of {given.tenants} tenants that wait" if given.waiting else ""
        print(f"{count:5} sequences{beside}: apply {applied:.0f} us, turn {turned:.0f} us for {steps} steps")
    print(json.dumps({"waiting": given.waiting, "tenants": given.tenants, "points": points}))


if __name__ == "__main__":
    main()
