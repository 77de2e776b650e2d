"""The kvmanager's wire: checks what came in, and translates to and from the core."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence

from quire.v1 import executor_pb2, kvmanager_pb2, types_pb2
from services.common.errors import QuireError, Reason, invalid
from services.kvmanager.executors import Executor, ExecutorSpec, InventoryBlock
from services.kvmanager.holdings import Sealed
from services.kvmanager.keys import KeySpace
from services.kvmanager.pools import Pool, PoolSpec
from services.kvmanager.reservations import (
    AllowedExecutor,
    ExtensionAnswer,
    GroupBlocks,
    Reservation,
    ReservationAnswer,
)


def read_hello(request: kvmanager_pb2.ReserveRequest) -> str:
    """The scheduler's id from a stream's first message."""
    if not request.HasField("hello"):
        raise QuireError(Reason.PROTOCOL, "hello: the first message must carry it")
    if not request.hello.scheduler_id:
        raise invalid("hello.scheduler_id", "must be set")
    if request.hello.held:
        raise QuireError(Reason.UNSUPPORTED, "hello.held: must be empty", field="hello.held")
    return request.hello.scheduler_id


def read_reservation(message: kvmanager_pb2.Reservation) -> Reservation:
    return Reservation(
        message.sequence_id,
        KeySpace(message.model_fingerprint, message.namespace, message.kv_policy, message.adapter),
        array("i", message.token_ids[:]),
        message.lookahead_tokens,
        [AllowedExecutor(e.executor_id, e.epoch, e.running_count, e.queued_tokens) for e in message.executors],
        message.skip_prefix_cache,
    )


def read_description(description: types_pb2.ExecutorDescription) -> ExecutorSpec:
    """An executor's pools; raises where they are not ones that a sequence can live in."""
    if not description.executor_id:
        raise invalid("description.executor_id", "must be set")
    sizes = {group.group_id: group.block_size for group in description.groups}
    if len(sizes) != len(description.groups):
        raise invalid("description.groups", "a group is named twice")
    if any(size <= 0 for size in sizes.values()):
        raise invalid("description.groups.block_size", "must be positive")
    pools = tuple(_read_pool(index, pool, sizes) for index, pool in enumerate(description.pools))
    _check_pools(pools, set(sizes))
    return ExecutorSpec(description.executor_id, description.model.fingerprint, pools)


def read_inventory(blocks: Iterable[executor_pb2.SealedBlock]) -> list[InventoryBlock]:
    return [InventoryBlock(block.group_id, block.block_id, block.key) for block in blocks]


def write_reservation(answer: ReservationAnswer) -> kvmanager_pb2.ReservationResult:
    result = kvmanager_pb2.ReservationResult(
        sequence_id=answer.sequence_id,
        outcome=kvmanager_pb2.ReservationOutcome.ValueType(answer.outcome),
        executor_id=answer.executor_id,
        node=answer.node,
        format=types_pb2.KvFormat.ValueType(answer.format),
        blocks=_write_blocks(answer.blocks),
        cached_tokens=answer.cached_tokens,
        reasons=answer.reasons,
    )
    if answer.cached_tokens:
        result.tier = types_pb2.Tier.ValueType(answer.tier)
        result.cached_state = kvmanager_pb2.BLOCK_STATE_READY
    return result


def write_extension(answer: ExtensionAnswer) -> kvmanager_pb2.ExtendResult:
    return kvmanager_pb2.ExtendResult(
        sequence_id=answer.sequence_id,
        outcome=kvmanager_pb2.ReservationOutcome.ValueType(answer.outcome),
        blocks=_write_blocks(answer.blocks),
    )


def write_sealed(executor_id: str, sealed: Iterable[Sealed]) -> kvmanager_pb2.ExecutorSealedBlocks:
    return kvmanager_pb2.ExecutorSealedBlocks(
        executor_id=executor_id,
        blocks=[executor_pb2.SealedBlock(block_id=s.block_id, key=s.key, group_id=s.group_id) for s in sealed],
    )


def write_space(executor: Executor) -> kvmanager_pb2.ExecutorSpace:
    return kvmanager_pb2.ExecutorSpace(
        executor_id=executor.spec.executor_id,
        available_block_count=executor.available_count,
        total_block_count=executor.block_count,
    )


def write_pool_status(executor_id: str, pool: Pool) -> kvmanager_pb2.PoolStatus:
    spec = pool.spec
    return kvmanager_pb2.PoolStatus(
        executor_id=executor_id,
        pool=types_pb2.BlockPool(
            pool_id=spec.pool_id,
            group_id=spec.group_id,
            tier=types_pb2.Tier.ValueType(spec.tier),
            format=types_pb2.KvFormat.ValueType(spec.format),
            rank_nodes=spec.nodes,
            block_count=spec.block_count,
            first_block_id=spec.first_block_id,
        ),
        free_count=pool.blocks.free_count,
        cached_count=pool.blocks.cached_count,
        leased_count=pool.blocks.leased_count,
    )


def _write_blocks(blocks: Sequence[GroupBlocks]) -> list[executor_pb2.BlockList]:
    return [executor_pb2.BlockList(group_id=group.group_id, block_ids=group.block_ids) for group in blocks]


def _read_pool(index: int, pool: types_pb2.BlockPool, block_sizes: dict[int, int]) -> PoolSpec:
    field = f"description.pools[{index}]"
    if pool.group_id not in block_sizes:
        raise invalid(f"{field}.group_id", f"{pool.group_id} is not among the groups")
    if pool.tier != types_pb2.TIER_DEVICE:
        name = types_pb2.Tier.Name(pool.tier) if pool.tier in types_pb2.Tier.values() else str(pool.tier)
        reason = Reason.UNSUPPORTED if pool.tier else Reason.INVALID_FIELD
        raise QuireError(reason, f"{field}.tier: {name}; must be TIER_DEVICE", field=f"{field}.tier")
    if pool.format not in types_pb2.KvFormat.values() or not pool.format:
        raise invalid(f"{field}.format", "must be a known format")
    if pool.block_count <= 0:
        raise invalid(f"{field}.block_count", "must be positive")
    if not 0 <= pool.first_block_id <= 2**31 - pool.block_count:
        raise invalid(f"{field}.first_block_id", "block ids must be 32-bit and not negative")
    return PoolSpec(
        pool.pool_id,
        pool.group_id,
        pool.tier,
        pool.format,
        tuple(pool.rank_nodes),
        pool.block_count,
        pool.first_block_id,
        block_sizes[pool.group_id],
    )


def _check_pools(pools: Sequence[PoolSpec], group_ids: set[int]) -> None:
    if len({pool.pool_id for pool in pools}) != len(pools):
        raise invalid("description.pools.pool_id", "a pool is named twice")
    for nodes in {pool.nodes for pool in pools}:
        groups = sorted(pool.group_id for pool in pools if pool.nodes == nodes)
        if len(set(groups)) != len(groups):
            field = "description.pools.format"
            raise QuireError(Reason.UNSUPPORTED, f"{field}: one pool per group and node", field=field)
        if set(groups) != group_ids:
            raise invalid("description.pools", f"groups {groups} on nodes {list(nodes)}, not {sorted(group_ids)}")
    in_order = sorted(pools, key=lambda pool: (pool.group_id, pool.first_block_id))
    for before, after in itertools.pairwise(in_order):
        if before.group_id == after.group_id and before.first_block_id + before.block_count > after.first_block_id:
            raise invalid("description.pools.first_block_id", f"pools {before.pool_id} and {after.pool_id} overlap")
