"""Small worlds whose times can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from quire.simulation.load import Lengths, Load, Tenant, closed
from quire.simulation.policies import policy
from quire.simulation.run import Run, simulate
from quire.simulation.service import Latencies
from quire.simulation.world import Scenario
from services.executor.cost_model import CostModel, Machine
from services.scheduler.settings import SchedulerSettings

SOLO = (Tenant("default"),)
MACHINE = Machine(
    description={"model": "none"},
    cost=CostModel(step=0.010, decode_row=0.0, context_token=0.0, prompt_token=0.0, prompt_pair=0.0),
    residuals={},
    block_size=16,
    block_bytes=1024,
    block_count=1024,
    max_sequences=8,
    max_step_tokens=256,
    context_length=4096,
    vocab_size=1000,
)
AT_ONCE = Latencies(link=0.0, message=0.0)


def load(*requests: tuple[float, int, int], tenants: tuple[int, ...] = ()) -> Load:
    """Requests of (seconds, prompt tokens, output tokens), by arrival."""
    arrivals, prompts, outputs = (np.array(column) for column in zip(*requests, strict=True))
    lengths = Lengths(prompts.astype(np.int32), outputs.astype(np.int32))
    count = len(requests)
    return Load(
        lengths,
        np.arange(count, dtype=np.int32),
        arrivals.astype(float),
        np.array(tenants or [0] * count, np.int16),
    )


def scenario(asked: Load, *, machine: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    """Messages take no time unless said otherwise."""
    return replace(
        Scenario(replace(MACHINE, **machine or {}), asked, SOLO, latencies=AT_ONCE),
        **changes,
    )


def run(what: Scenario, name: str = "fair", **settings: Any) -> Run:
    return simulate(what, policy(name, SchedulerSettings.model_validate(settings)))


def equal_requests(count: int, prompt_tokens: int, output_tokens: int, concurrency: int) -> Load:
    return closed(Lengths.fixed(prompt_tokens, output_tokens), count, concurrency, SOLO, 0)
