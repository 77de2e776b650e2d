"""Which places a choice must look at closely: those that may have something of a prompt, and the best of the others.

Where nothing of a prompt is, a place offers fresh blocks and its load. Of all such places the best one beats the others
whatever else there is, so among many executors a choice costs little more than a glance at each one's load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from services.kvmanager.executors import Executor, Layout, Place
from services.kvmanager.matching import PromptKeys
from services.kvmanager.placement import RUNNING_TOKENS
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


Bare = tuple[float, Executor, Place, AllowedExecutor]
"""A place without anything of the prompt, and what it costs."""


def narrow(executors: Mapping[str, Executor], wanted: Reservation, keys: PromptKeys) -> Narrowed:
    """Drops every place of the allowed executors that has nothing of the prompt, but for the best of them."""
    own, output, key_space = len(wanted.tokens) + RUNNING_TOKENS, wanted.output_tokens, wanted.key_space
    layout: Layout | None = None
    key: bytes | None = None  # the prompt's first, in that layout
    kept: list[Spot] = []
    bare: list[Bare] = []
    for load in wanted.executors:
        name, epoch, _, queued_tokens, _, slowness = load
        executor = executors.get(name)
        if executor is None or not executor.takes(key_space, epoch):
            continue
        beside = load.running_beside(output)
        for place in executor.places:
            if place.layout != layout:
                layout = place.layout
                key = None if wanted.skip_prefix_cache else keys.first(*layout)
            if executor.keeps_elsewhere or key in place.filling or key in place.cached:
                kept.append(Spot(executor, place, load))
            else:
                # `Candidate.cost`, written out: most of what a choice among many places takes is this.
                price = (own * place.remoteness + queued_tokens + RUNNING_TOKENS * beside) * slowness
                bare.append((price, executor, place, load))
    if bare:
        bare.sort(key=itemgetter(0))
        kept.append(_best(wanted, bare))
    return Narrowed(kept, max(0, len(bare) - 1))


def _best(wanted: Reservation, bare: Sequence[Bare]) -> Spot:
    """Of places by ascending cost the first with room, of equal ones the emptiest; else one that is large enough."""
    slots = len(wanted.tokens) + wanted.lookahead
    most = max(slots, wanted.most_tokens)
    best: tuple[float, str, int, Spot] | None = None
    least = 0.0
    large: Spot | None = None
    for price, executor, place, load in bare:
        if best is not None and price > least:
            break
        spot = Spot(executor, place, load)
        share_left = 1.0
        for pool in place.pools:
            spec = pool.spec
            if spec.blocks_for(most) > spec.block_count:
                break
            share_left = min(share_left, (pool.blocks.available_count - spec.blocks_for(slots)) / spec.block_count)
        else:
            large = large or spot
            ranked = (-share_left, load.executor_id, place.node, spot)
            if share_left >= 0 and (best is None or ranked[:3] < best[:3]):
                best, least = ranked, price
    if best is not None:
        return best[3]
    return large or Spot(*bare[0][1:])
