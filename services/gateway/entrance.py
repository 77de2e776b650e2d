"""How a request comes in: it joins its stream where there is one, here or at another gateway, else it begins one."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.v1 import gateway_pb2, journal_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.store import StoreLost
from services.gateway import chat_plan, opening, validation
from services.gateway.caller import Caller
from services.gateway.encoding import Encoder
from services.gateway.journal.record import record_is_whole, replay
from services.gateway.journal.shared import SharedJournal
from services.gateway.metrics import GatewayMetrics, RequestMeter
from services.gateway.models import LoadedTokenizer, ModelCatalogue
from services.gateway.output.template_facts import TemplateFacts
from services.gateway.positions import FIELD, Seen
from services.gateway.quota.quota import Quota
from services.gateway.reading import Opened, Reading
from services.gateway.requests import OpenRequest, RequestTable
from services.gateway.rules import RuleChecker
from services.gateway.scheduler_link import SchedulerLinks
from services.gateway.settings import GatewaySettings
from services.gateway.stream import Stream
from services.gateway.streams import Streams

LARGE_BYTES = 256 * 1024
"""Requests from this size on are digested beside the event loop."""
LEAST_TOKENS = 2048
"""A request counts as a prompt of so many tokens at least: that is about what it takes without one."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a client asks for."""

    request: gateway_pb2.GenerationInput
    caller: Caller
    arrived_at: float
    deadline_at: float | None
    seen: Sequence[Seen] | None = None  # what it has of an earlier stream, which it means to go on with
    pooling: types_pb2.Pooling.ValueType = (
        types_pb2.POOLING_UNSPECIFIED
    )  # of the vector that it wants instead of output


class Entrance:
    """Owns the streams. Failures are raised as `QuireError`."""

    def __init__(
        self,
        settings: GatewaySettings,
        catalogue: ModelCatalogue,
        encoder: Encoder,
        table: RequestTable,
        links: SchedulerLinks,
        quota: Quota,
        metrics: GatewayMetrics,
        journal: SharedJournal | None,
        facts_of: Callable[[LoadedTokenizer], TemplateFacts],
    ) -> None:
        """`facts_of` a tokenizer are what the model's template shows."""
        self._settings, self._catalogue, self._encoder = settings, catalogue, encoder
        self._table, self._links, self._quota, self._metrics = table, links, quota, metrics
        self._journal, self._facts_of = journal, facts_of
        self.streams = Streams(settings.resume_window)
        self._rules = RuleChecker()
        self._draws = random.SystemRandom()
        self._open_tokens = 0

    async def open(self, asked: Asked, *, draining: bool) -> tuple[Stream, Reading]:
        """The stream that answers a request, and a reader of it."""
        request, caller = asked.request, asked.caller
        if asked.seen is None:
            self._quota.check_pace(caller)
        model = self._catalogue.find(request.model, caller.caps)
        validation.validate(request, model, self._settings.max_prompt_bytes)
        caller.check_priority(request.priority)
        digest = await _digest(asked) if request.request_id or self._settings.resume_window else b""
        stream = await self.streams.find(caller.tenant, request.request_id) if request.request_id else None
        if stream is not None and (stream.opened.digest == digest or not stream.ended):
            return stream, self._attach(stream, digest, asked.seen)
        if draining:
            raise QuireError(Reason.DRAINING, "the gateway is shutting down")
        request_id = request.request_id or f"gen-{uuid.uuid4().hex}"
        with self.streams.begin(caller.tenant, request_id):
            if request.request_id and self._journal is not None and not asked.pooling:
                stream = await self._adopt(self._journal, asked, digest)
                if stream is not None:
                    return stream, self._attach(stream, digest, asked.seen)
            if asked.seen is not None:
                raise QuireError(Reason.NOT_FOUND, f"{FIELD}: request {request_id} is not kept any more", field=FIELD)
            stream = await self._begin(asked, model, request_id, digest)
            reading = stream.read()
        if self._journal is not None:
            try:
                await self._journal.begun(stream)  # meanwhile the scheduler has it
            except BaseException:
                stream.leave(reading)
                raise
        return stream, reading

    async def cancel(self, caller: Caller, request_id: str) -> None:
        """Ends a tenant's request that runs, whoever reads it, and at whatever gateway. NOT_FOUND where none does."""
        stream = await self.streams.find(caller.tenant, request_id)
        if stream is None and self._journal is not None:
            with self.streams.begin(caller.tenant, request_id):
                try:
                    record = await self._journal.read(caller.tenant, request_id)
                except StoreLost as error:
                    what = "request_id: streams of other gateways cannot be found: the store is lost"
                    raise QuireError(Reason.STORE_LOST, what, retry_after=1.0) from error
                if record is not None and not record_is_whole(*record):
                    stream = await self._take_over(self._journal, caller, *record, gateway_pb2.Chat())
        if stream is None or stream.ended:
            what = f"request_id: no request {request_id[:40]!r} is running"
            raise QuireError(Reason.NOT_FOUND, what, field="request_id")
        stream.cancel()

    def hand_over(self) -> None:
        """The gateway is about to end: what nobody reads goes on at another one, or ends."""
        for stream in self.streams:
            if self._journal is not None:
                stream.hand_over()
            elif not stream.is_read:
                stream.cancel()

    def stop(self) -> None:
        self._rules.stop()

    def _attach(self, stream: Stream, digest: bytes, seen: Sequence[Seen] | None) -> Reading:
        request_id = stream.request.request_id
        if digest != stream.opened.digest:
            raise _is_another(request_id)
        if not stream.can_begin_anew and seen is not None:
            what = f"{FIELD}: what request {request_id} began with is not kept"
            raise QuireError(Reason.NOT_FOUND, what, field=FIELD)
        if not stream.can_begin_anew:
            what = f"request_id: {request_id} is running, and its first log probabilities are not kept"
            raise QuireError(Reason.ALREADY_EXISTS, what, field="request_id")
        self._links.placing.counts["repeat" if seen is None else "resume"] += 1
        return stream.read(seen)

    async def _begin(self, asked: Asked, model: types_pb2.ModelDescription, request_id: str, digest: bytes) -> Stream:
        request, caller = asked.request, asked.caller
        self._links.check(model.name, request.priority)
        handle = self._table.claim(caller.tenant, request_id)
        grant = None
        try:
            loaded = await self._catalogue.tokenizer(model)
            facts = self._facts_of(loaded)
            chat_plan.check_template(request.chat, facts)
            prompt_ids = await opening.encode_prompt(request, model, loaded.tokenizer, self._encoder)
            plan = chat_plan.reading_of(request.chat, facts, loaded.tokenizer, prompt_ids)
            constraint = await self._rules.constraint_of(request, plan, loaded.special_texts)
            submit = opening.make_submit(request, caller, model, prompt_ids, constraint)
            submit.handle, submit.request_id, submit.pooling = handle, request_id, asked.pooling
            submit.keep_ms = round(1000 * self._settings.resume_window)
            if not submit.sampling.HasField("seed"):
                submit.sampling.seed = self._draws.getrandbits(63)
            self._check_room(len(prompt_ids))
            expected = 0 if asked.pooling else opening.expected_output(request, submit)
            grant = await self._quota.enter(caller, len(prompt_ids), expected)
            meter = RequestMeter(self._metrics, model.name, asked.arrived_at)
            one = opening.open_request(submit, model, meter, asked.arrived_at, asked.deadline_at)
            opened = opening.opened(
                one, loaded, request.keep_special_tokens, plan, meter, grant, int(time.time()), digest
            )
        except BaseException:
            if grant is not None:
                self._quota.settle(grant, 0)
            self._table.release(caller.tenant, request_id)
            raise
        stream = self._stream(opened)
        if self._journal is not None and not asked.pooling:  # a vector is made again
            self._journal.follow(stream, _head(opened))
        return stream

    async def _adopt(self, journal: SharedJournal, asked: Asked, digest: bytes) -> Stream | None:
        """The stream of another gateway, which goes on here; None where there is none."""
        caller, request_id = asked.caller, asked.request.request_id
        try:
            record = await journal.read(caller.tenant, request_id)
        except StoreLost as error:
            if asked.seen is None:
                return None  # where it runs, the scheduler refuses it
            what = f"{FIELD}: streams of other gateways cannot be found: the store is lost"
            raise QuireError(Reason.STORE_LOST, what, retry_after=1.0) from error
        if record is None:
            return None
        head, pieces = record
        is_other = head.input_digest != digest
        if is_other and record_is_whole(head, pieces):
            return None
        if is_other:
            raise _is_another(request_id)
        return await self._take_over(journal, caller, head, pieces, asked.request.chat)

    async def _take_over(
        self,
        journal: SharedJournal,
        caller: Caller,
        head: journal_pb2.JournalHead,
        pieces: list[journal_pb2.JournalPiece],
        chat: gateway_pb2.Chat,
    ) -> Stream:
        """Goes on with a stream of another gateway; `chat` says how its output is read."""
        request_id = head.submit.request_id
        loaded = await self._catalogue.tokenizer(head.model)
        now = asyncio.get_running_loop().time()
        deadline_at = now + head.deadline_ms / 1000 - time.time() if head.deadline_ms else None
        meter = RequestMeter(self._metrics, head.model.name, now)
        handle = self._table.claim(caller.tenant, request_id)
        try:

            def make(submit: scheduler_pb2.Submit) -> OpenRequest:
                submit.handle = handle
                return opening.open_request(submit, head.model, meter, now, deadline_at)

            request, written = replay(head, pieces, make)
            if request.started is not None and request.started.model not in ("", head.model.name):
                request.model = self._catalogue.find(request.started.model, caller.caps)
                request.template.model = request.model.name
            request.answered = any(choice.output for choice in request.choices)
            grant = self._quota.uncounted()  # the gateway that it came from has counted it
            plan = chat_plan.reading_of(chat, self._facts_of(loaded), loaded.tokenizer, request.prompt_ids)
            opened = opening.opened(
                request, loaded, head.keep_special_tokens, plan, meter, grant, head.created, head.input_digest
            )
        except BaseException:
            self._table.release(caller.tenant, request_id)
            raise
        self._links.placing.counts["adopted"] += 1
        if all(choice.end is not None for choice in request.choices):
            self._table.release(caller.tenant, request_id)
            stream = self._make(opened)
            stream.ended = stream.clean = True
            self.streams.add(stream)
            return stream
        stream = self._stream(opened)
        journal.follow(stream, head, written)
        return stream

    def _stream(self, opened: Opened) -> Stream:
        stream = self._make(opened)
        self._open_tokens += _size(opened.request)
        self.streams.add(stream)
        stream.start()
        return stream

    def _make(self, opened: Opened) -> Stream:
        return Stream(opened, self._links, self._table, self._quota, self._settings.resume_window, self._ended)

    def _ended(self, stream: Stream) -> None:
        self._open_tokens -= _size(stream.request)
        self.streams.end(stream, asyncio.get_running_loop().time())
        if self._journal is None:
            return
        error = stream.request.error
        if error is not None and error.reason in (Reason.TAKEN_OVER, Reason.DRAINING):  # it goes on elsewhere
            self._journal.let_go(stream)
        else:
            self._journal.end(stream, keeps=stream.clean)

    def _check_room(self, prompt_length: int) -> None:
        """QUEUE_FULL where the requests that are open would take more memory than is meant for them."""
        most = self._settings.max_open_tokens
        if self._open_tokens + max(LEAST_TOKENS, prompt_length) > most:
            self._links.placing.counts["open_tokens"] += 1
            what = f"the prompts of open requests fill what is meant for them: {most} tokens (max_open_tokens)"
            raise QuireError(Reason.QUEUE_FULL, what, retry_after=1.0)


def _is_another(request_id: str) -> QuireError:
    what = f"request_id: {request_id} is the id of another request, which runs"
    return QuireError(Reason.ALREADY_EXISTS, what, field="request_id")


def _size(request: OpenRequest) -> int:
    return max(LEAST_TOKENS, len(request.prompt_ids))


async def _digest(asked: Asked) -> bytes:
    """Of all that says what is asked for."""
    if asked.request.ByteSize() < LARGE_BYTES:
        return _digest_now(asked)
    return await asyncio.to_thread(_digest_now, asked)


def _digest_now(asked: Asked) -> bytes:
    plain = gateway_pb2.GenerationInput()
    plain.CopyFrom(asked.request)
    for field in ("request_id", "target_first_token_ms", "target_token_gap_ms"):  # what may differ when it is repeated
        plain.ClearField(field)
    return hashlib.sha256(bytes((asked.pooling,)) + plain.SerializeToString(deterministic=True)).digest()


def _head(opened: Opened) -> journal_pb2.JournalHead:
    request = opened.request
    left = None if request.deadline_at is None else request.deadline_at - asyncio.get_running_loop().time()
    head = journal_pb2.JournalHead(
        submit=request.template,
        model=request.model,
        input_digest=opened.digest,
        keep_special_tokens=opened.keep_special,
        created=opened.created,
        deadline_ms=0 if left is None else round(1000 * (time.time() + left)),
    )
    head.submit.handle = 0
    return head
