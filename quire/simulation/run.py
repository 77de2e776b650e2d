"""One policy over one scenario, from the first request to the last answer."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any, NamedTuple

from quire.simulation.measures import Measures
from quire.simulation.policies import Policy
from quire.simulation.report import report
from quire.simulation.world import Scenario, World


class Run(NamedTuple):
    """What came of it."""

    report: dict[str, Any]
    measures: Measures


def simulate(
    scenario: Scenario, policy: Policy, dollars_per_hour: float = 0.0, on_end: Callable[[], object] = lambda: None
) -> Run:
    """`dollars_per_hour` is the price of an executor; `on_end` is called for each request that ends."""
    world = World(scenario, policy)
    world.gateway.on_end = on_end
    gc.collect()
    gc.freeze()  # what was there before stays: no collection need walk it again
    try:
        world.run()
    finally:
        gc.unfreeze()
    return Run(report(world, policy.name, dollars_per_hour), world.gateway.measures)
