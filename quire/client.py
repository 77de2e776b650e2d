"""A client for Quire's gateway over gRPC.

    from quire.client import Client

    with Client("127.0.0.1:50051") as client:
        for piece in client.stream("Once upon a time", max_tokens=64):
            print(piece.text, end="", flush=True)
        print(client.chat([{"role": "user", "content": "Hello!"}]).text)

Failures are raised as `ClientError`, whose `reason` is the name in the service's error table.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from types import TracebackType
from typing import Any, Literal, Self

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    scheduler_pb2,
    scheduler_status_pb2,
    types_pb2,
)

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_TARGET = "127.0.0.1:50051"

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
"""Text, token ids, or a chat as {"role": ..., "content": ...} messages, with the fields of ChatMessage."""

_SAMPLING = frozenset(types_pb2.SamplingParams.DESCRIPTOR.fields_by_name)
_STOP = frozenset(types_pb2.StopCriteria.DESCRIPTOR.fields_by_name)
_TARGETS = frozenset({"target_first_token_ms", "target_token_gap_ms"})
_BEAMS = frozenset({"beam_width", "length_penalty"})
_PLAIN = frozenset({"choice_count", "priority", "request_id", "keep_special_tokens", "speculation", "constraint"})
_INPUT = _PLAIN | _TARGETS | _BEAMS
_CHAT = frozenset(gateway_pb2.Chat.DESCRIPTOR.fields_by_name) - {"messages"}
_LOGPROBS = {"logprobs": "output_count", "prompt_logprobs": "prompt_count"}
_ACTIONS = {
    "load": scheduler_pb2.MODEL_ACTION_LOAD,
    "unload": scheduler_pb2.MODEL_ACTION_UNLOAD,
    "reload": scheduler_pb2.MODEL_ACTION_RELOAD,
}
_POOLINGS = {"last": types_pb2.POOLING_LAST, "mean": types_pb2.POOLING_MEAN}
_EXECUTOR_ACTIONS = {
    "add": scheduler_pb2.EXECUTOR_ACTION_ADD,
    "drain": scheduler_pb2.EXECUTOR_ACTION_DRAIN,
    "remove": scheduler_pb2.EXECUTOR_ACTION_REMOVE,
}


class ClientError(Exception):
    """A call that failed. `reason` is the machine-readable name, empty where the service could not be reached.

    `retry_after` is in seconds, where the service knows when the same call may succeed.
    """

    def __init__(self, code: grpc.StatusCode, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.retry_after = code, reason, message, retry_after


@dataclass(frozen=True, slots=True)
class Piece:
    """New text of one choice of a stream."""

    text: str
    choice: int
    token_ids: tuple[int, ...]
    finish_reason: str | None = None  # "stop" or "length", in the choice's last piece
    event_id: str = ""  # where the stream stands behind this piece, where the gateway keeps streams
    message: gateway_pb2.GenerateStreamResponse = field(repr=False, default_factory=gateway_pb2.GenerateStreamResponse)


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `response` has everything else: all choices, log probabilities, ids."""

    text: str  # of the first choice
    texts: tuple[str, ...]  # of all choices
    finish_reason: str  # of the first choice
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    response: gateway_pb2.GenerateResponse = field(repr=False)


class Client:
    """A connection to a gateway. Safe to share between threads."""

    def __init__(
        self, target: str = DEFAULT_TARGET, *, api_key: str = "", credentials: grpc.ChannelCredentials | None = None
    ) -> None:
        """`target` is host:port, dns:///..., unix:PATH or xds:///...; without credentials the channel is plain.

        `api_key` goes with every call; a gateway without keys ignores it.
        """
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]
        if credentials is None:
            self._channel = grpc.insecure_channel(target, options=options)
        else:
            self._channel = grpc.secure_channel(target, credentials, options=options)
        self._metadata = bearer(api_key)
        self._inference = gateway_pb2_grpc.InferenceServiceStub(self._channel)
        self._admin = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection; running streams end."""
        self._channel.close()

    def generate(self, prompt: Prompt, *, model: str = "", timeout: float | None = None, **options: Any) -> Answer:
        """Generates and answers once. Options as of `generation_input`; `timeout` in seconds."""
        request = gateway_pb2.GenerateRequest(input=generation_input(prompt, model=model, **options))
        try:
            response = self._inference.Generate(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _client_error(error) from error
        return Answer(
            text=response.choices[0].text,
            texts=tuple(choice.text for choice in response.choices),
            finish_reason=_finish_name(response.choices[0].finish_reason) or "",
            prompt_tokens=response.usage.prompt_tokens,
            completion_tokens=response.usage.completion_tokens,
            cached_tokens=response.usage.cached_tokens,
            response=response,
        )

    def stream(
        self, prompt: Prompt, *, model: str = "", timeout: float | None = None, last_event_id: str = "", **options: Any
    ) -> Generator[Piece, None, None]:
        """Generates and yields text as it comes. Closing the iterator ends the request.

        Where the gateway keeps streams, each piece has an `event_id`, and the same call with it as `last_event_id`
        yields what follows, whatever became of the connection.
        """
        request = gateway_pb2.GenerateStreamRequest(
            input=generation_input(prompt, model=model, **options), last_event_id=last_event_id
        )
        call = self._inference.GenerateStream(request, timeout=timeout, metadata=self._metadata)
        try:
            for message in call:
                yield Piece(
                    text=message.text,
                    choice=message.choice,
                    token_ids=tuple(message.token_ids),
                    finish_reason=_finish_name(message.finish_reason),
                    event_id=message.event_id,
                    message=message,
                )
        except grpc.RpcError as error:
            raise _client_error(error) from error
        finally:
            call.cancel()

    def cancel(self, request_id: str) -> None:
        """Ends a running request at once, where it would go on without its client for a while."""
        self._call(self._inference.Cancel, gateway_pb2.CancelRequest(request_id=request_id))

    def chat(self, messages: Sequence[Mapping[str, Any]], *, model: str = "", **options: Any) -> Answer:
        """Answers a chat once; `stream(messages)` streams one."""
        return self.generate(messages, model=model, **options)

    def embed(
        self, prompt: str | Sequence[int], *, model: str = "", pooling: Literal["last", "mean"] = "last"
    ) -> list[float]:
        """The vector of a text or of token ids, of length 1."""
        request = gateway_pb2.EmbedRequest(model=model, pooling=_POOLINGS[pooling])
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.CopyFrom(gateway_pb2.TokenIds(ids=prompt))
        return list(self._call(self._inference.Embed, request).values)

    def tokenize(self, prompt: str | Sequence[Mapping[str, Any]], *, model: str = "") -> list[int]:
        """Token ids of a text or a chat, as `generate` would make them."""
        request = gateway_pb2.TokenizeRequest(model=model)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.chat.CopyFrom(_chat(prompt))
        return list(self._call(self._inference.Tokenize, request).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", keep_special_tokens: bool = False) -> str:
        """The text of token ids."""
        request = gateway_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, keep_special_tokens=keep_special_tokens
        )
        text: str = self._call(self._inference.Detokenize, request).text
        return text

    def models(self) -> list[types_pb2.ModelDescription]:
        """The models that can be asked for."""
        return list(self._call(self._inference.ListModels, gateway_pb2.ListModelsRequest()).models)

    def status(self) -> admin_pb2.GetStatusResponse:
        """State of all services."""
        status: admin_pb2.GetStatusResponse = self._call(self._admin.GetStatus, admin_pb2.GetStatusRequest())
        return status

    def change_model(
        self, action: Literal["load", "unload", "reload"], name: str, source: str = ""
    ) -> list[types_pb2.ModelDescription]:
        """Loads, unloads or reloads a model; answers with the models after it. `source` as for `quire up --model`."""
        request = admin_pb2.ChangeModelRequest(action=_ACTIONS[action], name=name, source=source)
        return list(self._call(self._admin.ChangeModel, request).models)

    def executors(self) -> list[scheduler_status_pb2.ExecutorStatus]:
        """The executors of the scheduler. ClientError where it cannot be reached."""
        status = self.status()
        if not status.HasField("scheduler"):
            raise ClientError(grpc.StatusCode.UNAVAILABLE, "SCHEDULER_LOST", "the scheduler does not answer")
        return list(status.scheduler.executors)

    def change_executor(
        self, action: Literal["add", "drain", "remove"], target: str
    ) -> list[scheduler_status_pb2.ExecutorStatus]:
        """Adds, drains or removes an executor by its address; answers with the executors after it."""
        request = admin_pb2.ChangeExecutorRequest(action=_EXECUTOR_ACTIONS[action], target=target)
        return list(self._call(self._admin.ChangeExecutor, request).executors)

    def usage(self, first: date, last: date, *, tenant: str = "") -> list[admin_pb2.UsageRow]:
        """What tenants, or one of them, used on those days (UTC), by day, tenant and model."""
        request = admin_pb2.GetUsageRequest(first_day=first.isoformat(), last_day=last.isoformat(), tenant=tenant)
        return list(self._call(self._admin.GetUsage, request).rows)

    def _call(self, method: Any, request: Any) -> Any:
        try:
            return method(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise _client_error(error) from error


def bearer(api_key: str) -> tuple[tuple[str, str], ...]:
    """An API key as the metadata of a call. ValueError where it cannot be one."""
    if not api_key:
        return ()
    if not (api_key.isascii() and api_key.isprintable()):
        raise ValueError("api_key: must be printable ASCII characters")
    return (("authorization", f"Bearer {api_key}"),)


def generation_input(prompt: Prompt, *, model: str = "", **options: Any) -> gateway_pb2.GenerationInput:
    """A request from keyword options; None leaves an option out, an unknown one raises TypeError.

    Options: every field of SamplingParams (temperature, top_k, top_p, min_p, seed, ...) and of StopCriteria
    (max_tokens, min_tokens, stop, stop_token_ids, ignore_eos, include_stop), choice_count, priority, request_id,
    keep_special_tokens, speculation, target_first_token_ms, target_token_gap_ms, beam_width, length_penalty,
    constraint (a Constraint or a mapping with one of its fields: {"json_schema": "{...}"}, {"regex": "..."}, ...), and
    `logprobs` and `prompt_logprobs` (alternatives per token). With a chat also every field of Chat: tools (Tools or
    mappings with their fields), tool_mode, tool_name, single_call, thinking, split_reasoning.
    """
    given = {name: value for name, value in options.items() if value is not None}
    chat = bool(prompt) and isinstance(prompt[0], Mapping)
    if unknown := given.keys() - _SAMPLING - _STOP - _INPUT - _LOGPROBS.keys() - (_CHAT if chat else frozenset()):
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    if isinstance(given.get("stop"), str):
        given["stop"] = [given["stop"]]
    request = gateway_pb2.GenerationInput(
        model=model,
        sampling=types_pb2.SamplingParams(**_only(given, _SAMPLING)),
        stop=types_pb2.StopCriteria(**_only(given, _STOP)),
        logprobs=types_pb2.LogprobOptions(**{_LOGPROBS[n]: v for n, v in given.items() if n in _LOGPROBS}),
        **_only(given, _INPUT),
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif chat:
        request.chat.CopyFrom(_chat(prompt, **_only(given, _CHAT)))  # type: ignore[arg-type]  # a sequence of one kind
    else:
        request.token_ids.CopyFrom(gateway_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
    return request


def _only(given: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if name in names}


def _chat(messages: Sequence[Mapping[str, Any]], **fields: Any) -> gateway_pb2.Chat:
    return gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(**message) for message in messages], **fields)


def _finish_name(reason: int) -> str | None:
    name = types_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()  # type: ignore[arg-type]
    return None if name == "unspecified" else name


def _client_error(error: Any) -> ClientError:
    status = rpc_status.from_call(error)
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details = list(status.details) if status else []
    reason = next((info.reason for detail in details if detail.Unpack(info)), "")
    wait = next((retry.retry_delay.ToMilliseconds() / 1000 for detail in details if detail.Unpack(retry)), None)
    return ClientError(error.code(), reason, error.details() or error.code().name, wait)
