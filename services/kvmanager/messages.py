"""The kvmanager's wire: checks what came in, and translates to and from the core."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence

from quire.v1 import executor_pb2, kvmanager_pb2, types_pb2
from services.common.errors import QuireError, Reason, invalid
from services.common.kv_policy import PERIOD, KvPolicy
from services.kvmanager.executors import Executor, ExecutorSpec, InventoryBlock, policy_formats
from services.kvmanager.holdings import Sealed
from services.kvmanager.keys import KeySpace
from services.kvmanager.moves import Move
from services.kvmanager.pools import Pool, PoolSpec
from services.kvmanager.reservations import (
    AllowedExecutor,
    BlockCopy,
    Demoted,
    ExtensionAnswer,
    GroupBlocks,
    Reservation,
    ReservationAnswer,
    Restated,
)
from services.kvmanager.retention import Retention


def read_hello(request: kvmanager_pb2.ReserveRequest) -> str:
    """The scheduler's id from a stream's first message."""
    if not request.HasField("hello"):
        raise QuireError(Reason.PROTOCOL, "hello: the first message must carry it")
    if not request.hello.scheduler_id:
        raise invalid("hello.scheduler_id", "must be set")
    return request.hello.scheduler_id


def read_loads(loads: kvmanager_pb2.ExecutorLoads) -> list[AllowedExecutor]:
    """The executors that reservations of a message may go to. Raises PROTOCOL where that makes no sense."""
    names, epochs, slownesses = loads.executor_ids[:], loads.epochs[:], loads.slownesses[:]
    counts = (loads.running_counts[:], loads.queued_tokens[:], loads.output_tokens[:])
    if any(len(column) != len(names) for column in (epochs, *counts, slownesses)):
        raise QuireError(Reason.PROTOCOL, "loads: the arrays differ in length")
    if len(set(names)) != len(names):
        raise QuireError(Reason.PROTOCOL, "loads: an executor is named twice")
    negative = any(min(column, default=0) < 0 for column in counts)
    if negative or not all(map(math.isfinite, slownesses)) or min(slownesses, default=1.0) < 1:
        raise QuireError(Reason.PROTOCOL, "loads: counts are at least 0, slownesses finite and at least 1")
    return list(map(AllowedExecutor, names, epochs, *counts, slownesses))


def read_reservation(message: kvmanager_pb2.Reservation, loads: Sequence[AllowedExecutor] = ()) -> Reservation:
    """`loads`: those of its message. Raises PROTOCOL where it names another."""
    return Reservation(
        message.sequence_id,
        KeySpace(message.model_fingerprint, message.namespace, message.kv_policy, message.adapter),
        array("i", message.token_ids[:]),
        message.lookahead_tokens,
        _allowed(message, loads),
        message.skip_prefix_cache,
        Retention(message.cache_priority, message.pin_ms / 1000),
        message.parent_sequence_id,
        message.parent_length,
        message.most_tokens,
        message.expected_output_tokens,
    )


def read_held(message: kvmanager_pb2.HeldSequence) -> Restated:
    return Restated(
        message.sequence_id,
        message.executor_id,
        message.epoch,
        KeySpace(message.model_fingerprint, message.namespace, message.kv_policy, message.adapter),
        array("i", message.token_ids[:]),
        message.computed_length,
        [GroupBlocks(group.group_id, list(group.block_ids)) for group in message.blocks],
        [
            Demoted(d.group_id, d.at_length, list(d.positions), list(d.block_ids), list(d.writes))
            for d in message.demotions
        ],
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
    try:
        policy = KvPolicy.parse(description.kv_policy)
    except ValueError as error:
        raise invalid("description.kv_policy", str(error)) from error
    if any(PERIOD % size for size in sizes.values()) and policy.colder:
        raise invalid("description.groups.block_size", f"must divide {PERIOD} where formats change with age")
    _check_pools(pools, set(sizes), policy)
    return ExecutorSpec(description.executor_id, description.model.fingerprint, pools, policy, description.remote_store)


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
        demotions=_write_demotions(answer.sequence_id, answer.demotions),
        copies=map(_write_copy, answer.copies),
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
        demotions=_write_demotions(answer.sequence_id, answer.demotions),
    )


def write_moves(executor: Executor, moves: Iterable[Move]) -> list[kvmanager_pb2.ExecutorOperations]:
    return [
        kvmanager_pb2.ExecutorOperations(
            executor_id=executor.spec.executor_id, epoch=epoch, operations=[_write_move(move) for move in alike]
        )
        for epoch, alike in itertools.groupby(moves, lambda move: move.epoch)
    ]


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
        coming_block_count=executor.moves.coming_count,
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
            block_bytes=spec.block_bytes,
            distance=spec.distance,
        ),
        free_count=pool.blocks.free_count,
        cached_count=pool.blocks.cached_count,
        leased_count=pool.blocks.leased_count,
    )


def _allowed(message: kvmanager_pb2.Reservation, loads: Sequence[AllowedExecutor]) -> Sequence[AllowedExecutor]:
    indexes = message.load_indexes
    if not indexes:
        return loads
    if min(indexes) < 0 or max(indexes) >= len(loads):
        raise QuireError(Reason.PROTOCOL, f"load_indexes: the message has {len(loads)} loads")
    return [loads[index] for index in indexes]


def _write_blocks(blocks: Sequence[GroupBlocks]) -> list[executor_pb2.BlockList]:
    return [executor_pb2.BlockList(group_id=group.group_id, block_ids=group.block_ids) for group in blocks]


def _write_demotions(sequence_id: int, demotions: Iterable[Demoted]) -> list[executor_pb2.BlockDemotion]:
    return [
        executor_pb2.BlockDemotion(
            sequence_id=sequence_id,
            group_id=change.group_id,
            at_length=change.length,
            positions=change.positions,
            block_ids=change.block_ids,
            writes=change.writes,
        )
        for change in demotions
    ]


def _write_copy(copy: BlockCopy) -> executor_pb2.BlockOperation:
    spec = copy.pool.spec
    return executor_pb2.BlockOperation(
        operation_id=copy.operation_id,
        kind=executor_pb2.BLOCK_OPERATION_KIND_COPY,
        phase=executor_pb2.BLOCK_OPERATION_PHASE_BEFORE,
        group_id=spec.group_id,
        source_pool_id=spec.pool_id,
        source_block_id=spec.first_block_id + copy.source,
        destination_pool_id=spec.pool_id,
        destination_block_id=spec.first_block_id + copy.destination,
    )


def _write_move(move: Move) -> executor_pb2.BlockOperation:
    message = executor_pb2.BlockOperation(
        operation_id=move.operation_id,
        kind=executor_pb2.BlockOperationKind.ValueType(move.kind),
        phase=executor_pb2.BLOCK_OPERATION_PHASE_BEFORE,
        group_id=move.spots[0].pool.spec.group_id,
        key=move.key,
    )
    if move.source is not None:
        spec = move.source.pool.spec
        message.source_pool_id, message.source_block_id = spec.pool_id, spec.first_block_id + move.source.block
    if move.destination is not None:
        spec = move.destination.pool.spec
        message.destination_pool_id = spec.pool_id
        message.destination_block_id = spec.first_block_id + move.destination.block
    return message


def _read_pool(index: int, pool: types_pb2.BlockPool, block_sizes: dict[int, int]) -> PoolSpec:
    field = f"description.pools[{index}]"
    if pool.group_id not in block_sizes:
        raise invalid(f"{field}.group_id", f"{pool.group_id} is not among the groups")
    if pool.tier not in types_pb2.Tier.values() or not pool.tier:
        raise invalid(f"{field}.tier", "must be a known tier")
    if pool.tier == types_pb2.TIER_REMOTE:
        raise QuireError(Reason.UNSUPPORTED, f"{field}.tier: a remote store has no blocks", field=f"{field}.tier")
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
        pool.block_bytes,
        pool.distance,
    )


def _check_pools(pools: Sequence[PoolSpec], group_ids: set[int], policy: KvPolicy) -> None:
    """Every group has, on each set of nodes, one device pool for each age; lower tiers hold what the device does."""
    if len({pool.pool_id for pool in pools}) != len(pools):
        raise invalid("description.pools.pool_id", "a pool is named twice")
    device = [pool for pool in pools if pool.tier == types_pb2.TIER_DEVICE]
    colder = policy_formats(policy)
    for nodes in {pool.nodes for pool in device}:
        groups = {pool.group_id for pool in device if pool.nodes == nodes}
        if groups != group_ids:
            raise invalid(
                "description.pools", f"groups {sorted(groups)} on nodes {list(nodes)}, not {sorted(group_ids)}"
            )
        for group_id in groups:
            formats = [pool.format for pool in device if (pool.nodes, pool.group_id) == (nodes, group_id)]
            hot = [format_ for format_ in formats if format_ not in colder]
            if len(hot) != 1 or sorted(formats) != sorted(hot + colder):
                raise invalid(
                    "description.pools.format", f"{len(formats)} device pools of group {group_id} do not fit the policy"
                )
    kinds = {(pool.group_id, pool.format) for pool in device}
    for pool in pools:
        if pool.tier != types_pb2.TIER_DEVICE and (pool.group_id, pool.format) not in kinds:
            raise invalid("description.pools.format", f"pool {pool.pool_id} holds what no device pool does")
    in_order = sorted(pools, key=lambda pool: (pool.group_id, pool.first_block_id))
    for before, after in itertools.pairwise(in_order):
        if before.group_id == after.group_id and before.first_block_id + before.block_count > after.first_block_id:
            raise invalid("description.pools.first_block_id", f"pools {before.pool_id} and {after.pool_id} overlap")
