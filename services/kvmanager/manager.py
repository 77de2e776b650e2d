"""The kvmanager's core: who holds which block. No I/O and no clock; time is passed in, in seconds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from services.kvmanager.asks import Asks
from services.kvmanager.audit import find_violations
from services.kvmanager.choice import choose_option
from services.kvmanager.events import EventLog, ExecutorEvents
from services.kvmanager.executors import Executor, ExecutorSpec, InventoryBlock
from services.kvmanager.forks import find_parent, fork
from services.kvmanager.growth import grow
from services.kvmanager.holdings import Holding, Refused, Sealed, Session
from services.kvmanager.moves import Move
from services.kvmanager.placement import Outcome
from services.kvmanager.recovery import Rebuilt, rebuild
from services.kvmanager.remote import RemoteContent
from services.kvmanager.reservations import ExtensionAnswer, Reservation, ReservationAnswer, Restated, granted
from services.kvmanager.retention import Quota
from services.kvmanager.usage import Clock
from services.kvmanager.waiting import WaitingRoom

Answer = tuple[Session, ReservationAnswer]


class KvManager:
    """Owns all executors' pools and all sessions. Each method does all it says or changes nothing.

    A sequence's blocks are freed once: by its scheduler's release; or, where that scheduler is gone, when its lease
    ran out and nothing of the epoch can write any more; or when the executor's blocks themselves are gone. `reclaim`
    does the second: it is called after every change of sessions or executors, and when a lease ends.

    A reservation whose prefix another sequence is computing, or that lies in a lower tier, is answered later: after
    anything that may have changed that, `answer_due` gives what is ready to be said.
    """

    def __init__(
        self,
        lease_seconds: float,
        first_operation_id: int = 1,
        quotas: Mapping[str, Quota] | None = None,
        events: EventLog | None = None,
    ) -> None:
        """`first_operation_id`: beyond all of earlier processes, lest an executor take a move for an older one.

        `quotas` are those of namespaces; `events` hears of content that comes and goes.
        """
        self.lease_seconds = lease_seconds
        self.first_operation_id = first_operation_id
        self.executors: dict[str, Executor] = {}
        self.sessions: list[Session] = []  # in order of opening
        self.waiting = WaitingRoom()
        self._restated: list[Rebuilt] = []
        self._operation_ids = itertools.count(first_operation_id)
        self._asks = Asks()
        self.prefix_query_tokens = 0
        self.prefix_hit_tokens = 0
        self.outcomes: Counter[Outcome] = Counter()
        self.events = events
        self._quotas = quotas
        self._clock = Clock()
        self._pinning: set[Executor] = set()  # those whose blocks anybody ever wanted pinned
        self._remotes: dict[str, RemoteContent] = {}  # by store
        self._evicted_by_removed_pools = 0

    def pass_time(self, now: float) -> None:
        """What happens next happens at `now`."""
        self._clock.pass_time(now)
        for executor in self._pinning:
            for pool in executor.pools:
                pool.pass_time(now)

    def next_pin_end(self) -> float | None:
        """When a pinned block can be evicted again; None while none is pinned."""
        pools = [pool for executor in self._pinning for pool in executor.hot_pools]
        return min((end for pool in pools if (end := pool.blocks.policy.next_pin_end()) is not None), default=None)

    # Executors

    def register(self, spec: ExecutorSpec, inventory: Iterable[InventoryBlock], epoch: int) -> tuple[Executor, int]:
        """As `enter`, with the inventory of this very moment. Also returns how many entries were unusable."""
        return (executor := self.enter(spec, epoch)), executor.settle(inventory)

    def enter(self, spec: ExecutorSpec, epoch: int) -> Executor:
        """An executor connects, and is asked for its inventory. A returning process keeps its sequences."""
        known = self.executors.get(spec.executor_id)
        if known is None or not known.continues(spec, epoch):
            return self.replace(spec, epoch)
        known.connected = True
        self._asks.executor_came(known)
        known.epoch = epoch
        self._close(known, max(known.closed_through, epoch - 1))
        return known

    def replace(self, spec: ExecutorSpec, epoch: int) -> Executor:
        """An executor's blocks are new, as after a model was loaded: its sequences are gone, others' stay. It is asked
        for its inventory; what schedulers restated before it came is held now.
        """
        known = self.executors.pop(spec.executor_id, None)
        if known is not None:
            self._remove(known)
        events = None if self.events is None else ExecutorEvents(self.events, spec.executor_id)
        remote = self._remotes.setdefault(spec.remote_store, RemoteContent()) if spec.remote_store else None
        executor = Executor(spec, epoch, self._operation_ids, self._quotas, events, remote, self._clock)
        self.executors[spec.executor_id] = executor
        self._asks.executor_came(executor)
        for session in self.sessions:
            for restated in [r for r in session.absent.values() if r.executor_id == spec.executor_id]:
                del session.absent[restated.sequence_id]
                self._restated.append(self._rebuild(session, executor, restated))
        return executor

    def unregister(self, executor_id: str) -> None:
        """An executor's connection ended. Nothing new is placed there; what is held stays until it is released."""
        if (executor := self.executors.get(executor_id)) is not None:
            executor.connected = False
            self._forget_where_unused(executor)

    def report(
        self,
        executor_id: str,
        epoch: int,
        closed_epochs: Sequence[int],
        done: Sequence[int] = (),
        failed: Sequence[int] = (),
    ) -> None:
        """Takes in an executor's present epoch (0: not stated), those that ended, and moves that are over.

        Late or twice changes nothing.
        """
        executor = self.executors[executor_id]
        newest = max(executor.epoch, epoch)
        if closed_epochs and max(closed_epochs) > newest:
            raise Refused(f"epoch {max(closed_epochs)} cannot be closed: the newest is {newest}")
        if newest > executor.epoch:
            executor.epoch = newest
            self._asks.epoch_opened(executor)
        self._over(executor.moves.finish(done, failed))
        self._close(executor, max(executor.closed_through, *closed_epochs, -1))

    # Schedulers

    def open_session(self, scheduler_id: str, now: float) -> Session:
        """A scheduler's stream begins. What it held on older streams it restates now, or it is given back."""
        for session in self.sessions:
            if session.scheduler_id == scheduler_id:
                session.lease_end = min(session.lease_end, now)
                self.waiting.closed(session)
        opened = Session(scheduler_id)
        self.sessions.append(opened)
        for executor in self.executors.values():
            if executor.scheduler is not None and executor.scheduler.scheduler_id == scheduler_id:
                executor.obey(opened)
        return opened

    def restate(self, session: Session, restated: Restated) -> None:
        """Takes over a sequence that this scheduler holds from before: from its older stream, or from the executor's
        inventory after a restart of this process. `take_restated` says what became of it.
        """
        executor = self.executors.get(restated.executor_id)
        self.waiting.cancel(session, restated.sequence_id)
        mine = [older for older in self.sessions if older.scheduler_id == session.scheduler_id]
        holdings = [older.holdings[restated.sequence_id] for older in mine if restated.sequence_id in older.holdings]
        freed = [self._give_back(holding) for holding in holdings]
        if executor is None:
            session.absent[restated.sequence_id] = restated
        else:  # nothing took its blocks meanwhile
            self._restated.append(self._rebuild(session, executor, restated))
        for left in freed:
            self._forget_where_unused(left)

    def all_restated(self, session: Session) -> set[str]:
        """A scheduler has restated all that it holds: what older streams of it hold besides was given up.

        Returns the executors that gained blocks.
        """
        self._asks.scheduler_restated(session.scheduler_id, self.executors.values())
        gained = set()
        for older in [s for s in self.sessions if s.scheduler_id == session.scheduler_id and s is not session]:
            for holding in list(older.holdings.values()):
                gained.add(holding.executor.spec.executor_id)
                self._free(holding)
            self.sessions.remove(older)
        return gained

    def take_restated(self) -> list[Rebuilt]:
        """Restated sequences: what each sealed anew, or why it is lost. Each once."""
        restated, self._restated = self._restated, []
        return [  # all of them hold their blocks by now: none can be given to another
            one._replace(extension=self.extend(one.session, one.sequence_id, one.slots)) if one.slots else one
            for one in restated
        ]

    def end_session(self, session: Session, now: float) -> None:
        """A scheduler's stream ended: its lease begins to run out."""
        session.lease_end = min(session.lease_end, now + self.lease_seconds)
        self.waiting.closed(session)

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

    def reserve(self, session: Session, wanted: Reservation) -> ReservationAnswer | None:
        """Chooses an executor and holds exactly the blocks for tokens and lookahead there, or nothing at all.

        None where it is better to wait: `answer_due` gives the answer then.
        """
        problem = wanted.problem()
        known = session.holdings, session.absent
        if any(wanted.sequence_id in ids for ids in known) or (session, wanted.sequence_id) in self.waiting:
            problem = "sequence_id: already reserved"
        if problem:
            return self._count(ReservationAnswer(wanted.sequence_id, Outcome.INVALID, [problem]))
        if (parent := find_parent(session, wanted)) is not None:
            forked = fork(session, wanted, parent, self._operation_ids)
            self._granted(parent.executor, parent.epoch, wanted)
            return self._count(forked)
        return self._reserve(session, wanted, may_wait=True, may_load=True)

    def answer_due(self) -> list[Answer]:
        """Answers to reservations that need wait no longer; each once."""
        due = self.waiting.take_due()
        found = [(p.session, self._reserve(p.session, p.wanted, may_wait=True, may_load=bool(p.filler))) for p in due]
        return [(session, answer) for session, answer in found if answer is not None]

    def answer_stale(self) -> list[Answer]:
        """Answers to reservations for whose prefix nothing was done since the last call."""
        stale = self.waiting.take_stale()
        found = [(p.session, self._reserve(p.session, p.wanted, may_wait=False, may_load=False)) for p in stale]
        return [(session, answer) for session, answer in found if answer is not None]

    def extend(self, session: Session, sequence_id: int, slots: int) -> ExtensionAnswer | None:
        """Gives a sequence blocks up to `slots` token slots in every group, or none.

        None for a restated one whose executor is not back: `take_restated` gives the answer then.
        """
        if slots <= 0:
            return ExtensionAnswer(sequence_id, Outcome.INVALID, problem=f"{slots} slots asked for")
        absent = session.absent.get(sequence_id)
        if absent is not None:
            absent.slots = slots
            return None
        holding = session.holdings.get(sequence_id)
        if holding is None:
            return ExtensionAnswer(sequence_id, Outcome.INVALID, problem="unknown sequence")
        answer = grow(holding, slots)
        if answer.blocks:
            self._make_room(holding.executor, holding.epoch)
        return answer

    def progress(
        self, session: Session, sequence_id: int, computed: int, token_ids: Sequence[int]
    ) -> tuple[str, list[Sealed]]:
        """Takes in a sequence's computed length and new output. Returns its executor and the blocks it sealed.

        The executor is "" where no block changed its state, as for most of the tokens that are decoded.
        """
        holding = session.holdings.get(sequence_id)
        if holding is None:
            absent = session.absent.get(sequence_id)
            if absent is None:
                raise Refused("unknown sequence")
            absent.advance(computed, token_ids)
            return "", []
        sealed = holding.advance(computed, token_ids)
        if sealed is None:
            return "", []
        self.waiting.advanced(holding)
        return holding.executor.spec.executor_id, sealed

    def release(self, session: Session, sequence_id: int) -> str:
        """Frees a sequence. Returns its executor, or "" where it only waited for blocks."""
        if self.waiting.cancel(session, sequence_id) or session.absent.pop(sequence_id, None) is not None:
            return ""
        holding = _held(session, sequence_id)
        self._free(holding)
        return holding.executor.spec.executor_id

    # State

    def take_moves(self) -> Iterator[tuple[Session, Executor, list[Move]]]:
        """Moves that executors are to be told of, by the scheduler that each obeys; each once."""
        for executor in self.executors.values():
            if not executor.has_lower_tiers or executor.scheduler not in self.sessions:
                continue
            if moves := executor.moves.take_unsent():
                yield executor.scheduler, executor, moves

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

    def _reserve(
        self, session: Session, wanted: Reservation, *, may_wait: bool, may_load: bool
    ) -> ReservationAnswer | None:
        decision, option = choose_option(self.executors, wanted, may_wait=may_wait, may_load=may_load)
        if option is None:
            return self._count(ReservationAnswer(wanted.sequence_id, decision.outcome, decision.reasons))
        option.executor.obey(session)
        if option.match.filler is not None:
            self.waiting.park_behind(session, wanted, option.match.filler)
            return None
        if option.below:
            self.waiting.park_for(session, wanted, option.load_below())
            return None
        holding = option.hold(session, wanted)
        if not wanted.skip_prefix_cache:
            self.prefix_query_tokens += len(wanted.tokens)
            self.prefix_hit_tokens += option.match.cached_tokens
        self._granted(option.executor, holding.epoch, wanted)
        return self._count(granted(holding, decision.reasons))

    def _granted(self, executor: Executor, epoch: int, wanted: Reservation) -> None:
        if wanted.retention.pin_seconds > 0:
            self._pinning.add(executor)
        self._make_room(executor, epoch)

    def _count(self, answer: ReservationAnswer) -> ReservationAnswer:
        self.outcomes[answer.outcome] += 1
        return answer

    def _make_room(self, executor: Executor, epoch: int) -> None:
        if executor.has_ended(epoch) or not executor.uses_lower_tiers:
            return  # its plans are not taken any more, or nothing would come back
        for pool in executor.hot_pools:
            executor.moves.make_room(pool, epoch)

    def _close(self, executor: Executor, through: int) -> None:
        """Nothing of epochs up to this one runs any more."""
        executor.closed_through = through
        self._over(executor.moves.abort(through))

    def _over(self, moves: Sequence[Move]) -> None:
        if moves:
            self.waiting.moved([move.operation_id for move in moves])

    def _rebuild(self, session: Session, executor: Executor, restated: Restated) -> Rebuilt:
        try:
            sealed = rebuild(session, executor, restated)
            executor.obey(session)
        except Refused as problem:
            return Rebuilt(session, restated.sequence_id, restated.executor_id, [], problem=str(problem))
        return Rebuilt(session, restated.sequence_id, restated.executor_id, sealed, restated.slots)

    def _free(self, holding: Holding) -> None:
        self._forget_where_unused(self._give_back(holding))

    def _give_back(self, holding: Holding) -> Executor:
        """The only way out of a holding; leaving its session first makes a second one impossible."""
        del holding.session.holdings[holding.sequence_id]
        executor = holding.executor
        executor.holdings.remove(holding)
        holding.release()
        self.waiting.left(holding)
        return executor

    def _forget_where_unused(self, executor: Executor) -> None:
        if not executor.connected and not executor.holdings:
            self.executors.pop(executor.spec.executor_id, None)
            self._remove(executor)

    def _remove(self, executor: Executor) -> None:
        for holding in executor.holdings:
            del holding.session.holdings[holding.sequence_id]
            self.waiting.left(holding)
        executor.holdings.clear()
        self._pinning.discard(executor)
        if executor.events is not None:
            executor.events.cleared()
        self._over(list(executor.moves))
        self._evicted_by_removed_pools += sum(pool.evicted_count for pool in executor.pools)


def _held(session: Session, sequence_id: int) -> Holding:
    holding = session.holdings.get(sequence_id)
    if holding is None:
        raise Refused("unknown sequence")
    return holding
