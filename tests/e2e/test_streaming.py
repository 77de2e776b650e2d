"""What a stream shows: whole characters, nothing of a stop string, exact text, spaces and counts; on both surfaces.

One M-succ holds every script: the single prompt token chooses it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2
from tests.e2e.requests import Answer, channel, collect, greedy
from tests.e2e.stack import Stack
from tests.fixtures.models import make_succ_model
from tests.fixtures.vocabularies import EOS_ID, FIRST_EXTRA_ID, START_OF_TURN, START_OF_TURN_ID

SMILE = "🙂".encode()
BYTES = [SMILE[i : i + 1] for i in range(4)]
SCRIPTS: Mapping[str, Sequence[bytes | str | int]] = {
    "s": [*BYTES, *BYTES, "ok"],
    "a": ["A", "BC", "D", "EF", "G"],
    "t": ["Hi", ".", START_OF_TURN_ID, "more"],
    "c": ["cut", *BYTES[:2]],  # ends within a character
}
STOP = types_pb2.FINISH_REASON_STOP


@dataclass(frozen=True)
class Scripted:
    stack: Stack
    ids: Mapping[str, list[int]]  # each script's output, the end token included


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    pieces: list[bytes | str] = []
    table: dict[int, int] = {}
    outputs: dict[str, list[int]] = {}
    for trigger, script in SCRIPTS.items():
        ids = []
        for piece in script:
            ids.append(piece if isinstance(piece, int) else FIRST_EXTRA_ID + len(pieces))
            pieces += [] if isinstance(piece, int) else [piece]
        outputs[trigger] = [*ids, EOS_ID]
        table |= dict(zip([ord(trigger), *ids], outputs[trigger], strict=True))
    with Stack(make_succ_model(tmp_path_factory.mktemp("succ"), table, pieces)) as stack:
        yield Scripted(stack, outputs)


def scripted_input(trigger: str, **stop: Any) -> gateway_pb2.GenerationInput:
    return gateway_pb2.GenerationInput(
        token_ids=gateway_pb2.TokenIds(ids=[ord(trigger)]),
        sampling=types_pb2.SamplingParams(temperature=0),
        stop=types_pb2.StopCriteria(max_tokens=40, **stop),
    )


async def over_grpc(stack: Stack, request: gateway_pb2.GenerationInput) -> tuple[list[str], list[Answer]]:
    """The deltas in order and the joined answers; the answer at once must say the same."""
    deltas: list[str] = []
    async with channel(stack.gateway) as wire:
        stub = gateway_pb2_grpc.InferenceServiceStub(wire)
        async for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=request)):
            deltas.append(message.text)
        answers = await collect(stub, request)
        whole = await stub.Generate(gateway_pb2.GenerateRequest(input=request))
    assert [choice.text for choice in whole.choices] == [answer.text for answer in answers]
    assert [list(choice.token_ids) for choice in whole.choices] == [answer.ids for answer in answers]
    assert [choice.finish_reason for choice in whole.choices] == [answer.finish for answer in answers]
    assert answers[0].usage is not None
    assert whole.usage.completion_tokens == answers[0].usage.completion_tokens == sum(len(a.ids) for a in answers)
    return deltas, answers


async def over_http(stack: Stack, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a streamed completion, which must end with [DONE]."""
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 40, "stream": True, **body}
    async with (
        httpx.AsyncClient(timeout=60) as http,
        http.stream("POST", f"{stack.http}/v1/completions", json=asked) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        data = [line[6:] async for line in answer.aiter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [json.loads(one) for one in data]


def texts(chunks: Sequence[Mapping[str, Any]]) -> list[str]:
    return [choice["text"] for chunk in chunks for choice in chunk["choices"]]


async def test_characters_of_several_tokens_arrive_whole(scripted: Scripted) -> None:
    """Case A1."""
    deltas, [answer] = await over_grpc(scripted.stack, scripted_input("s"))
    assert "".join(deltas) == answer.text == "🙂🙂ok"
    assert answer.ids == scripted.ids["s"]
    pieces = texts(await over_http(scripted.stack, prompt=[ord("s")]))
    assert "".join(pieces) == "🙂🙂ok"
    assert not any("\ufffd" in piece for piece in [*deltas, *pieces])


async def test_a_character_that_stays_incomplete_is_shown_once_at_the_end(scripted: Scripted) -> None:
    """Case A1: nothing is dropped in silence."""
    deltas, [answer] = await over_grpc(scripted.stack, scripted_input("c"))
    assert "".join(deltas) == answer.text == "cut\ufffd"


@pytest.mark.parametrize(
    ("stops", "text", "tokens", "matched"),
    [
        (["BCDE"], "A", 4, "BCDE"),
        (["DEFX", "CDE"], "AB", 4, "CDE"),  # the two overlap; only one completes
        (["DE", "BCDEF"], "ABC", 4, "DE"),  # the one that completes first wins
        (["absent"], "ABCDEFG", 6, ""),
    ],
)
async def test_nothing_of_a_stop_string_is_shown(
    scripted: Scripted, stops: list[str], text: str, tokens: int, matched: str
) -> None:
    """Case A3."""
    deltas, [answer] = await over_grpc(scripted.stack, scripted_input("a", stop=stops))
    assert "".join(deltas) == answer.text == text
    assert (len(answer.ids), answer.finish) == (tokens, STOP)
    chunks = await over_http(scripted.stack, prompt=[ord("a")], stop=stops)
    assert "".join(texts(chunks)) == text
    last = chunks[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", matched or EOS_ID)


async def test_a_special_token_stops_by_its_text_and_by_its_id(scripted: Scripted) -> None:
    """Case A5: the last character before it stays intact."""
    for stop in ({"stop": [START_OF_TURN]}, {"stop_token_ids": [START_OF_TURN_ID]}):
        _, [answer] = await over_grpc(scripted.stack, scripted_input("t", **stop))
        assert (answer.text, answer.finish) == ("Hi.", STOP)
        assert answer.ids == scripted.ids["t"][:3]
        assert "".join(texts(await over_http(scripted.stack, prompt=[ord("t")], **stop))) == "Hi."
    _, [ended] = await over_grpc(scripted.stack, scripted_input("a", stop_token_ids=[EOS_ID]))
    assert ended.text == "ABCDEFG"


async def test_an_ordinary_request_after_all_that(scripted: Scripted) -> None:
    [answer] = (await over_grpc(scripted.stack, greedy([ord("a")], 3)))[1]
    assert answer.text == "ABCD"
    assert answer.finish == types_pb2.FINISH_REASON_LENGTH
