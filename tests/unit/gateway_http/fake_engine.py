"""An engine in memory: it validates as the real one does, then tells a script. Token ids are bytes; 256 ends a text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from quire.v1 import gateway_pb2, types_pb2
from services.common.errors import QuireError, Reason, invalid
from services.gateway import embedding
from services.gateway.caller import Caller
from services.gateway.chat_plan import Reading, check_template, reading_of
from services.gateway.events import Delta, Embedded, Event, Finished, PromptScores, ScoredToken, Started
from services.gateway.output.parts import CallBegin, CallFault, Part, visible
from services.gateway.output.template_facts import TemplateFacts
from services.gateway.output_rule import output_rule
from services.gateway.positions import Seen
from services.gateway.validation import check_chat, resolve_max_tokens, validate

MODEL = types_pb2.ModelDescription(
    name="test/model",
    context_length=64,
    vocab_size=300,
    eos_token_ids=[256],
    loaded_at=1_700_000_000,
    embedding_size=2,
)

NO_TEMPLATE = TemplateFacts()


@dataclass(frozen=True)
class Settings:
    http_listen: str = "127.0.0.1:0"
    max_body_bytes: int = 16 << 20
    drain_seconds: float = 1.0


def scored(token: bytes, logprob: float = -0.5, top: Sequence[tuple[bytes, float]] = ()) -> ScoredToken:
    alternatives = tuple(ScoredToken(text[0], text, value, rank + 1) for rank, (text, value) in enumerate(top))
    return ScoredToken(token[0], token, logprob, 1, alternatives)


@dataclass
class FakeEngine:
    """`pieces` are the tokens that each choice draws; choice k of n begins with its own index when n > 1."""

    pieces: Sequence[str] = ("Hel", "lo", ", ", "wor", "ld")
    ready: bool = True
    logprob: Callable[[int], float] = lambda rank: -0.5 - rank  # of the token at that rank
    fail_after: int | None = None  # tokens per choice, then `failure`
    failure: Exception = field(default_factory=lambda: QuireError(Reason.EXECUTOR_LOST, "the executor is gone"))
    hang_after: int | None = None  # tokens per choice, then nothing more happens
    silent_end: bool = False  # end without finish reasons
    refusal: QuireError | None = None  # of every request
    rates: dict[str, str] = field(default_factory=dict)  # that answers tell
    facts: TemplateFacts = NO_TEMPLATE  # of the model
    prompt_end: str = ""  # what the model's template writes last
    ends_itself: bool = False  # with an end token, not with its budget
    constraints: list[types_pb2.Constraint | None] = field(default_factory=list)  # of each request
    requests: list[gateway_pb2.GenerationInput] = field(default_factory=list)
    callers: list[Caller] = field(default_factory=list)  # of each request
    deadlines: list[float | None] = field(default_factory=list)  # of each request
    running: int = 0
    thought: int = 0  # tokens of thinking of the last choice
    hung: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)  # the last running request ended

    def metrics(self) -> bytes:
        return b"quire_up 1\n"

    def models(self, caller: Caller) -> list[types_pb2.ModelDescription]:
        return [MODEL]

    async def generate(
        self,
        request: gateway_pb2.GenerationInput,
        /,
        *,
        caller: Caller,
        deadline: float | None,
        on_cut: Callable[[], None] | None = None,
        seen: Sequence[Seen] | None = None,
    ) -> AsyncIterator[Event]:
        if request.model not in ("", MODEL.name):
            raise QuireError(Reason.MODEL_NOT_FOUND, f"model: {request.model} is unknown", field="model")
        if self.refusal is not None:
            raise self.refusal
        validate(request, MODEL, 1 << 20)
        caller.check_priority(request.priority)
        check_template(request.chat, self.facts)
        prompt = self._prompt_ids(request)
        reading = reading_of(request.chat, self.facts, self, prompt)
        own = request.constraint if request.HasField("constraint") else None
        constraint = own if reading is None else output_rule(request.chat, reading, own, ())
        if not prompt:
            raise invalid("text", "is empty, and the model has no beginning token")
        budget = resolve_max_tokens(len(prompt), request.stop, MODEL.context_length)
        self.requests.append(request)
        self.constraints.append(constraint)
        self.callers.append(caller)
        self.deadlines.append(deadline)
        self.running += 1
        try:
            async with aclosing(self._events(request, prompt, budget, reading)) as events:
                async for event in events:
                    yield event
        finally:
            self.running -= 1
            if not self.running:
                self.ended.set()

    def model(self, name: str, caller: Caller) -> types_pb2.ModelDescription:
        if name not in ("", MODEL.name):
            raise QuireError(Reason.MODEL_NOT_FOUND, f"model: {name} is unknown", field="model")
        return MODEL

    async def embed(
        self,
        request: gateway_pb2.EmbedRequest,
        /,
        *,
        caller: Caller,
        deadline: float | None,
        on_cut: Callable[[], None] | None = None,
    ) -> AsyncIterator[Event]:
        """The vector is the prompt's length and how it was pooled."""
        asked = embedding.to_input(request)
        pooling = embedding.pooling(request)
        async with aclosing(
            self.generate(asked, caller=caller, deadline=deadline, on_cut=on_cut)  # type: ignore[type-var]
        ) as events:
            async for event in events:
                yield event
                if isinstance(event, Started):
                    yield Embedded((float(len(event.prompt_token_ids)), float(pooling)))

    async def cancel(self, request_id: str, *, caller: Caller) -> None:
        raise QuireError(Reason.NOT_FOUND, f"request_id: {request_id} is not running", field="request_id")

    async def tokenize(
        self, model: str, prompt: str | gateway_pb2.Chat, *, caller: Caller, add_special: bool = True
    ) -> tuple[list[int], types_pb2.ModelDescription]:
        if isinstance(prompt, str):
            text = prompt
        else:
            check_chat(prompt, 1 << 20)
            check_template(prompt, self.facts)
            text = "".join(message.content for message in prompt.messages)
        return [257] * add_special + list(text.encode()), MODEL

    async def detokenize(self, model: str, ids: Sequence[int], *, caller: Caller, skip_special: bool = True) -> str:
        if any(not 0 <= one < MODEL.vocab_size for one in ids):
            raise invalid("token_ids", "outside the vocabulary")
        return bytes(one for one in ids if one < 256).decode() + "" if skip_special else str(list(ids))

    async def _events(
        self, request: gateway_pb2.GenerationInput, prompt: list[int], budget: int, reading: Reading | None
    ) -> AsyncIterator[Event]:
        yield Started(request.request_id, MODEL.name, 1_700_000_001, tuple(prompt), 3, 7, self.rates)
        if request.logprobs.HasField("prompt_count"):
            yield PromptScores(
                tuple(ScoredToken(one, bytes([one]), -1.0 if at else None, 1) for at, one in enumerate(prompt))
            )
        counts = []
        for choice in range(request.choice_count):
            counts.append(0)
            async for delta in self._parsed(self._choice(request, choice, budget), reading):
                counts[choice] += len(delta.token_ids)
                yield delta
        yield Finished(len(prompt), sum(counts), 3, None if reading is None else self.thought)

    async def _parsed(self, deltas: AsyncIterator[Delta], reading: Reading | None) -> AsyncIterator[Delta]:
        parser = None if reading is None else reading.parser()
        calls = self.thought = thought = 0
        async for delta in deltas:
            if parser is None:
                yield delta
                continue
            thought += parser.thinking
            parts: list[Part] = parser.push(delta.text)
            parts += parser.finish() if delta.finish_reason is not None else []
            calls += sum(isinstance(part, CallBegin) - isinstance(part, CallFault) for part in parts)
            self.thought = thought * parser.thought
            yield replace(delta, text=visible(parts), parts=tuple(parts), called=calls > 0)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.prompt_end

    async def _choice(self, request: gateway_pb2.GenerationInput, choice: int, budget: int) -> AsyncIterator[Delta]:
        pieces = [str(choice), *self.pieces] if request.choice_count > 1 else list(self.pieces)
        text = ""
        for at, piece in enumerate(pieces):
            if at == self.fail_after:
                raise self.failure
            if at == self.hang_after:
                self.hung.set()
                await asyncio.Event().wait()
            await asyncio.sleep(0)
            text += piece
            stop = next((one for one in request.stop.stop if one in text), None)
            reason = (
                types_pb2.FINISH_REASON_STOP
                if stop or (self.ends_itself and at + 1 == len(pieces) <= budget)
                else types_pb2.FINISH_REASON_LENGTH
                if at + 1 in (budget, len(pieces))
                else None
            )
            shown = piece if stop is None else text[: text.index(stop)][len(text) - len(piece) :]
            yield Delta(choice, shown, (65,), self._scores(request, piece), None if self.silent_end else reason, stop)
            if reason is not None:
                return

    def _scores(self, request: gateway_pb2.GenerationInput, piece: str) -> tuple[ScoredToken, ...] | None:
        if not request.logprobs.HasField("output_count"):
            return None
        top = tuple(
            ScoredToken(100 + rank, b"\xe2\x82", self.logprob(rank), rank + 1)
            for rank in range(request.logprobs.output_count)
        )
        return (ScoredToken(65, piece.encode(), -0.25, 30, top),)

    @staticmethod
    def _prompt_ids(request: gateway_pb2.GenerationInput) -> list[int]:
        match request.WhichOneof("prompt"):
            case "text":
                return list(request.text.encode())
            case "token_ids":
                return list(request.token_ids.ids)
            case _:
                return list("".join(message.content for message in request.chat.messages).encode()) or [10]
