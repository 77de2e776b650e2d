"""What a reservation would take at one place, and the taking."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.common.kv_policy import AHEAD_TOKENS
from services.kvmanager.copies import CopyPlan
from services.kvmanager.executors import Executor, Place
from services.kvmanager.holdings import GroupHolding, Holding, Session
from services.kvmanager.matching import Match, PromptKeys, no_match
from services.kvmanager.moves import Move, Spot
from services.kvmanager.placement import Candidate, Need
from services.kvmanager.pools import Pool
from services.kvmanager.reservations import AllowedExecutor, Reservation


@dataclass(slots=True)
class Option:
    """One place for one reservation. Nothing is held before `hold`."""

    executor: Executor
    place: Place
    load: AllowedExecutor
    match: Match
    slots: int  # token slots at first
    copies: tuple[CopyPlan, ...]  # per cache group
    below: list[Spot | None] = field(default_factory=list)  # where what follows the match lies in lower tiers

    @classmethod
    def of(
        cls, wanted: Reservation, keys: PromptKeys, executor: Executor, place: Place, load: AllowedExecutor
    ) -> Option:
        policy = executor.spec.policy
        match = no_match(keys, place) if wanted.skip_prefix_cache else keys.match(place, policy)
        cached, slots = match.cached_tokens, len(wanted.tokens) + wanted.lookahead
        if policy.colder:
            slots = min(slots, cached + AHEAD_TOKENS)
        copies = []
        for ages, group in zip(place.groups, match.groups, strict=True):
            size = ages[0].spec.block_size
            through = ages[0].spec.blocks_for(slots) * size
            changes = [*group.conversions(policy, size, cached), *policy.changes(size, cached, through)]
            copies.append(CopyPlan(ages, changes, group.key))
        return cls(executor, place, load, match, slots, tuple(copies))

    def compute_alone(self) -> None:
        """Waits for no other sequence."""
        self.match = self.match._replace(filler=None)

    def look_below(self) -> None:
        """Finds what follows the match in lower tiers, as far as there is room to bring it up."""
        if not self.executor.uses_lower_tiers or self.match.filler is not None:
            return
        pool, match = self.place.pools[0], self.match.groups[0]
        found = self.executor.moves.find_below(pool, match.keys[len(match.blocks) :])
        self.below = found[: pool.room_beside(match.blocks)]

    def load_below(self) -> list[Move]:
        """Begins to bring that up."""
        pool, match = self.place.pools[0], self.match.groups[0]
        first = len(match.blocks)
        keys = match.keys[first : first + len(self.below)]
        pool.acquire(match.blocks, 0, None)  # what it continues must not make room for it
        moves = self.executor.moves.bring_up(pool, keys, self.below, self.load.epoch)
        pool.release(match.blocks, match.keys[:first])
        return moves

    def candidate(self, wanted: Reservation) -> Candidate:
        """What placement must know of this option."""
        filler = self.match.filler
        return Candidate(
            executor_id=self.load.executor_id,
            node=self.place.node,
            distance=self.place.distance,
            running_count=self.load.running_count,
            queued_tokens=self.load.queued_tokens,
            running_beside=self.load.running_beside(wanted.output_tokens),
            slowness=self.load.slowness,
            prompt_tokens=len(wanted.tokens),
            cached_tokens=max(self.match.cached_tokens, filler.length if filler else 0),
            loadable_tokens=len(self.below) * self.place.pools[0].spec.block_size,
            needs=tuple(self._needs(max(len(wanted.tokens) + wanted.lookahead, wanted.most_tokens))),
        )

    def hold(self, session: Session, wanted: Reservation) -> Holding:
        """Takes the blocks; the caller has seen that the candidate fits now."""
        groups = []
        key_space = wanted.key_space
        for ages, match, plan in zip(self.place.groups, self.match.groups, self.copies, strict=True):
            found = match.by_age(len(ages))
            for pool, blocks in zip(ages[1:], found[1:], strict=True):
                pool.acquire(blocks, 0, key_space.namespace)
            fresh_count = ages[0].spec.blocks_for(self.slots) - len(match.blocks)
            fresh = ages[0].acquire(found[0], fresh_count, key_space.namespace)[len(found[0]) :]
            settled, pending = match.keys[: len(match.blocks)], deque(plan.take(key_space.namespace))
            groups.append(
                GroupHolding(
                    ages,
                    match.blocks + fresh,
                    settled,
                    match.keys,
                    key_space,
                    wanted.retention,
                    match.demoted,
                    pending,
                )
            )
            if not wanted.skip_prefix_cache:
                deepest = match.blocks[-1] if match.blocks and len(match.blocks) - 1 not in match.demoted else None
                ages[0].count_lookup(key_space.namespace, len(wanted.tokens), self.match.cached_tokens, deepest)
        return Holding(
            wanted.sequence_id,
            session,
            self.executor,
            self.place,
            self.load.epoch,
            wanted.tokens,
            self.match.cached_tokens,
            tuple(groups),
        )

    def _needs(self, slots: int) -> list[Need]:
        """Per pool: blocks beyond the found ones now, and the most that the sequence ever has at once."""
        needs = []
        policy = self.executor.spec.policy
        for ages, match, plan in zip(self.place.groups, self.match.groups, self.copies, strict=True):
            spec = ages[0].spec
            in_the_end = policy.most_counts(spec.block_size, slots)
            found = match.by_age(len(ages))
            first = spec.blocks_for(self.slots)
            needs.append(_need(ages[0], found[0], first - len(match.blocks), max(first, in_the_end[0])))
            for age in range(1, len(ages)):
                held = found[age] + plan.found[age]
                needs.append(_need(ages[age], held, plan.fresh[age], in_the_end[age]))
        return needs


def _need(pool: Pool, held: list[int], fresh: int, most: int) -> Need:
    return Need(fresh, pool.room_beside(held), most, pool.blocks.count)
