"""What an executor says of itself."""

from __future__ import annotations

from quire.v1 import types_pb2
from services.common.speculation import MAX_DRAFT_TOKENS
from services.executor.admission import GROUP
from services.executor.backends.base import KvShape
from services.executor.batch import StepLimits
from services.executor.loader import LoadedModel
from services.executor.numa import PoolPlace
from services.executor.speculation.draft_cache import GROUP as DRAFT_GROUP
from services.executor.tiers.pools import DEVICE, DISK, HOST
from services.executor.warmup import Measured

_KV_FORMATS = {
    "fp32": types_pb2.KV_FORMAT_FP32,
    "bf16": types_pb2.KV_FORMAT_BF16,
    "fp16": types_pb2.KV_FORMAT_FP16,
    "int8": types_pb2.KV_FORMAT_INT8,
    "int4": types_pb2.KV_FORMAT_INT4,
}
_TIERS = {DEVICE: types_pb2.TIER_DEVICE, HOST: types_pb2.TIER_HOST, DISK: types_pb2.TIER_DISK}


def describe_empty(executor_id: str, limits: StepLimits) -> types_pb2.ExecutorDescription:
    """Of an executor that holds no model."""
    return types_pb2.ExecutorDescription(
        executor_id=executor_id, max_sequences=limits.sequences, max_step_tokens=limits.tokens
    )


def describe_loaded(
    executor_id: str, limits: StepLimits, model: LoadedModel, measured: Measured, place: PoolPlace
) -> types_pb2.ExecutorDescription:
    """Of an executor that serves a model. `place`: where its KV lies."""
    backend, spec, shape = model.backend, model.backend.spec, model.shape
    groups = [_group(GROUP, "target", shape)]
    if model.draft is not None:
        groups.append(_group(DRAFT_GROUP, "draft", model.draft.shape))
    pools = [
        types_pb2.BlockPool(
            pool_id=pool.pool_id,
            group_id=group,
            tier=_TIERS[pool.tier],
            format=_KV_FORMATS[pool.format],
            rank_nodes=[place.node],
            distance=place.distance,
            block_count=pool.count,
            first_block_id=pool.first,
            block_bytes=pool.block_bytes,
        )
        for group, found in ((GROUP, model.pools), (DRAFT_GROUP, model.draft_pools))
        for pool in found.pools
    ]
    description = describe_empty(executor_id, limits)
    description.MergeFrom(
        types_pb2.ExecutorDescription(
            model=types_pb2.ModelDescription(
                name=model.name,
                source=model.source,
                fingerprint=model.fingerprint,
                tokenizer_fingerprint=model.tokenizer_fingerprint,
                context_length=model.served_context,
                vocab_size=spec.vocab_size,
                eos_token_ids=spec.eos_token_ids,
                bos_token_id=spec.bos_token_id,
                architecture=spec.architecture,
                parameter_count=model.parameter_count,
                loaded_at=model.loaded_at,
                embedding_size=spec.hidden_size,
                default_sampling=model.default_sampling,
            ),
            backend=backend.name,
            dtype=backend.dtype,
            device=backend.device,
            groups=groups,
            pools=pools,
            kv_policy=str(model.policy),
            remote_store=model.tiers.remote_name if model.tiers is not None else "",
            speculation=_speculation(model, measured),
            decode_step_seconds=measured.decode_step_seconds,
            prefill_tokens_per_second=measured.prefill_tokens_per_second,
        )
    )
    return description


def _group(group_id: int, name: str, shape: KvShape) -> types_pb2.CacheGroup:
    return types_pb2.CacheGroup(
        group_id=group_id, name=name, block_size=shape.block_size, block_bytes=shape.block_bytes
    )


def _speculation(model: LoadedModel, measured: Measured) -> types_pb2.SpeculationDescription | None:
    if model.proposer is None:
        return None
    return types_pb2.SpeculationDescription(
        proposer=model.proposer.name,
        max_draft_tokens=MAX_DRAFT_TOKENS,
        draft=model.proposer.detail,
        draft_token_seconds=measured.draft_token_seconds,
        weighs_drafts=model.proposer.weighs_drafts,
    )
