"""From a valid request to one that a scheduler understands: prompt ids, budget, stop strings, text makers."""

from __future__ import annotations

from quire.v1 import gateway_pb2, scheduler_pb2, types_pb2
from services.common.errors import invalid
from services.common.limits import check_ids
from services.gateway import validation
from services.gateway.caller import Caller
from services.gateway.chat_plan import Reading as Plan
from services.gateway.deltas import ChoiceText, DeltaMaker, OutputReader, end_ids
from services.gateway.detokenizer import IncrementalDetokenizer
from services.gateway.encoding import Encoder, Prompt
from services.gateway.metrics import RequestMeter
from services.gateway.models import LoadedTokenizer
from services.gateway.quota.quota import UNSTATED_OUTPUT, Grant
from services.gateway.reading import Opened
from services.gateway.requests import OpenChoice, OpenRequest
from services.gateway.stops import StopMatcher
from services.gateway.tokenizer import ModelTokenizer


async def encode_prompt(
    request: gateway_pb2.GenerationInput,
    model: types_pb2.ModelDescription,
    tokenizer: ModelTokenizer,
    encoder: Encoder,
) -> list[int]:
    """The prompt's ids. INVALID_FIELD where it holds no token, or one that the model does not have."""
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return list(request.token_ids.ids)
    prompt: Prompt = request.text if kind == "text" else request.chat
    ids = await encoder.encode(tokenizer, prompt)
    if not ids:
        raise invalid("chat" if kind == "chat" else "text", "holds no tokens")
    check_ids("prompt", ids, model.vocab_size)  # those that a client wrote are checked already
    return ids


def make_submit(
    request: gateway_pb2.GenerationInput,
    caller: Caller,
    model: types_pb2.ModelDescription,
    prompt_ids: list[int],
    constraint: types_pb2.Constraint | None,
) -> scheduler_pb2.Submit:
    """The request without handle, id and seed. CONTEXT_EXCEEDED where it is too long for model or caller."""
    caps = caller.caps
    max_tokens = validation.resolve_max_tokens(len(prompt_ids), request.stop, caps.context(model.context_length))
    if request.stop.HasField("max_tokens"):
        caps.check_output("stop.max_tokens", max_tokens)
    elif caps.output_tokens is not None:
        caps.check_output("stop.min_tokens", request.stop.min_tokens)
        max_tokens = min(max_tokens, caps.output_tokens)
    validation.check_prompt_scores(len(prompt_ids), request.logprobs)
    submit = scheduler_pb2.Submit(
        model=model.name,
        prompt_token_ids=prompt_ids,
        sampling=request.sampling,
        stop=request.stop,
        logprobs=request.logprobs,
        constraint=constraint,
        choice_count=request.choice_count or 1,
        priority=request.priority,
        tenant=caller.tenant,
        tenant_weight=caller.weight,
        queue_share=caps.queue_share or 0,
        target_first_token_ms=request.target_first_token_ms,
        target_token_gap_ms=request.target_token_gap_ms,
        speculation=request.speculation,
        beam_width=request.beam_width,
        length_penalty=request.length_penalty if request.HasField("length_penalty") else None,
    )
    submit.stop.max_tokens = max_tokens
    return submit


def expected_output(request: gateway_pb2.GenerationInput, submit: scheduler_pb2.Submit) -> int:
    """Tokens of output to hold: what was stated, else a guess; output beyond that is charged as it comes."""
    each = submit.stop.max_tokens
    if not request.stop.HasField("max_tokens"):
        each = min(each, UNSTATED_OUTPUT)
    return each * submit.choice_count


def open_request(
    submit: scheduler_pb2.Submit,
    model: types_pb2.ModelDescription,
    meter: RequestMeter,
    arrived_at: float,
    deadline_at: float | None,
) -> OpenRequest:
    """The request before anything came of it."""
    return OpenRequest(submit, model, end_ids(model, submit.stop), arrived_at, deadline_at, meter.tokens)


def opened(
    request: OpenRequest,
    loaded: LoadedTokenizer,
    keep_special: bool,
    plan: Plan | None,
    meter: RequestMeter,
    grant: Grant,
    created: int,
    digest: bytes,
) -> Opened:
    """The request with what makes text of its tokens."""
    stop = request.template.stop
    vocabulary = loaded.tokenizer if plan is None else loaded.tokenizer.showing_marks()

    def make_makers() -> list[DeltaMaker]:
        return [make_maker(choice) for choice in request.choices]

    def make_maker(choice: OpenChoice) -> DeltaMaker:
        detokenizer = IncrementalDetokenizer(vocabulary, request.prompt_ids, not keep_special)
        matcher = None
        if stop.stop:
            hidden = () if keep_special else loaded.special_texts
            matcher = StopMatcher(stop.stop, hidden, stop.include_stop)
        text = ChoiceText(vocabulary, detokenizer, matcher, request.end_ids, keep_special)
        reader = OutputReader(text, None if plan is None else plan.parser())
        return DeltaMaker(loaded.tokenizer, choice, reader, request.wants_scores)

    grant.used = lambda: len(request.prompt_ids) + sum(len(choice.output) for choice in request.choices)
    return Opened(request, loaded.tokenizer, make_makers, meter, grant, created, digest, keep_special)
