"""A sequence that begins with the KV of another: it shares full blocks and takes a copy of the one that is not."""

from __future__ import annotations

from collections.abc import Iterator

from services.kvmanager.blocks import BlockState
from services.kvmanager.holdings import GroupHolding, Holding, Session
from services.kvmanager.pools import Pool
from services.kvmanager.reservations import BlockCopy, Reservation, ReservationAnswer, granted


def find_parent(session: Session, wanted: Reservation) -> Holding | None:
    """The sequence that a reservation begins with; None where it is a reservation like any other.

    With formats by age it always is: at another length, other blocks are cold.
    """
    parent, length = session.holdings.get(wanted.parent_sequence_id), wanted.parent_length
    if parent is None or not 0 < length < len(wanted.tokens) or parent.executor.spec.policy.colder:
        return None
    executor, epoch = parent.executor, parent.epoch
    allowed = any((a.executor_id, a.epoch) == (executor.spec.executor_id, epoch) for a in wanted.executors)
    if not allowed or not executor.connected or not executor.runs(wanted.key_space, epoch):
        return None
    known = min(length, len(parent.tokens))  # its scheduler tells of its last tokens later
    if parent.tokens[:known] != wanted.tokens[:known]:
        return None
    return parent if all(_can_fork(group, wanted) for group in parent.groups) else None


def fork(session: Session, wanted: Reservation, parent: Holding, operation_ids: Iterator[int]) -> ReservationAnswer:
    """Holds what the sequence shares with the parent that was found, and fresh blocks for the rest."""
    length, namespace = wanted.parent_length, wanted.key_space.namespace
    groups, copies = [], []
    for group in parent.groups:
        pool = group.pool
        full, part = divmod(length, pool.spec.block_size)
        blocks = pool.acquire(group.blocks[:full], _count(pool, wanted) - full, namespace)
        if part:
            pool.blocks.advance(blocks[full], BlockState.PENDING)
            copies.append(BlockCopy(next(operation_ids), pool, group.blocks[full], blocks[full]))
        keys = group.keys[:full]
        groups.append(GroupHolding(group.ages, blocks, keys, keys[:], wanted.key_space, wanted.retention))
    executor, place = parent.executor, parent.place
    forked = Holding(wanted.sequence_id, session, executor, place, parent.epoch, wanted.tokens, length, tuple(groups))
    return granted(forked, [f"a fork of sequence {parent.sequence_id}"], copies)


def _can_fork(group: GroupHolding, wanted: Reservation) -> bool:
    """Whether the parent's blocks of one cache group are there, and room for those that are not shared."""
    full, part = divmod(wanted.parent_length, group.pool.spec.block_size)
    return (
        group.key_space == wanted.key_space
        and full <= len(group.keys)
        and full + bool(part) <= len(group.blocks)
        and _count(group.pool, wanted) - full <= group.pool.blocks.available_count
    )


def _count(pool: Pool, wanted: Reservation) -> int:
    """Blocks of the sequence in all."""
    return pool.spec.blocks_for(len(wanted.tokens) + wanted.lookahead)
