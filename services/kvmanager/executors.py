"""An executor as the kvmanager sees it: its pools, its epochs, and whether it is connected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.common.kv_policy import HOT_ONLY, KvPolicy
from services.kvmanager.events import ExecutorEvents
from services.kvmanager.holdings import Holding, Session
from services.kvmanager.keys import KEY_BYTES, KeySpace
from services.kvmanager.moves import Moves
from services.kvmanager.placement import remoteness
from services.kvmanager.pools import Pool, PoolSpec
from services.kvmanager.remote import RemoteContent
from services.kvmanager.retention import Quota
from services.kvmanager.usage import Clock

DEVICE = 1
"""The tier that sequences compute from, as a number of the wire."""
FORMATS = {"fp8": 4, "int8": 5, "int4": 6}
"""Numbers of the wire of the formats that a policy names."""


@dataclass(frozen=True, slots=True)
class ExecutorSpec:
    """What an executor said of itself. Equal specs have equal blocks."""

    executor_id: str
    model_fingerprint: str  # empty while no model is loaded
    pools: tuple[PoolSpec, ...]
    policy: KvPolicy = HOT_ONLY
    remote_store: str = ""  # names the store that blocks can be sent to and taken from; empty for none


def policy_formats(policy: KvPolicy) -> list[int]:
    """The wire's numbers of the formats of age 1, 2, ..."""
    return [FORMATS[colder.format] for colder in policy.colder]


class InventoryBlock(NamedTuple):
    """A block whose content the executor knows."""

    group_id: int
    block_id: int
    key: bytes


Layout = tuple[int, int]
"""A cache group and the token slots of its blocks."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a sequence can live: the device pools of every cache group by age, hot first, all on the same nodes."""

    groups: tuple[tuple[Pool, ...], ...]
    pools: tuple[Pool, ...] = field(init=False)  # the hot ones
    node: int = field(init=False)
    distance: int = field(init=False)  # from what computes: 10 is local, 0 unknown
    remoteness: float = field(init=False)
    layout: Layout = field(init=False)  # of the first group
    cached: Mapping[bytes, int] = field(init=False)  # its hot blocks by key, as they are at any time
    filling: dict[bytes, Holding] = field(default_factory=dict)  # keys of blocks that a sequence is computing

    def __post_init__(self) -> None:
        self.pools = tuple(ages[0] for ages in self.groups)
        first = self.pools[0]
        self.node, self.distance = first.spec.node, first.spec.distance
        self.remoteness = remoteness(self.distance)
        self.layout, self.cached = (first.spec.group_id, first.spec.block_size), first.index.block_by_key


class Executor:
    """Pools and epochs of one executor. Outlives its connection as long as sequences hold its blocks."""

    def __init__(
        self,
        spec: ExecutorSpec,
        epoch: int,
        operation_ids: Iterator[int],
        quotas: Mapping[str, Quota] | None = None,
        events: ExecutorEvents | None = None,
        remote: RemoteContent | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`remote`: what is known of the store that it reaches, if any. `clock`: one for all of its pools."""
        self.spec = spec
        self.events = events
        self.pools = [Pool(pool, quotas, events, clock=clock) for pool in spec.pools]
        self.places = _places(self.pools, spec.policy)
        self.hot_pools = [pool for place in self.places for pool in place.pools]  # where new blocks come from
        self.block_count = sum(pool.blocks.count for pool in self.hot_pools)
        self.has_lower_tiers = remote is not None or any(pool.tier != DEVICE for pool in spec.pools)
        # Whether blocks move down and up: only where all are hot and of one cache group, else a copy of every age and
        # group would have to come up for one prefix.
        is_plain = not spec.policy.colder and all(len(place.groups) == 1 for place in self.places)
        self.uses_lower_tiers = self.has_lower_tiers and is_plain
        self.keeps_elsewhere = self.has_lower_tiers or bool(spec.policy.colder)  # than in hot blocks of the device
        self._policy_name = str(spec.policy)
        self.epoch = epoch  # the newest one heard of
        self.closed_through = -1  # nothing runs any more in this epoch and older ones
        self.connected = True
        self.asked = 0  # the number of the inventory that is awaited; 0 for none
        self.inherits = False  # has content from before this process knew of it
        self._stated = False  # an inventory ever was
        self.holdings: set[Holding] = set()
        self.moves = Moves(self.pools, DEVICE, operation_ids, remote)
        self.scheduler: Session | None = None  # whose plans it takes

    def obey(self, session: Session) -> None:
        """A scheduler places sequences here, or its stream is a new one; an executor has one scheduler."""
        if self.scheduler is not session:
            self.scheduler = session
            self.moves.send_again()  # what went to an older stream may have been lost with it

    @property
    def available_count(self) -> int:
        return sum([pool.blocks.available_count for pool in self.hot_pools])

    def takes(self, key_space: KeySpace, epoch: int) -> bool:
        """Whether sequences of that epoch may be placed here. A scheduler may know a newer epoch before we do: what is
        here from before is asked for again then.
        """
        if not self.connected or self.asked or (self.inherits and epoch != self.epoch):
            return False
        return self.runs(key_space, epoch)

    def runs(self, key_space: KeySpace, epoch: int) -> bool:
        """Whether sequences of that epoch may be here, as far as we know."""
        return (
            self.spec.model_fingerprint == key_space.model_fingerprint
            and self._policy_name == key_space.kv_policy
            and epoch >= self.epoch
            and epoch > self.closed_through
        )

    def has_ended(self, epoch: int) -> bool:
        """Whether nothing of that epoch can write any more: it was closed, or the executor is gone."""
        return epoch <= self.closed_through or not self.connected

    def continues(self, spec: ExecutorSpec, epoch: int) -> bool:
        """Whether a new registration is the same process with the same blocks; its epochs never go back."""
        return spec == self.spec and epoch >= self.epoch

    def ask(self, number: int) -> None:
        """What its blocks hold is to be stated. Until then sequences that are here go on, and none is placed here."""
        self.asked = number
        for pool in self.pools:
            pool.watch()

    def settle(self, inventory: Iterable[InventoryBlock]) -> int:
        """Takes over stated content the first time, and later keeps only what is confirmed.

        It is of some moment after `ask`. All that is written since is known here: who holds blocks from before has told
        so, and what was handed out meanwhile does not count. So no key names a block that was written over. Returns how
        many entries were unusable.
        """
        content, refused = self._by_pool(inventory)
        for pool, blocks in zip(self.pools, content, strict=True):
            if self._stated:
                pool.keep_only(blocks)
            else:
                pool.restore(blocks)
        self.inherits |= not self._stated and any(content)
        self._stated, self.asked = True, 0
        return refused

    def _by_pool(self, inventory: Iterable[InventoryBlock]) -> tuple[Sequence[Mapping[int, bytes]], int]:
        """Of several blocks with one key the last one counts: the others were dropped before it was made."""
        content: list[dict[int, bytes]] = [{} for _ in self.pools]
        blocks_by_key: list[dict[bytes, int]] = [{} for _ in self.pools]
        refused = 0
        for entry in inventory:
            for pool, blocks, known in zip(self.pools, content, blocks_by_key, strict=True):
                block = entry.block_id - pool.spec.first_block_id
                if pool.spec.group_id == entry.group_id and 0 <= block < pool.spec.block_count:
                    if len(entry.key) != KEY_BYTES or block in blocks:
                        refused += 1
                        break
                    if entry.key in known:
                        del blocks[known[entry.key]]
                        refused += 1
                    blocks[block] = entry.key
                    known[entry.key] = block
                    break
            else:
                refused += 1
        return content, refused


def _places(pools: Sequence[Pool], policy: KvPolicy) -> list[Place]:
    """Device pools that belong together: those on the same nodes. Registration saw to it that none lacks."""
    by_nodes: dict[tuple[int, ...], dict[int, list[Pool]]] = {}
    for pool in pools:
        if pool.spec.tier == DEVICE:
            by_nodes.setdefault(pool.spec.nodes, {}).setdefault(pool.spec.group_id, []).append(pool)
    ages = {format_: age for age, format_ in enumerate(policy_formats(policy), 1)}
    return [
        Place(
            tuple(tuple(sorted(group, key=lambda p: ages.get(p.spec.format, 0))) for _, group in sorted(groups.items()))
        )
        for groups in by_nodes.values()
    ]
