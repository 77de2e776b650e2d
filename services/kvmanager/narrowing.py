"""Which places a choice must look at closely: those that may have something of a prompt, and the best of the others.

Where nothing of a prompt is, a place offers fresh blocks and its load. Of all such places the best one beats the others
whatever else there is, so among many executors a choice costs little more than a glance at each one's load.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from services.kvmanager.executors import Executor, Place
from services.kvmanager.matching import PromptKeys
from services.kvmanager.placement import RUNNING_TOKENS, cost
from services.kvmanager.reservations import AllowedExecutor, Reservation


class Spot(NamedTuple):
    """A place on an allowed executor."""

    executor: Executor
    place: Place
    load: AllowedExecutor


class Narrowed(NamedTuple):
    """What to look at, and how many more there are: all of them worse than one that is in."""

    spots: list[Spot]
    left_out: int
    fitting: int  # those left out that have room


def narrow(wanted: Reservation, keys: PromptKeys, spots: Iterable[Spot]) -> Narrowed:
    """Drops every place that has nothing of the prompt, but for the best of them."""
    slots = len(wanted.tokens) + wanted.lookahead
    own = len(wanted.tokens) + RUNNING_TOKENS
    kept: list[Spot] = []
    best: Spot | None = None
    least: tuple[bool, bool, float, float, str, int] | None = None
    bare = fitting = 0
    for spot in spots:
        executor, place, load = spot
        if executor.has_lower_tiers or executor.spec.policy.colder or _begins(wanted, keys, place):
            kept.append(spot)
            continue
        bare += 1
        fits, fits_ever, share_left = True, True, 1.0
        for pool in place.pools:
            spec, room = pool.spec, pool.blocks.available_count
            count = spec.blocks_for(slots)
            fits = fits and count <= room
            fits_ever = fits_ever and spec.blocks_for(max(slots, wanted.most_tokens)) <= spec.block_count
            share_left = min(share_left, (room - count) / spec.block_count)
        fits = fits and fits_ever
        fitting += fits
        running = load.expected_running_count or load.running_count
        price = cost(own, place.distance, load.queued_tokens, running)
        rank = (not fits, not fits_ever, price, -share_left, load.executor_id, place.node)
        if least is None or rank < least:
            best, least = spot, rank
    if best is None or least is None:
        return Narrowed(kept, 0, 0)
    return Narrowed([*kept, best], bare - 1, fitting - (not least[0]))


def _begins(wanted: Reservation, keys: PromptKeys, place: Place) -> bool:
    """Whether a place holds the first block of a prompt, or a sequence there is computing it."""
    if wanted.skip_prefix_cache:
        return False
    pool = place.pools[0]
    known = keys.of(pool.spec.group_id, pool.spec.block_size)
    return bool(known) and (known[0] in place.filling or pool.index.find(known[0]) is not None)
