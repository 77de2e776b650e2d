"""The official OpenAI client and plain reflection clients work unmodified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from openai import BadRequestError, NotFoundError, OpenAI
from pydantic import BaseModel

from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, make_script_model


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    path = tmp_path_factory.mktemp("script")
    smile = "🙂".encode()
    make_script_model(path, ["Hello", b",", " wor", "ld", *(smile[i : i + 1] for i in range(4)), " END", " never"])
    with Stack(path) as stack:
        yield stack


@pytest.fixture(scope="module")
def random_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with Stack(make_rand_model(tmp_path_factory.mktemp("rand"), seed=4)) as stack:
        yield stack


def client(stack: Stack) -> OpenAI:
    return OpenAI(base_url=f"{stack.http}/v1", api_key="unused", max_retries=0)


def test_openai_chat_streams_with_a_stop_string(scripted: Stack) -> None:
    """Cases A1 and A3 through every service."""
    messages = [{"role": "user", "content": "Hi"}]
    stream = client(scripted).chat.completions.create(
        model="tiny",
        messages=messages,  # type: ignore[arg-type]
        stop=["d🙂 EN"],
        stream=True,
        stream_options={"include_usage": True},
    )
    text, finish, usage = "", None, None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            piece = choice.delta.content or ""
            assert "\ufffd" not in piece
            text += piece
            finish = choice.finish_reason or finish
    assert (text, finish) == ("Hello, worl", "stop")
    assert usage is not None
    assert usage.completion_tokens > 0


def test_openai_completion_whole(scripted: Stack) -> None:
    answer = client(scripted).completions.create(model="tiny", prompt="Hi", max_tokens=40)
    assert answer.choices[0].text == "Hello, world🙂 END never"
    assert answer.choices[0].finish_reason == "stop"


def test_openai_choices_and_logprobs(random_stack: Stack) -> None:
    """Case B2: four choices, not all equal, the same set again for the same seed."""

    def ask() -> list[str]:
        answer = client(random_stack).chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hi"}],
            n=4,
            seed=7,
            max_tokens=12,
            logprobs=True,
            top_logprobs=3,
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for choice in answer.choices:
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
            assert all(token.logprob <= 0 for token in choice.logprobs.content)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == sum(len(c.logprobs.content) for c in answer.choices)  # type: ignore[union-attr, arg-type]
        return [choice.message.content or "" for choice in answer.choices]

    first = ask()
    assert len(set(first)) > 1
    assert ask() == first


def test_openai_cached_tokens(random_stack: Stack) -> None:
    prompt = list(range(100))
    for _ in range(2):
        answer = client(random_stack).completions.create(model="tiny", prompt=prompt, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 96


def test_openai_errors(random_stack: Stack) -> None:
    with pytest.raises(BadRequestError, match="temperature"):
        client(random_stack).completions.create(model="tiny", prompt="Hi", temperature=-1)
    with pytest.raises(NotFoundError):
        client(random_stack).completions.create(model="absent", prompt="Hi")
    assert [model.id for model in client(random_stack).models.list()] == ["tiny"]


def test_reflection_is_enough_to_call(random_stack: Stack) -> None:
    """What grpcurl does: list, fetch descriptors, build a message, call."""
    with grpc.insecure_channel(random_stack.gateway) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)

        def ask(**query: str) -> reflection_pb2.ServerReflectionResponse:
            return next(iter(stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**query)]))))

        names = {service.name for service in ask(list_services="").list_services_response.service}
        assert {"quire.v1.InferenceService", "quire.v1.AdminService", "grpc.health.v1.Health"} <= names
        pool = descriptor_pool.DescriptorPool()

        def add(raw: bytes) -> None:
            file = descriptor_pb2.FileDescriptorProto.FromString(raw)
            for needed in file.dependency:
                add(ask(file_by_filename=needed).file_descriptor_response.file_descriptor_proto[0])
            pool.Add(file)

        symbol = ask(file_containing_symbol="quire.v1.InferenceService").file_descriptor_response
        add(symbol.file_descriptor_proto[0])
        method = pool.FindServiceByName("quire.v1.InferenceService").FindMethodByName("Generate")
        request_class = message_factory.GetMessageClass(method.input_type)
        response_class = message_factory.GetMessageClass(method.output_type)
        call = channel.unary_unary(
            "/quire.v1.InferenceService/Generate",
            request_serializer=request_class.SerializeToString,
            response_deserializer=response_class.FromString,
        )
        request = request_class()
        request.input.text = "Hi"
        request.input.stop.max_tokens = 3
        answer = call(request, timeout=30)
        assert answer.usage.completion_tokens == 3


def test_model_names_are_files_only_for_the_executor(tmp_path: Path) -> None:
    """A folder that does not exist ends the executor with a clear line, not the others."""
    stack = Stack(tmp_path / "absent")
    with pytest.raises(AssertionError, match=r"absent"), stack:
        pass


class Verdict(BaseModel):
    is_good: bool
    score: Literal["low", "high"]


def test_openai_parses_an_answer_of_a_schema(random_stack: Stack) -> None:
    """What a random model says, too."""
    chats = client(random_stack).chat.completions
    messages: Any = [{"role": "user", "content": "Judge."}]
    parsed = chats.parse(model="tiny", messages=messages, response_format=Verdict, max_tokens=200, n=2, seed=1)
    assert all(isinstance(choice.message.parsed, Verdict) for choice in parsed.choices)
    assert {choice.finish_reason for choice in parsed.choices} == {"stop"}
    stream = chats.create(
        model="tiny",
        messages=messages,
        stream=True,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) in ("yes", "no")
    with pytest.raises(BadRequestError) as caught:
        chats.create(model="tiny", messages=messages, extra_body={"guided_regex": "[a"}, stream=True)
    assert caught.value.param == "guided_regex"
