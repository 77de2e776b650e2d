"""Memory that is held and not used, and sequences next to what computes them."""

from __future__ import annotations

import random

from benchmarks.placement import run
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import AllowedExecutor
from tests.unit.kvmanager.helpers import executor, manager, pool, reservation


def test_less_than_4_percent_of_held_slots_are_empty_at_a_mean_length_of_500() -> None:
    """Lookahead apart: that is asked for, and used within a few steps."""
    draw = random.Random(1)
    made, session = manager(executor("e", pool(count=20_000, size=32)))
    held = used = 0
    for sequence in range(1, 401):
        tokens = max(1, round(draw.expovariate(1 / 500)))
        answer = made.reserve(
            session, reservation(sequence, [sequence] * tokens, on=[AllowedExecutor("e", 1)], namespace=str(sequence))
        )
        assert answer is not None
        assert answer.outcome == Outcome.GRANTED
        held += sum(len(group.block_ids) for group in answer.blocks) * 32
        used += tokens
    assert used / 400 > 450
    assert (held - used) / held < 0.04


def test_almost_all_sequences_lie_next_to_what_computes_them() -> None:
    """Eight executors on two nodes, as many blocks wanted as are local."""
    outcome = run(load=1.0, count=1500, seed=2)
    assert outcome.refused == 0
    assert outcome.share >= 0.95
