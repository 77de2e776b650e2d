"""What one reservation comes to: of the places where it may go the one that is chosen."""

from __future__ import annotations

from collections.abc import Mapping

from services.kvmanager.executors import Executor
from services.kvmanager.matching import PromptKeys
from services.kvmanager.narrowing import narrow
from services.kvmanager.options import Option
from services.kvmanager.placement import Decision, choose
from services.kvmanager.reservations import Reservation


def choose_option(
    executors: Mapping[str, Executor], wanted: Reservation, *, may_wait: bool, may_load: bool
) -> tuple[Decision, Option | None]:
    """The decision, and where it is to grant, the place that it fell on. Changes nothing.

    `may_wait`: for another sequence that is computing its prefix. `may_load`: for what lies in lower tiers.
    """
    keys = PromptKeys(wanted.key_space, wanted.tokens)
    narrowed = narrow(executors, wanted, keys)
    options: list[Option] = []
    for spot in narrowed.spots:
        option = Option.of(wanted, keys, *spot)
        if not may_wait:
            option.compute_alone()
        if may_load and not wanted.skip_prefix_cache:
            option.look_below()
        options.append(option)
    decision = choose([option.candidate(wanted) for option in options], narrowed.left_out)
    return decision, options[decision.position] if decision.position >= 0 else None
