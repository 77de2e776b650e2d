"""Sampling rules end to end, each against the model's own logits, and neighbours that no rule of another disturbs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.e2e.requests import Ids, all_blocks_back, at_once, channel, collect, greedy, ids_of, status
from tests.e2e.stack import Stack
from tests.fixtures.models import make_rand_model, reference_generate, reference_logits
from tests.fixtures.vocabularies import END_OF_TURN_ID, EOS_ID

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
LENGTH, STOP = types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_STOP
VOCABULARY = 260
POOL = 17  # blocks: one request of the longest kind, or a few of the others


@dataclass(frozen=True)
class Served:
    model: Path
    stack: Stack


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = make_rand_model(tmp_path_factory.mktemp("rand"), seed=17)
    with Stack(model, kv_blocks=POOL) as stack:
        yield Served(model, stack)


def sampled(prompt: Ids, tokens: int, **sampling: Any) -> gateway_pb2.GenerationInput:
    request = greedy(prompt, tokens)
    request.sampling.CopyFrom(types_pb2.SamplingParams(**sampling))
    return request


async def test_mixed_rules_in_one_batch_do_not_mix(served: Served) -> None:
    """Cases B3 and B5: each row equals its lone run, and the greedy spellings equal the reference."""
    truth = reference_generate(served.model, PROMPT, 24)
    spellings: list[dict[str, Any]] = [
        *({"temperature": t} for t in (0, 1e-6, 1e-4, 1e-300)),
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 100.0, "top_k": 1},
    ]
    others: list[dict[str, Any]] = [
        *({"temperature": 1.0, "top_k": k, "seed": 9} for k in (-1, 0, VOCABULARY, 10**7)),
        {"temperature": 1.0, "top_p": 1.0, "seed": 9},
        {"temperature": 1e-2, "logit_bias": {truth[0]: -100.0}, "seed": 1},
        {"temperature": 0.7, "min_p": 0.2, "seed": 2, "top_k": 5},
        {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 2.0, "seed": 3},
    ]
    requests = [sampled(PROMPT, 24, **one) for one in [*spellings, *others]]
    together = await ids_of(served.stack.gateway, requests)
    assert together[: len(spellings)] == [truth] * len(spellings)
    free = together[len(spellings) :]
    assert free[0] == free[1] == free[2] == free[3] == free[4], "top_k and top_p that keep all"
    assert free[0] != truth
    alone = [(await ids_of(served.stack.gateway, [request]))[0] for request in requests[len(spellings) :]]
    assert free == alone


async def test_a_banned_token_never_appears(served: Served) -> None:
    """Case B3: a bias of -100, greedy and sampled."""
    banned = reference_generate(served.model, PROMPT, 1)[0]
    for temperature in (0.0, 1e-6, 1.0):
        request = sampled(PROMPT, 32, temperature=temperature, seed=4, logit_bias={banned: -100.0})
        assert banned not in (await ids_of(served.stack.gateway, [request]))[0]
    second = int(reference_logits(served.model, PROMPT)[-1].topk(2).indices[1])
    request = sampled(PROMPT, 1, temperature=0.0, logit_bias={banned: -100.0})
    assert (await ids_of(served.stack.gateway, [request]))[0] == [second]


async def test_choices_differ_and_repeat_with_their_seed(served: Served) -> None:
    """Case B2: 64 choices, each whole; unseeded runs differ."""
    async with channel(served.stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        request = sampled(PROMPT, 8, temperature=1.0, seed=7)
        request.choice_count = 64
        first = await collect(stub, request)
        assert [len(answer.ids) for answer in first] == [8] * 64
        assert len({tuple(answer.ids) for answer in first}) > 32
        assert first[0].usage is not None
        assert first[0].usage.completion_tokens == 64 * 8
        assert [answer.ids for answer in await collect(stub, request)] == [answer.ids for answer in first]
        request.choice_count = 3
        assert [answer.ids for answer in await collect(stub, request)] == [answer.ids for answer in first[:3]]
        request.sampling.ClearField("seed")
        unseeded = [[answer.ids for answer in await collect(stub, request)] for _ in range(2)]
        assert unseeded[0] != unseeded[1]
        # Choices that end at different lengths, because every end token is drawn with some chance.
        request = sampled(PROMPT, 40, temperature=1.0, seed=7, logit_bias={EOS_ID: 9.0, END_OF_TURN_ID: 9.0})
        request.choice_count, request.stop.ignore_eos = 16, False
        ended = await collect(stub, request)
        assert {answer.finish for answer in ended} <= {LENGTH, STOP}
        assert len({len(answer.ids) for answer in ended}) > 2
        assert ended[0].usage is not None
        assert ended[0].usage.completion_tokens == sum(len(answer.ids) for answer in ended)


@pytest.mark.parametrize("forced", [EOS_ID, END_OF_TURN_ID])
@pytest.mark.parametrize("length", [1, 200])
async def test_min_tokens_holds_for_every_end_token(served: Served, forced: int, length: int) -> None:
    """Case B9: the end token appears as output token min_tokens + 1 exactly."""
    async with channel(served.stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        for least in (0, 1, 4):
            # The other end token comes second: banning only one of them would let it through.
            bias = {EOS_ID: 90.0, END_OF_TURN_ID: 90.0} | {forced: 100.0}
            request = sampled([7] * length, 20, temperature=0.0, logit_bias=bias)
            request.stop.ignore_eos, request.stop.min_tokens = False, least
            [answer] = await collect(stub, request)
            assert len(answer.ids) == least + 1
            assert answer.ids[-1] == forced
            assert not {EOS_ID, END_OF_TURN_ID} & set(answer.ids[:-1])
            assert answer.finish == STOP


async def test_log_probabilities_are_those_of_the_model(served: Served) -> None:
    """Case B8: of output and prompt, in order, with exactly the alternatives asked for; cold, warm and in chunks."""
    prompt = [(5 * i * i + i) % 256 for i in range(100)]
    async with channel(served.stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        for attempt in range(2):  # the second finds its prefix in the cache, and still scores all of it
            for width in (0, 1, 5, 20):
                request = sampled(prompt, 6, temperature=3.0, seed=attempt)
                request.sampling.logit_bias[9] = -100.0  # no rule of the request shows in the values
                request.logprobs.output_count = request.logprobs.prompt_count = width
                whole = await stub.Generate(gateway_pb2.GenerateRequest(input=request))
                [choice] = whole.choices
                ids = [*prompt, *choice.token_ids]
                scores = [*whole.prompt_logprobs, *choice.logprobs]
                assert [score.token_id for score in scores] == ids
                assert not scores[0].HasField("logprob")
                assert not scores[0].top
                truth = reference_logits(served.model, ids).log_softmax(-1)
                for at, score in enumerate(scores[1:]):
                    row = truth[at]
                    assert score.logprob == pytest.approx(float(row[ids[at + 1]]), abs=1e-3)
                    assert score.rank == 1 + int((row > row[ids[at + 1]]).sum())
                    best = row.topk(width)
                    assert [other.token_id for other in score.top] == best.indices.tolist()
                    assert [other.logprob for other in score.top] == pytest.approx(best.values.tolist(), abs=1e-3)
                    assert [other.rank for other in score.top] == list(range(1, width + 1))


async def test_log_probabilities_over_http_stay_json(served: Served) -> None:
    """Case B8: absent, 0, 1, 5, over the limit; with a strong ban."""
    async with httpx.AsyncClient(base_url=served.stack.http, timeout=60) as http:

        async def ask(path: str, **more: Any) -> httpx.Response:
            prompt = {"prompt": PROMPT} if path == "completions" else {"messages": [{"role": "user", "content": "Hi"}]}
            body = {"model": "tiny", "max_tokens": 3, "seed": 1, "ignore_eos": True, "logit_bias": {"5": -100}}
            return await http.post(f"/v1/{path}", json=body | prompt | more)

        for count in (0, 1, 5):
            choice = (await ask("completions", logprobs=count)).json()["choices"][0]
            assert len(choice["logprobs"]["token_logprobs"]) == 3
            # The chosen token is always among them.
            assert all(count <= len(top) <= count + 1 for top in choice["logprobs"]["top_logprobs"])
            assert all(math.isfinite(v) for top in choice["logprobs"]["top_logprobs"] for v in top.values())
        assert (await ask("completions")).json()["choices"][0]["logprobs"] is None
        assert (await ask("completions", logprobs=21)).status_code == 400
        chosen = (await ask("chat/completions", logprobs=True)).json()["choices"][0]["logprobs"]["content"]
        assert [token["top_logprobs"] for token in chosen] == [[], [], []]
        chosen = (await ask("chat/completions", logprobs=True, top_logprobs=5)).json()["choices"][0]["logprobs"]
        assert [len(token["top_logprobs"]) for token in chosen["content"]] == [5, 5, 5]
        refused = await ask("chat/completions", logprobs=True, top_logprobs=21)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "top_logprobs"
        scored = (await ask("completions", prompt_logprobs=2)).json()
        assert "prompt_logprobs" in scored["choices"][0], scored


BAD: list[tuple[str, dict[str, Any]]] = [
    *(("sampling.temperature", {"sampling": {"temperature": v}}) for v in (math.nan, math.inf, -math.inf, -1.0, 101.0)),
    *(("sampling.top_p", {"sampling": {"top_p": v}}) for v in (-1.0, 1.5, math.nan)),
    *(("sampling.min_p", {"sampling": {"min_p": v}}) for v in (-0.1, math.nan)),
    *(("sampling.repetition_penalty", {"sampling": {"repetition_penalty": v}}) for v in (0.0, -1.0, 1e9, math.nan)),
    *(("sampling.presence_penalty", {"sampling": {"presence_penalty": v}}) for v in (1e9, math.nan)),
    *(("sampling.frequency_penalty", {"sampling": {"frequency_penalty": v}}) for v in (-1e9, math.inf)),
    ("sampling.top_k", {"sampling": {"top_k": -2}}),
    *(("sampling.logit_bias", {"sampling": {"logit_bias": {t: 1.0}}}) for t in (-1, VOCABULARY, 2**31 - 1)),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {5: math.nan}}}),
    *(("stop.stop_token_ids", {"stop": {"stop_token_ids": [t]}}) for t in (-1, VOCABULARY, 2**31 - 1)),
    *(("token_ids", {"token_ids": {"ids": [1, t]}}) for t in (-1, VOCABULARY, 2**31 - 1)),
    ("stop.max_tokens", {"stop": {"max_tokens": -5}}),
    ("stop.min_tokens", {"stop": {"min_tokens": -1}}),
    ("choice_count", {"choice_count": 65}),
    ("choice_count", {"choice_count": -1}),
    ("logprobs.output_count", {"logprobs": {"output_count": -1}}),
    ("logprobs.prompt_count", {"logprobs": {"prompt_count": 10**9}}),
]
BAD_HTTP: list[tuple[str, dict[str, Any] | str]] = [
    ("temperature", '{"model":"tiny","prompt":"Hi","temperature":NaN}'),
    ("temperature", {"temperature": -1}),
    ("top_p", {"top_p": 1.5}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("presence_penalty", {"presence_penalty": 1e9}),
    *(("logit_bias", {"logit_bias": {str(t): 1}}) for t in (-1, VOCABULARY, 2**31, 2**63)),
    *(("stop_token_ids", {"stop_token_ids": [t]}) for t in (-1, VOCABULARY, 2**31, 2**63)),
    *(("prompt", {"prompt": [t]}) for t in (-1, VOCABULARY, 2**31, 2**63)),
    ("n", {"n": 10**6}),
]


async def test_bad_values_harm_nobody(served: Served) -> None:
    """Cases B4 and B6: refused by name, while a greedy neighbour goes on unchanged."""
    alone = await ids_of(served.stack.gateway, [greedy(PROMPT, 500)])
    neighbour = asyncio.create_task(ids_of(served.stack.gateway, [greedy(PROMPT, 500)]))
    async with channel(served.stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        for field, fields in BAD:
            request = gateway_pb2.GenerationInput(**({"token_ids": {"ids": PROMPT}} | fields))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Generate(gateway_pb2.GenerateRequest(input=request))
            assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT, fields
            assert (refused.value.details() or "").startswith(field), fields
    async with httpx.AsyncClient(base_url=served.stack.http, timeout=60) as http:
        for field, body in BAD_HTTP:
            if isinstance(body, str):
                answer = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
            else:
                answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "Hi"} | body)
            assert answer.status_code == 400, body
            assert field in answer.json()["error"]["message"], body
    assert await neighbour == alone
    assert await ids_of(served.stack.gateway, [greedy(PROMPT, 500)]) == alone


async def test_penalties_count_on_through_preemption(served: Served) -> None:
    """Case E1 with state: seeded and penalized answers in a small pool equal the lone runs."""
    rules: list[dict[str, Any]] = [
        {"temperature": 0.0, "frequency_penalty": 2.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "presence_penalty": 1.5, "seed": 1},
        {"temperature": 0.8, "frequency_penalty": 1.0, "repetition_penalty": 1.2, "top_k": 40, "seed": 2},
        {"temperature": 1.0, "seed": 3},
    ]
    requests = [sampled([10 * i + j for j in range(70)], 300, **rule) for i, rule in enumerate(rules)]
    for request in requests:
        request.logprobs.output_count = request.logprobs.prompt_count = 1

    async with channel(served.stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)

        async def answer(request: gateway_pb2.GenerationInput) -> list[Any]:
            whole = await stub.Generate(gateway_pb2.GenerateRequest(input=request))
            [choice] = whole.choices
            scores = [(s.token_id, s.rank, round(s.logprob, 3)) for s in [*whole.prompt_logprobs, *choice.logprobs]]
            return [list(choice.token_ids), scores]

        async def together() -> list[list[Any]]:
            return await asyncio.gather(*map(answer, requests))

        lone = [await answer(request) for request in requests]
        before = (await status(served.stack.gateway)).scheduler.preemption_count
        crowd = await at_once(served.stack, len(requests), together())
        assert crowd == lone
    assert (await status(served.stack.gateway)).scheduler.preemption_count > before, "nothing was preempted"
    await all_blocks_back(served.stack.gateway)


async def test_stop_strings_cut_each_choice_and_its_usage(served: Served) -> None:
    """Cases A3 and B2: the choices end apart, each just behind its own match, log probabilities and all."""
    request = sampled([1, 2, 3], 60, temperature=1.0, seed=5)
    request.choice_count = 8
    stops = list("aeiou")
    async with channel(served.stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        free = (await stub.Generate(gateway_pb2.GenerateRequest(input=request))).choices
        request.stop.stop.extend(stops)
        request.logprobs.output_count = 0
        cut = await stub.Generate(gateway_pb2.GenerateRequest(input=request))
    for whole, short in zip(free, cut.choices, strict=True):
        hits = [at for at, char in enumerate(whole.text) if char in stops]
        assert short.text == (whole.text[: hits[0]] if hits else whole.text)
        assert short.matched_stop == (whole.text[hits[0]] if hits else "")
        assert short.finish_reason == (STOP if hits else LENGTH)
        assert list(short.token_ids) == list(whole.token_ids[: len(short.token_ids)])
        assert [score.token_id for score in short.logprobs] == list(short.token_ids)
    lengths = [len(choice.token_ids) for choice in cut.choices]
    assert cut.usage.completion_tokens == sum(lengths)
    assert len(set(lengths)) > 1, "the choices end alike: the test shows nothing"
