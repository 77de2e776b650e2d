"""From an OpenAI request to the engine's input, and from the input's field names back to OpenAI's. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from quire.v1.gateway_pb2 import Chat, ChatMessage, GenerationInput, TokenIds
from quire.v1.types_pb2 import LogprobOptions, SamplingParams, StopCriteria
from services.common.constraints.limits import rule_path
from services.gateway.field_names import rename
from services.gateway.http.errors import bad_request
from services.gateway.http.schemas import (
    MAX_CHOICES,
    ChatRequest,
    CompletionRequest,
    GenerationBody,
    Message,
    TextPart,
    TokenizeRequest,
)
from services.gateway.http.structured import Rule, rule_of
from services.gateway.http.tools import add_tools, call_of, names_of

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's budget for a text completion that states none."""

_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,9}")

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "text": "prompt",
        "token_ids": "prompt",
        "token_ids.ids": "prompt",
        "chat": "messages",
        "chat.messages": "messages",
        "sampling": "sampling",
        **{f"sampling.{name}": name for name in SamplingParams.DESCRIPTOR.fields_by_name},
        **{f"stop.{name}": name for name in StopCriteria.DESCRIPTOR.fields_by_name},
        "stop.include_stop": "include_stop_str_in_output",
        "logprobs.output_count": "logprobs",
        "logprobs.prompt_count": "prompt_logprobs",
        "choice_count": "n",
        "beam_width": "n",
        "request_id": "x-request-id",
        "last_event_id": "last-event-id",
        "keep_special_tokens": "skip_special_tokens",
        "target_first_token_ms": "x-llm-d-slo-ttft-ms",
        "target_token_gap_ms": "x-llm-d-slo-tpot-ms",
    }
)
"""Where a field of the input comes from, unless the request says it in another way."""


@dataclass(frozen=True, slots=True)
class Job:
    """What one HTTP request asks of the engine."""

    inputs: tuple[GenerationInput, ...]  # one per prompt
    names: Mapping[str, str]  # path in the input -> the client's field
    stream: bool
    include_usage: bool  # in a last chunk, when streaming
    default_budget: bool  # max_tokens is OpenAI's default, not the client's wish
    show_reasoning: bool = True  # where the model marks it

    def renamed(self, fields: Mapping[str, str]) -> Job:
        """The same for a client that wrote other fields; `fields` maps those that are known here to its own."""
        return replace(self, names={path: rename(name, fields) for path, name in self.names.items()})

    @property
    def choices_per_prompt(self) -> int:
        return self.inputs[0].choice_count


def completion_job(body: CompletionRequest) -> Job:
    """Raises HttpError naming the field where fields contradict each other."""
    if body.best_of is not None and body.best_of != (body.n or 1) and not body.use_beam_search:
        raise bad_request("best_of", "must equal n: drawing more choices than are returned is not supported")
    by_default = max(DEFAULT_COMPLETION_TOKENS, body.min_tokens or 0)
    rule = rule_of(body)
    common = _common(body, rule, by_default if body.max_tokens is None else body.max_tokens, body.logprobs)
    if body.use_beam_search and body.best_of is not None:
        if body.best_of < 1:
            raise bad_request("best_of", "must be at least 1")
        common.beam_width = body.best_of
    prompts = _prompts(body)
    if len(prompts) * common.choice_count > MAX_CHOICES:
        raise bad_request("n", f"{len(prompts)} prompts times n must not exceed {MAX_CHOICES} choices")
    inputs = []
    for prompt in prompts:
        one = GenerationInput()
        one.CopyFrom(common)
        if isinstance(prompt, str):
            one.text = prompt
        else:
            one.token_ids.CopyFrom(TokenIds(ids=prompt))
        inputs.append(one)
    names = NAMES if body.best_of is None else dict(NAMES) | {"beam_width": "best_of"}
    return _job(body, rule, inputs, names, default_budget=body.max_tokens is None)


def chat_job(body: ChatRequest) -> Job:
    """Raises HttpError naming the field where fields contradict each other."""
    if body.top_logprobs is not None and not body.logprobs:
        raise bad_request("top_logprobs", "needs logprobs to be true")
    budgets = [budget for budget in (body.max_completion_tokens, body.max_tokens) if budget is not None]
    if len(set(budgets)) > 1:
        raise bad_request("max_tokens", "differs from max_completion_tokens, its newer name")
    alternatives = (body.top_logprobs or 0) if body.logprobs else None
    rule = rule_of(body)
    one = _common(body, rule, budgets[0] if budgets else None, alternatives)
    one.chat.CopyFrom(Chat(messages=chat_messages(body.messages)))
    add_tools(one.chat, body)
    names = dict(NAMES) | names_of(body) | {"logprobs.output_count": "top_logprobs", "prompt": "messages"}
    if body.max_completion_tokens is not None:
        names["stop.max_tokens"] = "max_completion_tokens"
    job = _job(body, rule, [one], names, default_budget=False)
    return replace(job, show_reasoning=body.include_reasoning is not False)


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Text parts are joined by line breaks; "developer" is OpenAI's newer name of the system role."""
    return [
        ChatMessage(
            role="system" if message.role == "developer" else message.role,
            content="" if message.content is None else _text(message.content),
            name=message.name or "",
            tool_calls=map(call_of, message.tool_calls or ()),
            tool_call_id=message.tool_call_id or "",
            reasoning_content=message.reasoning_content or "",
        )
        for message in messages
    ]


def tokenize_prompt(body: TokenizeRequest) -> str | Chat:
    """The text or the chat to turn into ids; exactly one of both must be given."""
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("prompt", "give either prompt or messages")
    if body.messages is None:
        return body.prompt or ""
    if body.add_special_tokens is not None:
        raise bad_request("add_special_tokens", "goes with prompt; a chat's special tokens are the template's")
    chat = Chat(messages=chat_messages(body.messages))
    add_tools(chat, body)
    return chat


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _common(
    body: GenerationBody, rule: Rule | None, max_tokens: int | None, alternatives: int | None
) -> GenerationInput:
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options", "needs stream to be true")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs", "is not available when streaming")
    sampling = SamplingParams(
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repetition_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        logit_bias=_biases(body.logit_bias or {}),
        seed=body.seed,
    )
    stop = StopCriteria(
        max_tokens=max_tokens,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=bool(body.ignore_eos),
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        include_stop=bool(body.include_stop_str_in_output),
    )
    return GenerationInput(
        constraint=None if rule is None else rule[1],
        model=body.model,
        sampling=sampling,
        stop=stop,
        logprobs=LogprobOptions(output_count=alternatives, prompt_count=body.prompt_logprobs),
        choice_count=1 if body.n is None else body.n,
        beam_width=(body.n or 1) if body.use_beam_search else 0,
        length_penalty=body.length_penalty,
        priority=body.priority or 0,
        keep_special_tokens=body.skip_special_tokens is False,
        speculation="" if body.speculation is None else str(body.speculation),
    )


def _biases(by_text: Mapping[str, float]) -> dict[int, float]:
    """By token id; a key that is no number in plain decimal notation, or none of 32 bits, is refused."""
    result = {}
    for key, bias in by_text.items():
        if not _INTEGER.fullmatch(key) or not -(2**31) <= int(key) < 2**31:
            raise bad_request(f"logit_bias.{key[:20]}", "the key must be a token id")
        result[int(key)] = bias
    return result


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt


def _job(
    body: GenerationBody,
    rule: Rule | None,
    inputs: Sequence[GenerationInput],
    names: Mapping[str, str],
    *,
    default_budget: bool,
) -> Job:
    usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    if rule is not None:
        names = dict(names) | {"constraint": rule[0], rule_path(rule[1]): rule[0]}
    return Job(tuple(inputs), names, bool(body.stream), usage, default_budget)
