"""One pool of blocks (executor, group, tier, format, nodes) with the index of its content, kept in step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from services.kvmanager.blocks import UNOWNED, BlockPool, BlockState, Taken
from services.kvmanager.events import ExecutorEvents
from services.kvmanager.eviction import LeafLru, PolicyFactory
from services.kvmanager.keys import ROOT
from services.kvmanager.prefix import PrefixIndex
from services.kvmanager.retention import NO_RETENTION, Quota, Retention
from services.kvmanager.usage import Clock, Namespaces, NamespaceUse, Times


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What an executor said of a pool. Tier and format have the numbers of the wire."""

    pool_id: int
    group_id: int
    tier: int
    format: int
    nodes: tuple[int, ...]  # NUMA node of each rank
    block_count: int
    first_block_id: int
    block_size: int  # token slots
    block_bytes: int = 0  # in the pool's format, 0 where unknown
    distance: int = 0  # of the pool from what computes: 10 is local, 0 unknown

    @property
    def node(self) -> int:
        """The first rank's node, -1 for none."""
        return self.nodes[0] if self.nodes else -1

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-tokens // self.block_size)


class Pool:
    """Hands out blocks and finds cached ones. Blocks are indices here; `ids` turns them into the executor's ids."""

    def __init__(
        self,
        spec: PoolSpec,
        quotas: Mapping[str, Quota] | None = None,
        events: ExecutorEvents | None = None,
        policy: PolicyFactory = LeafLru,
        clock: Clock | None = None,
    ) -> None:
        """`quotas` are those of namespaces; `events` hears of content that comes and goes.

        Pools may share a `clock`: whoever moves it on sees to it that `pass_time` of those with pins is called.
        """
        self.spec = spec
        self.blocks = BlockPool(spec.block_count, policy)
        self.index = PrefixIndex(spec.block_count)
        self.namespaces = Namespaces()
        self.times = Times(spec.block_count)
        self.evicted_count = 0
        self._quotas = quotas or {}
        self._events = events
        self._clock = clock or Clock()
        self._taken: set[int] | None = None  # blocks handed out since `watch`

    def pass_time(self, now: float) -> None:
        """What happens next happens at `now` (seconds of one clock); pins that end by then are over."""
        self._clock.pass_time(now)
        self.blocks.policy.pass_time(now)

    def ids(self, blocks: Sequence[int]) -> list[int]:
        first = self.spec.first_block_id
        return [first + block for block in blocks]

    def index_of(self, block_id: int) -> int | None:
        """The block with that id, None where it is another pool's."""
        block = block_id - self.spec.first_block_id
        return block if 0 <= block < self.spec.block_count else None

    def room_beside(self, matched: Sequence[int]) -> int:
        """Blocks that could be handed out once the matched ones are held."""
        return self.blocks.available_count - self.blocks.evictable_among(matched)

    def acquire(self, matched: Sequence[int], new_count: int, namespace: str | None = "") -> list[int]:
        """Holds cached blocks, then `new_count` fresh ones; the caller has checked `room_beside`.

        Without namespace they stay nobody's, until a holder with one comes.
        """
        owner = UNOWNED if namespace is None else self._owner(namespace)
        self.blocks.hold(matched)
        if self.blocks.owned_counts[UNOWNED] and owner != UNOWNED:
            self.blocks.adopt(matched, owner)
        taken = self.blocks.take(new_count, owner)
        if taken.evicted:
            self._evicted(taken)
        if self._taken is not None:
            self._taken.update(taken.blocks)
        return [*matched, *taken.blocks]

    def claim(self, blocks: Sequence[int], namespace: str = "") -> None:
        """Takes these very blocks, which are free, as `acquire` would: a holder from before comes back."""
        self.blocks.claim(blocks, self._owner(namespace))
        if self._taken is not None:
            self._taken.update(blocks)

    def oldest_cached(self, count: int) -> list[int]:
        """The cached blocks that would be evicted next."""
        return self.blocks.oldest(count)

    def discard(self, block: int) -> None:
        """Drops the content of a block that nobody holds, as of one that is kept elsewhere; others stay as they are."""
        if self.blocks.is_idle(block):
            self._forget(block)

    def settle(self, block: int, key: bytes, parent: bytes = ROOT, tokens: bytes = b"", adapter: str = "") -> bool:
        """Marks a held block as full. True where it became the block of its key, False where another one is.

        What follows the key is for those who follow events: the key before it, and the block's packed tokens.
        """
        self.blocks.advance(block, BlockState.READY)
        if not self.index.add(key, block):
            return False
        self.blocks.keep(block)
        self.times.stored(block, self._clock.now)
        if self._events is not None:
            self._events.stored(self.spec, key, parent, tokens, adapter)
        return True

    def release(
        self, blocks: Sequence[int], keys: Sequence[bytes], retention: Retention = NO_RETENTION, retained: int = 0
    ) -> None:
        """Takes one holder from each block, last first. `keys` belong to the leading blocks.

        Where a leading block has no key because another block had the same content first, that one counts as used
        now, so that it does not go before the blocks that follow it. `retention` is for the first `retained` blocks.
        """
        self.times.used(blocks, self._clock.now)
        retained = min(retained, len(keys))
        for block in reversed(blocks[len(keys) :]):
            self.blocks.drop(block)
        self._leave(blocks[retained : len(keys)], keys[retained:], 0, 0.0)
        self._leave(blocks[:retained], keys[:retained], *self._wanted(blocks, retention))

    def count_lookup(self, namespace: str, query_tokens: int, hit_tokens: int, deepest: int | None = None) -> None:
        """A prompt was looked up here and its prefix of `hit_tokens` found, `deepest` the block that it ends in."""
        use = self.namespaces.use(self._owner(namespace))
        use.query_tokens += query_tokens
        use.hit_tokens += hit_tokens
        if deepest is not None:
            self.times.found(deepest, self._clock.now)

    def uses(self) -> Iterator[tuple[str, NamespaceUse, int]]:
        """Each namespace that was seen of late: its name, what it used, and the blocks that it holds or has cached."""
        counts = self.blocks.owned_counts
        for name, owner in self.namespaces.items():
            yield name, self.namespaces.use(owner), counts[owner] if owner < len(counts) else 0

    def watch(self) -> None:
        """What the blocks hold is about to be stated: from now on, what is handed out is known better here."""
        if self._taken is None:
            self._taken = set()

    def restore(self, content: Mapping[int, bytes]) -> None:
        """Takes over stated content (block to key), in the order in which it was settled: the last goes first.

        Only of blocks that were free all the time since `watch`; that ends. Others lose a key that is not theirs.
        """
        if len(set(content.values())) != len(content):
            raise ValueError("two blocks with one key")
        self._forget_all(block for key, block in self.index.items() if content.get(block, key) != key)
        taken, self._taken = self._taken or (), None
        content = {
            block: key
            for block, key in content.items()
            if block not in taken and self.blocks.state(block) == BlockState.FREE and self.index.find(key) is None
        }
        self.blocks.restore(list(content)[::-1])
        for block, key in content.items():
            self.index.add(key, block)
            self.times.stored(block, self._clock.now)
            if self._events is not None:
                self._events.stored(self.spec, key, ROOT, b"", "")

    def keep_only(self, content: Mapping[int, bytes]) -> None:
        """Forgets every key that `content` (block to key) does not confirm.

        Not those of blocks that were handed out since `watch`; that ends.
        """
        taken, self._taken = self._taken or (), None
        self._forget_all(b for key, b in self.index.items() if b not in taken and content.get(b) != key)

    def _leave(self, blocks: Sequence[int], keys: Sequence[bytes], priority: int, pin_end: float) -> None:
        if self.blocks.are_keyed(blocks):
            self.blocks.drop_all(blocks[::-1], priority, pin_end)
            return
        for block, key in zip(reversed(blocks), reversed(keys), strict=True):
            is_twin = not self.blocks.is_keyed(block)
            self.blocks.drop(block, priority, pin_end)
            twin = self.index.find(key) if is_twin else None
            if twin is not None:
                self.blocks.touch(twin, priority, pin_end)

    def _evicted(self, taken: Taken) -> None:
        self.evicted_count += len(taken.evicted)
        self.times.evicted(taken.evicted, self._clock.now)
        for block in taken.evicted:
            self._removed(self.index.remove(block))
        for loser, count in Counter(taken.losers).items():
            self.namespaces.use(loser).evicted_count += count

    def _forget_all(self, blocks: Iterable[int]) -> None:
        for block in list(blocks):
            self._forget(block)

    def _forget(self, block: int) -> None:
        self._removed(self.index.remove(block))
        self.blocks.forget(block)

    def _removed(self, key: bytes) -> None:
        if self._events is not None:
            self._events.removed(self.spec, key)

    def _wanted(self, blocks: Sequence[int], retention: Retention) -> tuple[int, float]:
        """Priority and the end of the pin. A namespace whose pins fill its quota gets no more of them."""
        priority, seconds = retention
        if seconds <= 0 or not blocks or not self.blocks.policy.may_pin(self.blocks.owner(blocks[0])):
            return priority, 0.0
        return priority, self._clock.now + seconds

    def _owner(self, namespace: str) -> int:
        owner = self.namespaces.owner(namespace)
        if owner is not None:
            return owner
        for gone in self.namespaces.sweep(self.blocks.owned_counts):
            self.blocks.policy.drop_quota(gone)
        owner = self.namespaces.open(namespace)
        if namespace in self._quotas:
            quota = self._quotas[namespace].blocks(self.spec.block_count, self.spec.block_bytes)
            self.blocks.policy.set_quota(owner, quota)
        return owner
