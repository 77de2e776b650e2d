"""Beam search end to end: the answers of a plain search over an uncached forward pass, and of transformers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.e2e.requests import all_blocks_back, channel, ids_of, seeded, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, reference_logits
from tests.unit.scheduler.beam_reference import Answer, Array, beam_search

ENDS = random.Random(4).sample(range(256), 40)
PROMPTS = [[3, 1, 4, 1, 5], [9] * 40, [2, 6, 5] * 21]
WIDTHS = [4, 3, 6]
PENALTIES = [1.0, 0.0, 2.0]
TOKENS = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("rand"), seed=31)


@pytest.fixture(scope="module")
def truths(model: Path) -> list[list[Answer]]:
    def log_probabilities(ids: list[int]) -> Array:
        return torch.log_softmax(reference_logits(model, ids)[-1], 0).numpy()

    return [
        beam_search(
            log_probabilities, prompt, width, max_tokens=TOKENS, min_tokens=3, ends=ENDS, length_penalty=penalty
        )
        for prompt, width, penalty in zip(PROMPTS, WIDTHS, PENALTIES, strict=True)
    ]


@pytest.fixture(scope="module")
def stack(model: Path) -> Iterator[Stack]:
    with Stack(model) as running:
        yield running


def wanted(index: int) -> gateway_pb2.GenerationInput:
    request = gateway_pb2.GenerationInput(
        stop=types_pb2.StopCriteria(max_tokens=TOKENS, min_tokens=3, stop_token_ids=ENDS, ignore_eos=True),
        logprobs=types_pb2.LogprobOptions(output_count=2),
        beam_width=WIDTHS[index],
        choice_count=WIDTHS[index],
        length_penalty=PENALTIES[index],
    )
    request.token_ids.ids.extend(PROMPTS[index])
    return request


async def answers(target: str, requests: list[gateway_pb2.GenerationInput]) -> list[gateway_pb2.GenerateResponse]:
    async with channel(target) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        return await asyncio.gather(*(stub.Generate(gateway_pb2.GenerateRequest(input=one)) for one in requests))


def assert_true(response: gateway_pb2.GenerateResponse, truth: list[Answer]) -> None:
    stop, length = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
    assert [list(choice.token_ids) for choice in response.choices] == [answer.tokens for answer in truth]
    assert [c.finish_reason for c in response.choices] == [stop if answer.ends else length for answer in truth]
    for choice, answer in zip(response.choices, truth, strict=True):
        assert choice.cumulative_logprob == pytest.approx(answer.total, abs=1e-3)
        assert sum(token.logprob for token in choice.logprobs) == pytest.approx(choice.cumulative_logprob)
        assert all(len(token.top) == 2 for token in choice.logprobs)
        assert choice.matched_token_id == (answer.tokens[-1] if answer.ends else 0)
    assert response.usage.completion_tokens == sum(len(answer.tokens) for answer in truth)


async def check_all(stack: Stack, truths: list[list[Answer]]) -> None:
    """Alone, together, and beside drawn neighbours, which they leave as they are."""
    requests = [wanted(index) for index in range(len(PROMPTS))]
    neighbours = [seeded([7, index], 40, seed=index) for index in range(4)]
    for request, truth in zip(requests, truths, strict=True):
        assert_true((await answers(stack.gateway, [request]))[0], truth)
    alone = await ids_of(stack.gateway, neighbours)
    together, beside = await asyncio.gather(answers(stack.gateway, requests), ids_of(stack.gateway, neighbours))
    for response, truth in zip(together, truths, strict=True):
        assert_true(response, truth)
    assert beside == alone
    await all_blocks_back(stack.gateway)


async def test_answers_are_those_of_a_plain_search(stack: Stack, truths: list[list[Answer]]) -> None:
    await check_all(stack, truths)


async def test_answers_of_the_torch_backend_are_as_well(model: Path, truths: list[list[Answer]]) -> None:
    async with Stack(model, executor={"backend": "torch"}) as other:
        await check_all(other, truths)


async def test_answers_stay_the_same_where_blocks_run_out(model: Path, truths: list[list[Answer]]) -> None:
    """Fewer blocks than the paths of one request need at once, and none to spare for the others."""
    requests = [wanted(index) for index in range(len(PROMPTS))]
    async with Stack(model, kv_blocks=5, scheduler={"lookahead_tokens": 8}) as small:
        for response, truth in zip(await answers(small.gateway, requests), truths, strict=True):
            assert_true(response, truth)
        assert (await status(small.gateway)).scheduler.preemption_count > 0, "nothing was preempted"
        await all_blocks_back(small.gateway)


@pytest.mark.parametrize("victim", ["executor", "scheduler", "kvmanager"])
async def test_answers_survive_a_restart_of(victim: str, stack: Stack, truths: list[list[Answer]]) -> None:
    requests = [wanted(index) for index in range(len(PROMPTS))]
    searching = asyncio.create_task(answers(stack.gateway, requests))
    while (await status(stack.gateway)).scheduler.running_count < 4 and not searching.done():
        await asyncio.sleep(0.001)
    stack.kill(victim)
    stack.start(victim)  # here: a process ends with the thread that started it
    for response, truth in zip(await searching, truths, strict=True):
        assert_true(response, truth)
    await all_blocks_back(stack.gateway)


async def test_a_cancelled_search_gives_everything_back(stack: Stack) -> None:
    request = wanted(0)
    request.stop.CopyFrom(types_pb2.StopCriteria(max_tokens=900, ignore_eos=True))
    async with channel(stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        call = stub.Generate(gateway_pb2.GenerateRequest(input=request))
        while (await status(stack.gateway)).scheduler.running_count < WIDTHS[0]:
            await asyncio.sleep(0.01)
        call.cancel()
        await all_blocks_back(stack.gateway)
        assert (await status(stack.gateway)).scheduler.running_count == 0


async def test_http_asks_as_vllm_does(stack: Stack, truths: list[list[Answer]]) -> None:
    body = {
        "model": "tiny",
        "prompt": PROMPTS[0],
        "max_tokens": TOKENS,
        "min_tokens": 3,
        "stop_token_ids": ENDS,
        "ignore_eos": True,
        "use_beam_search": True,
        "n": 2,
        "best_of": WIDTHS[0],
        "temperature": 0,
        "logprobs": 0,
    }
    async with httpx.AsyncClient(base_url=stack.http, timeout=60) as client:
        found = (await client.post("/v1/completions", json=body)).raise_for_status().json()
        totals = [sum(choice["logprobs"]["token_logprobs"]) for choice in found["choices"]]
        assert totals == pytest.approx([answer.total for answer in truths[0][:2]], abs=1e-3)
        refused = await client.post("/v1/completions", json=body | {"n": 3, "best_of": 2})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
        refused = await client.post("/v1/completions", json=body | {"temperature": 0.5})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")


def test_the_plain_search_is_that_of_transformers(model: Path, truths: list[list[Answer]]) -> None:
    from transformers import LlamaForCausalLM

    loaded = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    for prompt, width, penalty, truth in zip(PROMPTS, WIDTHS, PENALTIES, truths, strict=True):
        found = loaded.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            max_new_tokens=TOKENS,
            min_new_tokens=3,
            eos_token_id=ENDS,
            pad_token_id=0,
            length_penalty=penalty,
            return_dict_in_generate=True,
            output_scores=True,
        )
        for ids, answer in zip(found.sequences, truth, strict=True):
            assert ids[len(prompt) :][: len(answer.tokens)].tolist() == answer.tokens
        assert found.sequences_scores.tolist() == pytest.approx([answer.score for answer in truth], abs=1e-4)
