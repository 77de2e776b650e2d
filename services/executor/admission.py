"""What an executor accepts: whole plans, and the full state of a sequence that enters.

A malformed plan ends its stream; a bad sequence ends alone, with the error in its SequenceEnd.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError, Reason, invalid
from services.executor.backends.base import SamplingRule
from services.executor.sequences import Ending, Sequence

GROUP = 0  # the target model: the only cache group so far
MOST_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a sequence on this executor."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    block_count: int


def check_plan(plan: executor_pb2.StepPlan, epoch: int, last_step: int) -> None:
    """Raises STALE_EPOCH, PLAN_GAP, or PROTOCOL and UNSUPPORTED for a malformed plan."""
    if plan.epoch != epoch:
        raise QuireError(Reason.STALE_EPOCH, f"the plan is of epoch {plan.epoch}, the stream of epoch {epoch}")
    if plan.step != last_step + 1:
        raise QuireError(Reason.PLAN_GAP, f"plan {plan.step} does not follow plan {last_step}")
    count = len(plan.sequence_ids)
    if len(plan.token_limits) != count or len(plan.step_counts) != count or len(plan.draft_limits) not in (0, count):
        raise QuireError(Reason.PROTOCOL, "grants: the arrays differ in length")
    if any(limit < 1 for limit in plan.token_limits) or any(steps < 1 for steps in plan.step_counts):
        raise QuireError(Reason.PROTOCOL, "grants: token limits and step counts are at least 1")
    if plan.report_credit < 0:
        raise QuireError(Reason.PROTOCOL, "report_credit: at least 0")
    for operation in plan.operations:
        _check_operation(operation)


def _check_operation(operation: executor_pb2.BlockOperation) -> None:
    if operation.kind != executor_pb2.BLOCK_OPERATION_KIND_COPY:
        kind = executor_pb2.BlockOperationKind.Name(operation.kind)
        raise QuireError(Reason.UNSUPPORTED, f"operations.kind: {kind} is not supported")
    if operation.phase not in (executor_pb2.BLOCK_OPERATION_PHASE_BEFORE, executor_pb2.BLOCK_OPERATION_PHASE_AFTER):
        raise QuireError(Reason.PROTOCOL, "operations.phase: must be stated")
    if operation.group_id != GROUP or operation.source_pool_id or operation.destination_pool_id:
        raise QuireError(Reason.PROTOCOL, "operations: no such cache group or pool")
    if operation.key or operation.peer:
        raise QuireError(Reason.UNSUPPORTED, "operations: key and peer belong to export and import")


def check_blocks(field: str, block_ids: list[int], block_count: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < block_count:
            raise invalid(field, f"block {block_id} is outside the pool of {block_count}")


def group_blocks(field: str, lists: list[executor_pb2.BlockList], block_count: int) -> list[int]:
    """Block ids of the one cache group."""
    block_ids: list[int] = []
    for blocks in lists:
        if blocks.group_id != GROUP:
            raise invalid(field, f"there is no cache group {blocks.group_id}")
        block_ids += blocks.block_ids
    check_blocks(field, block_ids, block_count)
    return block_ids


def enter(state: executor_pb2.SequenceState, limits: ModelLimits) -> tuple[Sequence, list[int]]:
    """The sequence and its blocks. Raises INVALID_FIELD, CONTEXT_EXCEEDED or UNSUPPORTED, naming the field."""
    if state.adapter:
        raise QuireError(Reason.UNSUPPORTED, "adapter: adapters are not supported", field="adapter")
    if state.HasField("constraint"):
        raise QuireError(Reason.UNSUPPORTED, "constraint: structured output is not supported", field="constraint")
    tokens = list(state.token_ids)
    _check_ids("token_ids", tokens, limits.vocab_size)
    if not 1 <= state.prompt_length <= len(tokens):
        raise invalid("prompt_length", f"{state.prompt_length} of {len(tokens)} tokens; at least 1")
    if not 0 <= state.computed_length < len(tokens):
        raise invalid("computed_length", f"{state.computed_length} of {len(tokens)} tokens; at least one is computed")
    if state.choice < 0:
        raise invalid("choice", "at least 0")
    if state.prompt_length >= limits.context_length:
        raise QuireError(
            Reason.CONTEXT_EXCEEDED,
            f"the prompt has {state.prompt_length} tokens; a context of {limits.context_length} leaves no output",
        )
    blocks = group_blocks("blocks", list(state.blocks), limits.block_count)
    if len(blocks) * limits.block_size < state.computed_length:
        raise invalid("blocks", f"{len(blocks)} blocks cannot hold {state.computed_length} computed tokens")
    ending = _ending(state, limits)
    if len(tokens) - state.prompt_length >= ending.max_output:
        raise invalid("stop.max_tokens", "the output so far has used it up")
    rule = _rule(state, ending, limits)
    return Sequence(state.sequence_id, tokens, state.prompt_length, state.computed_length, rule, ending), blocks


def _ending(state: executor_pb2.SequenceState, limits: ModelLimits) -> Ending:
    stop = state.stop
    if not stop.HasField("max_tokens") or stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "must be set and at least 1")
    if stop.min_tokens < 0:
        raise invalid("stop.min_tokens", "at least 0")
    _check_ids("stop.stop_token_ids", list(stop.stop_token_ids), limits.vocab_size)
    own = () if stop.ignore_eos else limits.eos_token_ids
    longest = min(stop.max_tokens, limits.context_length - state.prompt_length)
    return Ending(frozenset((*own, *stop.stop_token_ids)), longest)


def _rule(state: executor_pb2.SequenceState, ending: Ending, limits: ModelLimits) -> SamplingRule:
    sampling, logprobs = state.sampling, state.logprobs
    if not sampling.HasField("seed"):
        raise invalid("sampling.seed", "must be set")
    _check_ids("sampling.logit_bias", list(sampling.logit_bias), limits.vocab_size)
    return SamplingRule(
        temperature=_within("temperature", sampling, 1.0, 0.0, 100.0),
        top_k=sampling.top_k,
        top_p=_within("top_p", sampling, 1.0, 0.0, 1.0),
        min_p=_within("min_p", sampling, 0.0, 0.0, 1.0),
        repetition_penalty=_within("repetition_penalty", sampling, 1.0, 1e-6, 100.0),
        presence_penalty=_within("presence_penalty", sampling, 0.0, -2.0, 2.0),
        frequency_penalty=_within("frequency_penalty", sampling, 0.0, -2.0, 2.0),
        logit_bias={key: _bias(value) for key, value in sampling.logit_bias.items()},
        seed=sampling.seed,
        choice=state.choice,
        min_tokens=state.stop.min_tokens,
        banned_until_min_tokens=tuple(sorted(token for token in ending.end_ids if token < limits.vocab_size)),
        logprob_count=_logprob_count("output_count", logprobs),
        prompt_logprob_count=_logprob_count("prompt_count", logprobs),
    )


def _check_ids(field: str, token_ids: list[int], vocab_size: int) -> None:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        bad = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise invalid(field, f"token {bad} is not below the vocabulary size {vocab_size}")


def _within(name: str, sampling: types_pb2.SamplingParams, default: float, low: float, high: float) -> float:
    if not sampling.HasField(name):  # type: ignore[arg-type]
        return default
    value: float = getattr(sampling, name)
    if not low <= value <= high:  # also refuses NaN
        raise invalid(f"sampling.{name}", f"{value} is outside [{low}, {high}]")
    return value


def _bias(value: float) -> float:
    if not -100.0 <= value <= 100.0:
        raise invalid("sampling.logit_bias", f"{value} is outside [-100, 100]")
    return value


def _logprob_count(name: str, options: types_pb2.LogprobOptions) -> int:
    if not options.HasField(name):  # type: ignore[arg-type]
        return -1
    count: int = getattr(options, name)
    if not 0 <= count <= MOST_LOGPROBS:
        raise invalid(f"logprobs.{name}", f"{count} is outside [0, {MOST_LOGPROBS}]")
    return count
