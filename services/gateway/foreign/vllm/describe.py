"""What VllmEngine tells of model and load. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import quire
from quire.v1.foreign.vllm_engine_pb2 import GetLoadsResponse, GetModelInfoResponse, SchedulerLoad
from quire.v1.scheduler_status_pb2 import ExecutorStatus, GetSchedulerStatusResponse
from quire.v1.types_pb2 import TIER_DEVICE, ModelDescription, SamplingParams


def model_info(model: ModelDescription) -> GetModelInfoResponse:
    """The tokenizer is fetched by GetTokenizer: no path names a place that a client could read."""
    return GetModelInfoResponse(
        model_path=model.name,
        is_generation=True,
        max_context_length=model.context_length,
        vocab_size=model.vocab_size,
        served_model_name=model.name,
        model_type=model.architecture,
        architectures=[model.architecture] if model.architecture else [],
        eos_token_ids=model.eos_token_ids,
        bos_token_id=model.bos_token_id if model.HasField("bos_token_id") else 0,
        max_req_input_len=model.context_length - 1,
        default_sampling_params_json=_defaults(model.default_sampling) if model.HasField("default_sampling") else "",
    )


def loads(status: GetSchedulerStatusResponse) -> GetLoadsResponse:
    """All executors behind the gateway as one rank."""
    held, total = _kv_tokens(status)
    return GetLoadsResponse(
        timestamp=datetime.now(UTC).isoformat(),
        version=quire.__version__,
        dp_rank_count=1,
        loads=[
            SchedulerLoad(
                num_running_reqs=status.running_count,
                num_waiting_reqs=status.waiting_count,
                num_total_reqs=status.running_count + status.waiting_count,
                num_used_tokens=held,
                max_total_num_tokens=total,
                token_usage=held / total if total else 0.0,
                gen_throughput=sum(executor.output_tokens_per_second for executor in status.executors),
                cache_hit_rate=status.kv.prefix_hit_tokens / max(1, status.kv.prefix_query_tokens),
                max_running_requests=sum(executor.description.max_sequences for executor in status.executors),
            )
        ],
    )


def _kv_tokens(status: GetSchedulerStatusResponse) -> tuple[int, int]:
    """Slots of the target model's KV on devices: held by sequences, and in all."""
    sizes = {executor.description.executor_id: _slots(executor) for executor in status.executors}
    held = total = 0
    for pool in status.kv.pools:
        if pool.pool.tier == TIER_DEVICE and pool.pool.group_id == 0:
            slots = sizes.get(pool.executor_id, 0)
            held += slots * pool.leased_count
            total += slots * pool.pool.block_count
    return held, total


def _slots(executor: ExecutorStatus) -> int:
    """Tokens of a block of the target model."""
    return next((group.block_size for group in executor.description.groups if group.group_id == 0), 0)


def _defaults(sampling: SamplingParams) -> str:
    """The publisher's sampling as JSON, in vLLM's names, which are ours."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    return json.dumps({name: getattr(sampling, name) for name in names if sampling.HasField(name)})  # type: ignore[arg-type]
