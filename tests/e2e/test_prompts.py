"""What a prompt becomes: the same ids by gRPC and HTTP, from text and chats, alone and in a crowd."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import tokenizers

from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc, scheduler_pb2
from tests.e2e.requests import channel, collect, greedy
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, make_succ_model
from tests.fixtures.vocabularies import BOS, BOS_ID, CHAT_TEMPLATE, sentencepiece

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi there"}]
RENDERED = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Model "tiny" has a template that writes no BOS; "other" goes to the spare executor, with one that does."""
    with Stack(make_rand_model(tmp_path_factory.mktemp("tiny"), seed=61), spare_executors=1) as running:
        yield running


async def load(stack: Stack, folder: Path) -> None:
    """Puts a model named "other" on the spare executor, in place of the one there."""
    async with channel(stack.gateway) as wire:
        admin = admin_pb2_grpc.AdminServiceStub(wire)
        present = await gateway_pb2_grpc.InferenceServiceStub(wire).ListModels(gateway_pb2.ListModelsRequest())
        if "other" in {model.name for model in present.models}:
            await admin.ChangeModel(
                admin_pb2.ChangeModelRequest(action=scheduler_pb2.MODEL_ACTION_UNLOAD, name="other")
            )
        await admin.ChangeModel(
            admin_pb2.ChangeModelRequest(action=scheduler_pb2.MODEL_ACTION_LOAD, name="other", source=str(folder))
        )


def reference_ids(folder: Path, text: str) -> list[int]:
    """What the tokenizers library makes of a text, with the specials that its file asks for."""
    ids: list[int] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
    return ids


async def test_exactly_one_beginning_token(stack: Stack, tmp_path: Path) -> None:
    """Case P1: chats, text and text that begins with it; counts and ids agree on both surfaces."""
    other = make_succ_model(tmp_path, {}, chat_template="{{ bos_token }}" + CHAT_TEMPLATE)
    await load(stack, other)
    async with channel(stack.gateway) as wire, httpx.AsyncClient(base_url=stack.http, timeout=60) as http:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        chat = gateway_pb2.Chat(messages=[gateway_pb2.ChatMessage(**message) for message in MESSAGES])
        plain = reference_ids(other, "plain")
        assert plain[0] == BOS_ID
        for model in ("tiny", "other"):
            wanted: list[tuple[dict[str, Any], dict[str, Any], list[int]]] = [
                ({"chat": chat}, {"messages": MESSAGES}, reference_ids(other, RENDERED)),
                ({"text": "plain"}, {"prompt": "plain"}, plain),
                ({"text": BOS + "plain"}, {"prompt": BOS + "plain"}, plain),
            ]
            for by_grpc, by_http, ids in wanted:
                told = await stub.Tokenize(gateway_pb2.TokenizeRequest(model=model, **by_grpc))
                assert list(told.token_ids) == ids
                assert (await http.post("/tokenize", json={"model": model} | by_http)).json()["tokens"] == ids
                request = gateway_pb2.GenerationInput(model=model, **by_grpc)
                request.stop.max_tokens = 1
                whole = await stub.Generate(gateway_pb2.GenerateRequest(input=request))
                assert whole.usage.prompt_tokens == len(ids)
                path = "/v1/chat/completions" if "messages" in by_http else "/v1/completions"
                answered = await http.post(path, json={"model": model, "max_tokens": 1} | by_http)
                assert answered.json()["usage"]["prompt_tokens"] == len(ids)


async def test_a_crowd_of_prompts_counts_as_one_by_one(stack: Stack) -> None:
    """Case P3: short and very long ones, chats and text at once."""

    def request(number: int) -> gateway_pb2.GenerationInput:
        size = 600 if number % 4 == 0 else 3 + number
        text = "word " * (size // 5) + "é🙂" * (number % 3)
        if number % 2:
            return greedy(text, 1, model="tiny")
        made = greedy([0], 1, model="tiny")
        made.chat.messages.add(role="user", content=text)
        return made

    async with channel(stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)

        async def count(number: int) -> tuple[int, list[int]]:
            [answer] = await collect(stub, request(number))
            assert answer.usage is not None
            return answer.usage.prompt_tokens, answer.ids

        huge = [stub.Tokenize(gateway_pb2.TokenizeRequest(model="tiny", text="x" * 200_000)) for _ in range(4)]
        together = await asyncio.gather(*map(count, range(64)))
        assert [len((await call).token_ids) for call in huge] == [200_001] * 4
        assert [await count(number) for number in range(64)] == together


async def test_spaces_survive_and_nothing_stays_nothing(stack: Stack, tmp_path: Path) -> None:
    """Case A6: joined deltas are the text of prompt and output without the prompt's, for every length.

    Case C1: an empty text is refused where no beginning token stands for it.
    """
    words = sentencepiece(["▁", "▁▁", "▁Hello", "▁world", "lo", "!", "a", "b", "c"], add_bos=False)
    vocab = words.tokenizer["model"]["vocab"]
    chain = [vocab[piece] for piece in ("▁", "▁▁", "<0xC3>", "<0xA9>", "▁world", "lo", "!")]
    table = dict(itertools.pairwise(chain)) | {vocab["a"]: chain[0], vocab["b"]: chain[1], vocab["c"]: chain[4]}
    await load(stack, make_succ_model(tmp_path, table, default=2, vocabulary=words))
    answers = {"a": "   é worldlo!", "b": "  é worldlo!", "c": " worldlo!"}
    async with channel(stack.gateway) as wire, httpx.AsyncClient(base_url=stack.http, timeout=60) as http:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        for letter, text in answers.items():
            tokenized = await stub.Tokenize(gateway_pb2.TokenizeRequest(model="other", text=letter))
            ids = chain[chain.index(table[vocab[letter]]) :]
            for count in range(1, len(ids) + 1):
                [answer] = await collect(stub, greedy(letter, count, model="other"))
                assert answer.ids == ids[:count]
                both = gateway_pb2.DetokenizeRequest(model="other", token_ids=[*tokenized.token_ids, *answer.ids])
                assert answer.text == (await stub.Detokenize(both)).text.removeprefix(letter)
            assert answer.text == text
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await collect(stub, greedy("", 2, model="other"))
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        answered = await http.post("/v1/completions", json={"model": "other", "prompt": ["a", ""]})
        assert answered.status_code == 400
        assert "prompt" in answered.json()["error"]["message"]
        assert (await collect(stub, greedy("a", 7, model="other")))[0].text == answers["a"]
