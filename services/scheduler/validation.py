"""What a Submit must look like. The gateway has checked what its client wrote; this checks the wire."""

from __future__ import annotations

import math

from quire.v1 import scheduler_pb2, types_pb2
from services.common.beams import check_beams
from services.common.constraints.limits import check_constraint
from services.common.errors import QuireError, Reason, invalid
from services.common.limits import (
    MAX_CHOICES,
    MAX_KEEP_MS,
    MAX_PRIORITY,
    MAX_TARGET_MS,
    check_ids,
    check_integer,
    check_pooling,
)
from services.common.speculation import most_drafts


def check_submit(submit: scheduler_pb2.Submit, model: types_pb2.ModelDescription) -> None:
    """Raises INVALID_FIELD, CONTEXT_EXCEEDED or UNSUPPORTED naming the field."""
    _check_unsupported(submit)
    if not submit.request_id:
        raise invalid("request_id", "must be set")
    check_integer("choice_count", submit.choice_count, 1, MAX_CHOICES)
    check_integer("priority", submit.priority, -MAX_PRIORITY, MAX_PRIORITY)
    if submit.deadline_ms < 0:
        raise invalid("deadline_ms", f"must be at least 0, not {submit.deadline_ms}")
    if not 0 <= submit.tenant_weight < math.inf:
        raise invalid("tenant_weight", f"must be at least 0 and finite, not {submit.tenant_weight:g}")
    check_integer("target_first_token_ms", submit.target_first_token_ms, 0, MAX_TARGET_MS)
    check_integer("target_token_gap_ms", submit.target_token_gap_ms, 0, MAX_TARGET_MS)
    check_integer("keep_ms", submit.keep_ms, 0, MAX_KEEP_MS)
    if not submit.sampling.HasField("seed"):
        raise invalid("sampling.seed", "must be set")
    if not submit.prompt_token_ids:
        raise invalid("prompt_token_ids", "at least one is needed")
    check_ids("prompt_token_ids", submit.prompt_token_ids[:], model.vocab_size)  # a list: many times as fast
    if not submit.stop.HasField("max_tokens") or submit.stop.max_tokens < 1:
        raise invalid("stop.max_tokens", "must be set, at least 1")
    total = len(submit.prompt_token_ids) + submit.stop.max_tokens
    if total > model.context_length:
        raise QuireError(
            Reason.CONTEXT_EXCEEDED,
            f"prompt ({len(submit.prompt_token_ids)}) and max_tokens ({submit.stop.max_tokens}) exceed the context "
            f"length of {model.context_length} tokens",
            field="stop.max_tokens",
        )
    check_beams(submit, model)
    _check_pooling(submit)
    most_drafts(submit)
    if submit.beam_width and submit.progress:
        raise QuireError(Reason.UNSUPPORTED, "progress: a search begins anew", field="progress")
    _check_progress(submit, model)


def _check_pooling(submit: scheduler_pb2.Submit) -> None:
    """What goes with a vector: nothing that is about output."""
    check_pooling(submit.pooling)
    if not submit.pooling:
        return
    asked = submit.choice_count > 1 or submit.beam_width or submit.HasField("constraint") or submit.progress
    if asked or submit.logprobs.HasField("prompt_count"):
        raise invalid("pooling", "a prompt that becomes a vector has no output and no log probabilities")


def _check_unsupported(submit: scheduler_pb2.Submit) -> None:
    if submit.adapter:
        raise QuireError(Reason.UNSUPPORTED, "adapter: not supported", field="adapter")
    if submit.HasField("constraint"):
        check_constraint(submit.constraint)


def _check_progress(submit: scheduler_pb2.Submit, model: types_pb2.ModelDescription) -> None:
    seen: set[int] = set()
    for index, progress in enumerate(submit.progress):
        field = f"progress[{index}]"
        if not 0 <= progress.choice < submit.choice_count or progress.choice in seen:
            raise invalid(f"{field}.choice", f"{progress.choice} is out of range or repeated")
        seen.add(progress.choice)
        if len(progress.token_ids) > submit.stop.max_tokens:
            raise invalid(f"{field}.token_ids", "more tokens than max_tokens")
        check_ids(f"{field}.token_ids", progress.token_ids, model.vocab_size)
