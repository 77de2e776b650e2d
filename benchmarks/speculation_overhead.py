"""What does speculation take where nothing is drafted? Its own CPU time, as a part of the time of a step.

    python -m benchmarks.speculation_overhead --batch 1,8,32

The engine runs in this process. The proposer is asked at each step, and those steps count in which it had nothing to
propose; the scheduler's controller is asked at each top-up for a batch of as many sequences, whose drafts never were
right. CPU time is the thread's own, so it is true on a busy machine too, where steps take longer than they should.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.v1 import executor_pb2
from services.executor.batch import StepLimits
from services.executor.bench_loop import BenchLoop, greedy_sequence
from services.executor.description import describe_loaded
from services.executor.loader import LoadedModel, make_loader
from services.executor.numa import PoolPlace
from services.executor.settings import ExecutorSettings
from services.executor.speculation.proposer import Proposer
from services.executor.warmup import warm_up
from services.scheduler.apply import grant_steps
from services.scheduler.speculation.acceptance import Habit
from services.scheduler.speculation.controller import Controller, Drafting
from services.scheduler.state import Limits

BAR = 0.01
MOST, STEP_TOKENS = 16, 512
PROMPT, OUTPUT = 64, 64
TOP_UPS = 2000


class Timed:
    """A proposer whose CPU time is counted."""

    def __init__(self, proposer: Proposer) -> None:
        self._proposer = proposer
        self.seconds = 0.0
        self.proposed = False  # anything, since it was last set

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, *args: Any) -> list[list[int]]:
        started = time.thread_time()
        drafts = self._proposer.propose(*args)
        self.seconds += time.thread_time() - started
        self.proposed |= any(drafts)
        return drafts

    def computed(self, *args: Any) -> None:
        started = time.thread_time()
        self._proposer.computed(*args)
        self.seconds += time.thread_time() - started


def load(model: str, draft: str, batch: int) -> LoadedModel:
    block = 32
    settings = {"draft": draft, "block_size": block, "kv_blocks": batch * -(-(PROMPT + OUTPUT) // block)}
    return make_loader(ExecutorSettings.model_validate(settings | {"max_sequences": batch}))(model, model)


def of_proposer(model: LoadedModel, batch: int) -> tuple[float, float, int]:
    """CPU seconds of the proposer, seconds and number of steps, of those that had no drafts."""
    assert model.proposer is not None
    loop, timed = BenchLoop(model, StepLimits(batch, STEP_TOKENS)), Timed(model.proposer)
    loop._loop.proposer = timed
    ids, draw = list(range(1, batch + 1)), np.random.default_rng(1)
    entering = [
        greedy_sequence(number, draw.integers(0, 49_000, PROMPT).tolist(), PROMPT + OUTPUT, OUTPUT, 32)
        for number in ids
    ]
    grants = {"sequence_ids": ids, "token_limits": [PROMPT] * batch, "step_counts": [1] * batch}
    loop.take(executor_pb2.StepPlan(enter=entering, **grants))
    while loop.turn():
        pass
    steps = {"token_limits": [1] * batch, "step_counts": [OUTPUT] * batch, "draft_limits": [MOST] * batch}
    loop.take(executor_pb2.StepPlan(sequence_ids=ids, **steps))
    own, seconds, count = 0.0, 0.0, 0
    while True:
        timed.seconds, timed.proposed, started = 0.0, False, time.perf_counter()
        if not loop.turn():
            break
        if not timed.proposed:
            own += timed.seconds
            seconds += time.perf_counter() - started
            count += 1
    loop.check()
    return own, seconds, count


def of_controller(model: LoadedModel, batch: int, step_seconds: float) -> float:
    """Part of the time that the controller takes when it has chosen no drafts, its probes included."""
    measured = warm_up(model.backend, model.shape, STEP_TOKENS, PROMPT + OUTPUT, model.proposer)
    limits = StepLimits(batch, STEP_TOKENS)
    controller = Controller(describe_loaded("bench", limits, model, measured, PoolPlace(0, 10)), None)
    habits = [Habit(MOST) for _ in range(batch)]
    for habit in habits * 20:
        controller.acceptance.add(habit, 4, 4, 0)
    steps = grant_steps(Limits().grant_seconds, step_seconds)
    now = own = 0.0
    for _ in range(TOP_UPS):
        started = time.thread_time()
        grant = controller.grant(habits, [steps] * batch, now)
        drafts = [grant.drafts(habit) for habit in habits]
        controller.observe(steps, steps * batch, Drafting(), steps * step_seconds)
        own += time.thread_time() - started
        if grant.probed is not None:
            for _ in range(grant.probe_steps):
                controller.acceptance.add(grant.probed, max(drafts), max(drafts), 0)
        now += steps * step_seconds
    return own / now


def main(argv: Sequence[str]) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="smollm2")
    top.add_argument("--draft", default="ngram", help="as of quire up")
    top.add_argument("--batch", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    args = top.parse_args(argv)
    found = {}
    for batch in args.batch:
        model = load(args.model, args.draft, batch)
        own, seconds, steps = of_proposer(model, batch)
        if not seconds:
            sys.exit(f"batch {batch}: drafts were proposed in every step")
        proposer, controller = own / seconds, of_controller(model, batch, seconds / steps)
        found[batch] = proposer + controller
        print(f"batch {batch:<3} proposer {proposer:.3%} controller {controller:.3%} of a step", flush=True)
    print(json.dumps({"model": args.model, "draft": args.draft, "bar": BAR, "overhead": found}))
    return 0 if max(found.values()) < BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
