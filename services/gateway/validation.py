"""What a request may say. Pure: checked against the model's description before anything is queued."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from quire.v1 import gateway_pb2, types_pb2
from services.common.beams import check_beams
from services.common.constraints.limits import check_constraint
from services.common.errors import QuireError, Reason, invalid
from services.common.limits import (
    MAX_CHOICES,
    MAX_PRIORITY,
    MAX_TARGET_MS,
    check_ids,
    check_integer,
    check_logprobs,
    check_sampling,
)
from services.common.speculation import most_drafts
from services.gateway.chat_checks import check_calls, check_tools

MAX_PROMPT_SCORES = 1 << 19
"""Log probabilities of one prompt, alternatives included; about 16 MB on the wire."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIASES = 1024
MAX_MESSAGES = 10_000
MAX_REQUEST_ID = 128


def validate(request: gateway_pb2.GenerationInput, model: types_pb2.ModelDescription, max_prompt_bytes: int) -> None:
    """Checks every field. Raises INVALID_FIELD, CONTEXT_EXCEEDED, TOO_LARGE or UNSUPPORTED, naming the field."""
    _check_unsupported(request)
    _check_prompt(request, model, max_prompt_bytes)
    if (biases := len(request.sampling.logit_bias)) > MAX_LOGIT_BIASES:
        raise invalid("sampling.logit_bias", f"at most {MAX_LOGIT_BIASES} entries, not {biases}")
    check_sampling(request.sampling, model.vocab_size)
    _check_stop(request.stop, model.vocab_size)
    check_logprobs(request.logprobs)
    if request.HasField("constraint"):
        check_constraint(request.constraint)
    check_beams(request, model)
    most_drafts(request)
    check_integer("choice_count", request.choice_count, 0, MAX_CHOICES)
    check_integer("priority", request.priority, -MAX_PRIORITY, MAX_PRIORITY)
    check_integer("target_first_token_ms", request.target_first_token_ms, 0, MAX_TARGET_MS)
    check_integer("target_token_gap_ms", request.target_token_gap_ms, 0, MAX_TARGET_MS)
    request_id = request.request_id
    if len(request_id) > MAX_REQUEST_ID or not (request_id.isascii() and (request_id.isprintable())):
        raise invalid("request_id", f"must be at most {MAX_REQUEST_ID} printable ASCII characters")


def resolve_max_tokens(prompt_length: int, stop: types_pb2.StopCriteria, context_length: int) -> int:
    """The output budget behind a prompt of that many tokens: what was asked, or what the context leaves.

    Raises CONTEXT_EXCEEDED where the prompt leaves no token, or where prompt and max_tokens together are too long.
    """
    left = context_length - prompt_length
    if left < 1:
        raise QuireError(
            Reason.CONTEXT_EXCEEDED,
            f"the prompt has {prompt_length} tokens; at least one of the context's {context_length} must be left",
            field="prompt",
        )
    if not stop.HasField("max_tokens"):
        if stop.min_tokens > left:
            raise QuireError(
                Reason.CONTEXT_EXCEEDED,
                f"stop.min_tokens: {stop.min_tokens} are asked, and the context leaves {left}",
                field="stop.min_tokens",
            )
        return left
    if stop.max_tokens > left:
        raise QuireError(
            Reason.CONTEXT_EXCEEDED,
            f"stop.max_tokens: the prompt's {prompt_length} tokens and max_tokens {stop.max_tokens} exceed the context"
            f" of {context_length}; at most {left} are left",
            field="stop.max_tokens",
        )
    return stop.max_tokens


def check_prompt_scores(prompt_length: int, logprobs: types_pb2.LogprobOptions) -> None:
    """Refuses log probabilities of a prompt that would fill no reasonable message."""
    if logprobs.HasField("prompt_count") and prompt_length * (1 + logprobs.prompt_count) > MAX_PROMPT_SCORES:
        raise QuireError(
            Reason.TOO_LARGE,
            f"logprobs.prompt_count: {prompt_length} prompt tokens with {logprobs.prompt_count} alternatives exceed"
            f" {MAX_PROMPT_SCORES} values",
            field="logprobs.prompt_count",
        )


def check_text_size(path: str, texts: Iterable[str], max_prompt_bytes: int) -> None:
    """Refuses texts that together weigh more than the limit, before anything looks at them."""
    size = sum(len(text.encode()) if not text.isascii() else len(text) for text in texts)
    if size > max_prompt_bytes:
        raise QuireError(
            Reason.TOO_LARGE,
            f"{path}: {size} bytes exceed the limit of {max_prompt_bytes} (max_prompt_bytes)",
            field=path,
        )


def check_chat(chat: gateway_pb2.Chat, max_prompt_bytes: int) -> None:
    """Refuses a chat that is empty, too large, without roles, or whose tools or calls are wrong."""
    messages = chat.messages
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise invalid("chat.messages", f"must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    for index, message in enumerate(messages):
        if not message.role:
            raise invalid(f"chat.messages[{index}].role", "is required")
    check_text_size("chat", _texts(chat), max_prompt_bytes)
    check_tools(chat)
    check_calls(messages)


def _texts(chat: gateway_pb2.Chat) -> Iterator[str]:
    for message in chat.messages:
        yield from (message.role, message.content, message.name, message.reasoning_content, message.tool_call_id)
        for call in message.tool_calls:
            yield from (call.id, call.name, call.arguments)
    for tool in chat.tools:
        yield from (tool.description, tool.parameters)


def _check_unsupported(request: gateway_pb2.GenerationInput) -> None:
    if request.adapter:
        raise QuireError(Reason.UNSUPPORTED, "adapter: is not supported", field="adapter")


def _check_prompt(
    request: gateway_pb2.GenerationInput, model: types_pb2.ModelDescription, max_prompt_bytes: int
) -> None:
    kind = request.WhichOneof("prompt")
    if kind == "text":
        check_text_size("text", (request.text,), max_prompt_bytes)
    elif kind == "chat":
        check_chat(request.chat, max_prompt_bytes)
    elif kind == "token_ids":
        ids = request.token_ids.ids
        if not ids:
            raise invalid("token_ids", "must hold at least one id")
        resolve_max_tokens(len(ids), types_pb2.StopCriteria(), model.context_length)
        check_ids("token_ids", ids, model.vocab_size)
    else:
        raise invalid("prompt", "one of text, token_ids and chat is required")


def _check_stop(stop: types_pb2.StopCriteria, vocab_size: int) -> None:
    if stop.HasField("max_tokens") and stop.max_tokens < 1:
        raise invalid("stop.max_tokens", f"must be at least 1, not {stop.max_tokens}")
    if stop.min_tokens < 0:
        raise invalid("stop.min_tokens", f"must be at least 0, not {stop.min_tokens}")
    if stop.HasField("max_tokens") and stop.min_tokens > stop.max_tokens:
        raise invalid("stop.min_tokens", f"{stop.min_tokens} is above max_tokens {stop.max_tokens}")
    if len(stop.stop_token_ids) > MAX_STOP_TOKENS:
        raise invalid("stop.stop_token_ids", f"at most {MAX_STOP_TOKENS} ids, not {len(stop.stop_token_ids)}")
    check_ids("stop.stop_token_ids", stop.stop_token_ids, vocab_size)
    if len(stop.stop) > MAX_STOP_STRINGS:
        raise invalid("stop.stop", f"at most {MAX_STOP_STRINGS} strings, not {len(stop.stop)}")
    for text in stop.stop:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise invalid("stop.stop", f"each string must have 1 to {MAX_STOP_CHARACTERS} characters, not {len(text)}")
