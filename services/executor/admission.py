"""What an executor accepts: whole plans, and the full state of a sequence that enters.

A malformed plan ends its stream; a bad sequence ends alone, with the error in its SequenceEnd.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from quire.v1 import executor_pb2, types_pb2
from services.common.constraints.limits import check_constraint
from services.common.errors import QuireError, Reason, invalid
from services.common.limits import MAX_OPTIONS, check_ids, check_logprobs, check_pooling, check_sampling
from services.common.speculation import MAX_DRAFT_TOKENS
from services.executor.backends.base import SamplingRule
from services.executor.embedding import Embedding
from services.executor.sequences import Ending, Sequence
from services.executor.tiers.pools import NO_POOLS, PoolMap

GROUP = 0  # of the target model


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What bounds a sequence on this executor."""

    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    hidden_size: int
    block_size: int
    pool_starts: tuple[int, ...]  # first block id of each device pool, hot first, then the end
    pools: PoolMap  # those of the device and of lower tiers
    draft_pools: PoolMap = NO_POOLS  # of the draft model's cache group, where there is one

    @property
    def hot_count(self) -> int:
        return self.pool_starts[1]

    @property
    def block_count(self) -> int:
        """Of all device pools."""
        return self.pool_starts[-1]

    @property
    def draft_count(self) -> int:
        """Blocks of the draft model."""
        return sum(pool.count for pool in self.draft_pools.pools)

    def pool_of(self, block_id: int) -> int:
        """The pool of a valid block id, 0 the hot one."""
        return bisect_right(self.pool_starts, block_id) - 1


def check_plan(plan: executor_pb2.StepPlan, epoch: int, last_step: int) -> None:
    """Raises STALE_EPOCH, PLAN_GAP, or PROTOCOL and UNSUPPORTED for a malformed plan."""
    if plan.epoch != epoch:
        raise QuireError(Reason.STALE_EPOCH, f"the plan is of epoch {plan.epoch}, the stream of epoch {epoch}")
    if plan.step != last_step + 1:
        raise QuireError(Reason.PLAN_GAP, f"plan {plan.step} does not follow plan {last_step}")
    count = len(plan.sequence_ids)
    if len(plan.token_limits) != count or len(plan.step_counts) != count:
        raise QuireError(Reason.PROTOCOL, "grants: the arrays differ in length")
    if len(plan.draft_limits) not in (0, count) or len(plan.draft_credits) not in (0, count):
        raise QuireError(Reason.PROTOCOL, "grants: the arrays differ in length")
    if min(plan.token_limits[:], default=1) < 1 or min(plan.step_counts[:], default=1) < 1:
        raise QuireError(Reason.PROTOCOL, "grants: token limits and step counts are at least 1")
    if not all(0 <= limit <= MAX_DRAFT_TOKENS for limit in plan.draft_limits):
        raise QuireError(Reason.PROTOCOL, f"grants: draft limits are 0 to {MAX_DRAFT_TOKENS}")
    if min(plan.draft_credits[:], default=0) < 0:
        raise QuireError(Reason.PROTOCOL, "grants: draft credits are at least 0")
    if plan.report_credit < 0:
        raise QuireError(Reason.PROTOCOL, "report_credit: at least 0")
    if not plan.report_seconds >= 0:
        raise QuireError(Reason.PROTOCOL, "report_seconds: at least 0")
    for demotion in plan.demotions:
        if demotion.group_id != GROUP:
            raise QuireError(Reason.PROTOCOL, f"demotions: there is no cache group {demotion.group_id}")
        if not len(demotion.positions) == len(demotion.block_ids) == len(demotion.writes):
            raise QuireError(Reason.PROTOCOL, "demotions: the arrays differ in length")


def check_blocks(field: str, block_ids: list[int], block_count: int) -> None:
    for block_id in block_ids:
        if not 0 <= block_id < block_count:
            raise invalid(field, f"block {block_id} is not one of {block_count}")


def group_blocks(field: str, lists: list[executor_pb2.BlockList], *block_counts: int) -> list[list[int]]:
    """Block ids of each cache group; `block_counts` of each, 0 where there is no such group."""
    found: list[list[int]] = [[] for _ in block_counts]
    for blocks in lists:
        if not 0 <= blocks.group_id < len(found) or not block_counts[blocks.group_id]:
            raise invalid(field, f"there is no cache group {blocks.group_id}")
        found[blocks.group_id] += blocks.block_ids
    for block_ids, count in zip(found, block_counts, strict=True):
        check_blocks(field, block_ids, count)
    return found


def enter(state: executor_pb2.SequenceState, limits: ModelLimits) -> tuple[Sequence, list[int], list[int]]:
    """The sequence, its blocks and those of the draft model.

    Raises INVALID_FIELD, CONTEXT_EXCEEDED or UNSUPPORTED, naming the field.
    """
    if state.adapter:
        raise QuireError(Reason.UNSUPPORTED, "adapter: adapters are not supported", field="adapter")
    if state.HasField("constraint"):
        check_constraint(state.constraint)
    tokens = list(state.token_ids)
    check_ids("token_ids", tokens, limits.vocab_size)
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
    blocks, drafts = group_blocks("blocks", list(state.blocks), limits.block_count, limits.draft_count)
    if len(blocks) * limits.block_size < state.computed_length:
        raise invalid("blocks", f"{len(blocks)} blocks cannot hold {state.computed_length} computed tokens")
    check_blocks("blocks", blocks[state.computed_length // limits.block_size :], limits.hot_count)  # to be written
    ending = _ending(state, limits)
    if len(tokens) - state.prompt_length >= ending.max_output:
        raise invalid("stop.max_tokens", "the output so far has used it up")
    rule = _rule(state, ending, limits)
    sequence = Sequence(
        state.sequence_id,
        tokens,
        state.prompt_length,
        state.computed_length,
        rule,
        ending,
        embedding=_embedding(state, limits),
    )
    return sequence, blocks, drafts


def _embedding(state: executor_pb2.SequenceState, limits: ModelLimits) -> Embedding | None:
    """What the prompt becomes where it is to become a vector."""
    if not state.pooling:
        return None
    check_pooling(state.pooling)
    if state.computed_length or len(state.token_ids) > state.prompt_length:
        raise invalid("pooling", "a prompt that becomes a vector is computed whole and has no output")
    if state.HasField("constraint") or state.logprobs.HasField("prompt_count"):
        raise invalid("pooling", "neither a rule nor log probabilities go with a vector")
    return Embedding(state.pooling, state.prompt_length, limits.hidden_size)


def _ending(state: executor_pb2.SequenceState, limits: ModelLimits) -> Ending:
    stop = state.stop
    if not stop.HasField("max_tokens") or stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "must be set and at least 1")
    if stop.min_tokens < 0:
        raise invalid("stop.min_tokens", "at least 0")
    check_ids("stop.stop_token_ids", stop.stop_token_ids, limits.vocab_size)
    own = () if stop.ignore_eos else limits.eos_token_ids
    longest = min(stop.max_tokens, limits.context_length - state.prompt_length)
    return Ending(frozenset((*own, *stop.stop_token_ids)), longest)


def _rule(state: executor_pb2.SequenceState, ending: Ending, limits: ModelLimits) -> SamplingRule:
    sampling, logprobs = state.sampling, state.logprobs
    if not sampling.HasField("seed"):
        raise invalid("sampling.seed", "must be set")
    check_sampling(sampling, limits.vocab_size)
    check_logprobs(logprobs, MAX_OPTIONS)
    return SamplingRule(
        temperature=_stated(sampling, "temperature", 1.0),
        top_k=sampling.top_k,
        top_p=_stated(sampling, "top_p", 1.0),
        min_p=_stated(sampling, "min_p", 0.0),
        repetition_penalty=_stated(sampling, "repetition_penalty", 1.0),
        presence_penalty=_stated(sampling, "presence_penalty", 0.0),
        frequency_penalty=_stated(sampling, "frequency_penalty", 0.0),
        logit_bias=dict(sampling.logit_bias),
        seed=sampling.seed,
        choice=state.choice,
        min_tokens=state.stop.min_tokens,
        banned_until_min_tokens=tuple(sorted(token for token in ending.end_ids if token < limits.vocab_size)),
        logprob_count=logprobs.output_count if logprobs.HasField("output_count") else -1,
        prompt_logprob_count=logprobs.prompt_count if logprobs.HasField("prompt_count") else -1,
    )


def _stated(sampling: types_pb2.SamplingParams, name: str, default: float) -> float:
    value: float = getattr(sampling, name)
    return value if sampling.HasField(name) else default  # type: ignore[arg-type]
