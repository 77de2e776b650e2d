"""Small executors and reservations for the kvmanager's tests."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from services.kvmanager.executors import Executor, ExecutorSpec, InventoryBlock
from services.kvmanager.holdings import Session
from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import KvManager
from services.kvmanager.pools import PoolSpec
from services.kvmanager.reservations import AllowedExecutor, Reservation, ReservationAnswer

MODEL = "a" * 64
LEASE = 10.0


def pool(
    count: int = 8, size: int = 4, first: int = 0, pool_id: int = 0, group: int = 0, nodes: tuple[int, ...] = ()
) -> PoolSpec:
    """A device pool with bf16 blocks."""
    return PoolSpec(pool_id, group, 1, 2, nodes, count, first, size)


def executor(name: str = "e", *pools: PoolSpec, model: str = MODEL) -> ExecutorSpec:
    return ExecutorSpec(name, model, pools or (pool(),))


def manager(*specs: ExecutorSpec, epoch: int = 1) -> tuple[KvManager, Session]:
    """A manager with these executors (by default one, of 8 blocks of 4 tokens) and a scheduler's session."""
    made = KvManager(LEASE)
    for spec in specs or (executor(),):
        made.register(spec, [], epoch)
    return made, made.open_session("s", now=0.0)


def reservation(
    sequence_id: int,
    tokens: Iterable[int],
    *,
    lookahead: int = 0,
    on: Sequence[str | AllowedExecutor] = ("e",),
    model: str = MODEL,
    namespace: str = "default",
    skip_prefix_cache: bool = False,
    kv_policy: str = "",
) -> Reservation:
    allowed = [AllowedExecutor(name, 1) if isinstance(name, str) else name for name in on]
    key_space = KeySpace(model, namespace, kv_policy)
    return Reservation(sequence_id, key_space, array("i", tokens), lookahead, allowed, skip_prefix_cache)


def ids(answer: ReservationAnswer) -> list[int]:
    """Block ids of an answer with one cache group."""
    (group,) = answer.blocks
    return group.block_ids


def free_order(made: KvManager, name: str = "e") -> list[int]:
    return made.executors[name].pools[0].blocks.free_order()


def eviction_order(made: KvManager, name: str = "e") -> list[int]:
    return made.executors[name].pools[0].blocks.eviction_order()


def compute(made: KvManager, session: Session, sequence_id: int) -> list[InventoryBlock]:
    """Reports all known tokens of a sequence as computed, and returns what that sealed."""
    held = session.holdings[sequence_id]
    _, sealed = made.progress(session, sequence_id, len(held.tokens), [])
    return [InventoryBlock(block.group_id, block.block_id, block.key) for block in sealed]


def only_executor(made: KvManager) -> Executor:
    (found,) = made.executors.values()
    return found
