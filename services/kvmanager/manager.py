"""The kvmanager's core: who holds which block. No I/O and no clock; time is passed in, in seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from services.kvmanager.audit import find_violations
from services.kvmanager.executors import Executor, ExecutorSpec, InventoryBlock, Place
from services.kvmanager.holdings import GroupHolding, Holding, Refused, Sealed, Session
from services.kvmanager.matching import Match, PromptKeys, no_match
from services.kvmanager.placement import Candidate, Need, Outcome, choose
from services.kvmanager.reservations import (
    AllowedExecutor,
    ExtensionAnswer,
    GroupBlocks,
    Reservation,
    ReservationAnswer,
)


class KvManager:
    """Owns all executors' pools and all sessions. Each method does all it says or changes nothing.

    A sequence's blocks are freed once: by its scheduler's release; or, where that scheduler is gone, when its lease
    ran out and nothing of the epoch can write any more; or when the executor's blocks themselves are gone. `reclaim`
    does the second: it is called after every change of sessions or executors, and when a lease ends.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.executors: dict[str, Executor] = {}
        self.sessions: list[Session] = []  # in order of opening
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.outcomes: Counter[Outcome] = Counter()
        self._evicted_by_removed_pools = 0

    # Executors

    def register(self, spec: ExecutorSpec, inventory: Iterable[InventoryBlock], epoch: int) -> tuple[Executor, int]:
        """An executor connects. A returning process keeps its sequences, and the content that it confirms.

        Anything else begins anew from the inventory. Also returns how many inventory entries were unusable.
        """
        known = self.executors.get(spec.executor_id)
        if known is None or not known.continues(spec, epoch):
            return self.replace(spec, inventory, epoch)
        known.connected = True
        refused = known.confirm(inventory)
        known.closed_through = max(known.closed_through, epoch - 1)
        known.epoch = epoch
        return known, refused

    def replace(self, spec: ExecutorSpec, inventory: Iterable[InventoryBlock], epoch: int) -> tuple[Executor, int]:
        """An executor's blocks are new, as after a model was loaded: its sequences are gone, others' stay."""
        known = self.executors.pop(spec.executor_id, None)
        if known is not None:
            self._remove(known)
        executor = Executor(spec, epoch)
        self.executors[spec.executor_id] = executor
        return executor, executor.restore(inventory)

    def unregister(self, executor_id: str) -> None:
        """An executor's connection ended. Nothing new is placed there; what is held stays until it is released."""
        executor = self.executors.get(executor_id)
        if executor is not None:
            executor.connected = False
            self._forget_where_unused(executor)

    def report(self, executor_id: str, epoch: int, closed_epochs: Sequence[int]) -> None:
        """Takes in an executor's present epoch (0: not stated) and those that ended. Late or twice changes nothing."""
        executor = self.executors[executor_id]
        newest = max(executor.epoch, epoch)
        if closed_epochs and max(closed_epochs) > newest:
            raise Refused(f"epoch {max(closed_epochs)} cannot be closed: the newest is {newest}")
        executor.epoch = newest
        executor.closed_through = max(executor.closed_through, *closed_epochs, -1)

    # Schedulers

    def open_session(self, scheduler_id: str, now: float) -> Session:
        """A scheduler's stream begins and states that it holds nothing: older streams' leases end."""
        for session in self.sessions:
            if session.scheduler_id == scheduler_id:
                session.lease_end = min(session.lease_end, now)
        opened = Session(scheduler_id)
        self.sessions.append(opened)
        return opened

    def end_session(self, session: Session, now: float) -> None:
        """A scheduler's stream ended: its lease begins to run out."""
        session.lease_end = min(session.lease_end, now + self.lease_seconds)

    def reclaim(self, now: float) -> set[str]:
        """Frees what lost schedulers held where the lease ran out and the epoch ended. Returns who gained blocks."""
        gained = set()
        for session in [session for session in self.sessions if session.lease_end <= now]:
            for holding in list(session.holdings.values()):
                if holding.executor.has_ended(holding.epoch):
                    self._free(holding)
                    gained.add(holding.executor.spec.executor_id)
            if not session.holdings:
                self.sessions.remove(session)
        return gained

    # Sequences

    def reserve(self, session: Session, wanted: Reservation) -> ReservationAnswer:
        """Chooses an executor and holds exactly the blocks for tokens and lookahead there, or nothing at all."""
        answer = self._reserve(session, wanted)
        self.outcomes[answer.outcome] += 1
        return answer

    def extend(self, session: Session, sequence_id: int, slots: int) -> ExtensionAnswer:
        """Gives a sequence blocks up to `slots` token slots in every group, or none."""
        holding = session.holdings.get(sequence_id)
        if holding is None:
            return ExtensionAnswer(sequence_id, Outcome.INVALID, problem="unknown sequence")
        if slots <= 0:
            return ExtensionAnswer(sequence_id, Outcome.INVALID, problem=f"{slots} slots asked for")
        counts = [max(0, group.pool.spec.blocks_for(slots) - len(group.blocks)) for group in holding.groups]
        for group, count in zip(holding.groups, counts, strict=True):
            if len(group.blocks) + count > group.pool.blocks.count:
                return ExtensionAnswer(sequence_id, Outcome.NEVER_FITS)
        for group, count in zip(holding.groups, counts, strict=True):
            if count > group.pool.blocks.available_count:
                return ExtensionAnswer(sequence_id, Outcome.NO_BLOCKS)
        gained = [
            GroupBlocks(group.pool.spec.group_id, group.pool.ids(holding.grow(group, count)))
            for group, count in zip(holding.groups, counts, strict=True)
            if count
        ]
        return ExtensionAnswer(sequence_id, Outcome.GRANTED, gained)

    def progress(
        self, session: Session, sequence_id: int, computed: int, token_ids: Sequence[int]
    ) -> tuple[str, list[Sealed]]:
        """Takes in a sequence's computed length and new output. Returns its executor and the blocks it sealed."""
        holding = _held(session, sequence_id)
        return holding.executor.spec.executor_id, holding.advance(computed, token_ids)

    def release(self, session: Session, sequence_id: int) -> str:
        """Frees a sequence. Returns its executor."""
        holding = _held(session, sequence_id)
        self._free(holding)
        return holding.executor.spec.executor_id

    # State

    @property
    def sequence_count(self) -> int:
        return sum(len(session.holdings) for session in self.sessions)

    @property
    def evicted_count(self) -> int:
        present = sum(pool.evicted_count for executor in self.executors.values() for pool in executor.pools)
        return self._evicted_by_removed_pools + present

    def verify(self) -> list[str]:
        """What is inconsistent, for people; empty when sound. Cost: all blocks."""
        return find_violations(self.executors, self.sessions)

    def _reserve(self, session: Session, wanted: Reservation) -> ReservationAnswer:
        problem = wanted.problem()
        if wanted.sequence_id in session.holdings:
            problem = "sequence_id: already reserved"
        if problem:
            return ReservationAnswer(wanted.sequence_id, Outcome.INVALID, [problem])
        prompt = PromptKeys(wanted.key_space, wanted.tokens)
        options: list[tuple[Executor, Place, Match, AllowedExecutor]] = []
        for allowed in wanted.executors:
            executor = self.executors.get(allowed.executor_id)
            if executor is not None and executor.takes(wanted.key_space.model_fingerprint, allowed.epoch):
                for place in executor.places:
                    match = no_match(place) if wanted.skip_prefix_cache else prompt.match(place)
                    options.append((executor, place, match, allowed))
        decision = choose([_candidate(wanted, place, match, load) for _, place, match, load in options])
        if decision.outcome != Outcome.GRANTED:
            return ReservationAnswer(wanted.sequence_id, decision.outcome, decision.reasons)
        executor, place, match, allowed = options[decision.position]
        holding = _hold(session, wanted, executor, place, match, allowed.epoch)
        if not wanted.skip_prefix_cache:
            self.prefix_query_tokens += len(wanted.tokens)
            self.prefix_hit_tokens += match.cached_tokens
        first = place.pools[0].spec
        return ReservationAnswer(
            wanted.sequence_id,
            Outcome.GRANTED,
            decision.reasons,
            executor.spec.executor_id,
            place.node,
            first.tier,
            first.format,
            [GroupBlocks(group.pool.spec.group_id, group.pool.ids(group.blocks)) for group in holding.groups],
            match.cached_tokens,
        )

    def _free(self, holding: Holding) -> None:
        """The only way out of a holding; leaving its session first makes a second one impossible."""
        del holding.session.holdings[holding.sequence_id]
        executor = holding.executor
        executor.holdings.remove(holding)
        for group in holding.groups:
            group.pool.release(group.blocks, group.keys)
        self._forget_where_unused(executor)

    def _forget_where_unused(self, executor: Executor) -> None:
        if not executor.connected and not executor.holdings:
            self.executors.pop(executor.spec.executor_id, None)
            self._remove(executor)

    def _remove(self, executor: Executor) -> None:
        for holding in executor.holdings:
            del holding.session.holdings[holding.sequence_id]
        executor.holdings.clear()
        self._evicted_by_removed_pools += sum(pool.evicted_count for pool in executor.pools)


def _held(session: Session, sequence_id: int) -> Holding:
    holding = session.holdings.get(sequence_id)
    if holding is None:
        raise Refused("unknown sequence")
    return holding


def _candidate(wanted: Reservation, place: Place, match: Match, load: AllowedExecutor) -> Candidate:
    needs = []
    for pool, matched in zip(place.pools, match.blocks, strict=True):
        whole = pool.spec.blocks_for(len(wanted.tokens) + wanted.lookahead)
        needs.append(Need(whole - len(matched), pool.room_beside(matched), whole, pool.blocks.count))
    return Candidate(
        load.executor_id,
        place.node,
        load.running_count,
        load.queued_tokens,
        len(wanted.tokens),
        match.cached_tokens,
        tuple(needs),
    )


def _hold(session: Session, wanted: Reservation, executor: Executor, place: Place, match: Match, epoch: int) -> Holding:
    groups = []
    for pool, matched, keys in zip(place.pools, match.blocks, match.keys, strict=True):
        whole = pool.spec.blocks_for(len(wanted.tokens) + wanted.lookahead)
        blocks = pool.acquire(matched, whole - len(matched))
        groups.append(GroupHolding(pool, wanted.key_space.prefix(pool.spec.group_id), blocks, keys))
    holding = Holding(wanted.sequence_id, session, executor, epoch, wanted.tokens, match.cached_tokens, tuple(groups))
    session.holdings[wanted.sequence_id] = holding
    executor.holdings.add(holding)
    return holding
