"""An executor core with the fake backend, driven step by step."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import executor_pb2
from services.executor.batch import StepLimits
from services.executor.core import StepCore
from services.executor.metrics import ExecutorMetrics
from services.executor.worker import StepLoop
from tests.unit.executor.fake_backend import FakeBackend, loaded
from tests.unit.executor.plans import plan


@dataclass
class Bench:
    """`sent` holds every event in order."""

    backend: FakeBackend
    loop: StepLoop
    sent: list = field(default_factory=list)
    step: int = 0

    @property
    def core(self) -> StepCore:
        return self.loop.core

    def take(self, **fields) -> None:
        self.step += 1
        self.core.take(plan(self.core.epoch, self.step, **fields))

    def run(self, most: int = 1000) -> list:
        """Steps until nothing can be computed, or `most`; what was sent meanwhile."""
        before = len(self.sent)
        for _ in range(most):
            if not self.loop.turn():
                break
        return self.sent[before:]


def make_bench(limits: StepLimits) -> Bench:
    sent: list = []
    loop = StepLoop(StepCore(limits), sent.append, ExecutorMetrics(CollectorRegistry()))
    backend = FakeBackend()
    loop.backend = backend
    loop.core.set_model(loaded(backend).limits)
    loop.core.open(executor_pb2.RunHello(scheduler_id="test"))
    return Bench(backend, loop, sent)


@pytest.fixture
def bench() -> Bench:
    return make_bench(StepLimits(sequences=8, tokens=32))
