"""A scheduler that does what a test tells it, on a real gRPC server."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from quire.v1 import kvmanager_pb2, scheduler_pb2, scheduler_pb2_grpc, scheduler_status_pb2, types_pb2
from services.common.errors import ErrorInterceptor, QuireError, Reason
from services.common.rpc import OPTIONS
from tests.fixtures.vocabularies import BOS, BOS_ID, CHAT_TEMPLATE, EOS, Vocabulary, byte_level

STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH


def make_bundle(vocabulary: Vocabulary, **config: Any) -> bytes:
    """A tokenizer bundle of a hand-made vocabulary."""
    settings = {"chat_template": CHAT_TEMPLATE, "bos_token": BOS, "eos_token": EOS, "add_bos": True} | config
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as bundle:
        # Without the present time, so that bundles of one vocabulary are the same.
        bundle.writestr(zipfile.ZipInfo("tokenizer.json"), vocabulary.to_json())
        bundle.writestr(zipfile.ZipInfo("tokenizer_config.json"), json.dumps(settings))
    return buffer.getvalue()


class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Records what the gateway says, in lists, and says what the test wants."""

    def __init__(
        self,
        target: str,
        extra: Sequence[bytes | str] = (),
        context_length: int = 512,
        template: str = CHAT_TEMPLATE,
    ) -> None:
        self.target = target
        vocabulary = byte_level(extra)
        self.bundle = make_bundle(vocabulary, chat_template=template)
        self.model = types_pb2.ModelDescription(
            name="m",
            fingerprint="f" * 64,
            tokenizer_fingerprint=hashlib.sha256(self.bundle).hexdigest(),
            context_length=context_length,
            vocab_size=vocabulary.size + 4,  # rows of the output layer beyond the tokenizer's
            eos_token_ids=vocabulary.eos_ids,
            bos_token_id=BOS_ID,
            embedding_size=4,
        )
        self.models = [self.model]
        self.hellos: list[str] = []
        self.submits: list[scheduler_pb2.Submit] = []
        self.attaches: list[scheduler_pb2.Attach] = []
        self.stops: list[scheduler_pb2.StopAt] = []
        self.holds: list[scheduler_pb2.Hold] = []
        self.cancels: list[int] = []
        self.executor_changes: list[scheduler_pb2.ManageExecutorRequest] = []
        self.kv_events: list[kvmanager_pb2.SubscribeEventsResponse] = []
        self.bundles_served = 0
        self._heard = asyncio.Condition()
        self._context: Any = None
        self._sources: list[tuple[Any, Any]] = []  # of submits and attaches: who sent which
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor()], options=OPTIONS)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.target)
        await self._server.start()

    async def stop(self) -> None:
        assert self._server is not None
        await self._server.stop(0)
        self._context = None

    async def Serve(self, requests: AsyncIterator[scheduler_pb2.ServeRequest], context: Any) -> None:  # type: ignore[override]
        self._context = context
        first = True
        async for message in requests:
            if first:
                self.hellos.append(message.gateway_id)
                await self.tell_models()
                first = False
            async with self._heard:
                self.submits += message.submits
                self.attaches += message.attaches
                self._sources += [(one, context) for one in (*message.submits, *message.attaches)]
                self.stops += message.stops
                self.holds += message.holds
                self.cancels += [cancel.handle for cancel in message.cancels]
                self._heard.notify_all()

    async def GetTokenizer(  # type: ignore[override]
        self, request: scheduler_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.GetTokenizerResponse]:
        if request.tokenizer_fingerprint != self.model.tokenizer_fingerprint:
            raise QuireError(Reason.NOT_FOUND, "no such tokenizer")
        self.bundles_served += 1
        for at in range(0, len(self.bundle), 4096):
            yield scheduler_pb2.GetTokenizerResponse(data=self.bundle[at : at + 4096])

    async def FollowKvEvents(  # type: ignore[override]
        self, request: scheduler_pb2.FollowKvEventsRequest, context: Any
    ) -> AsyncIterator[scheduler_pb2.FollowKvEventsResponse]:
        for events in self.kv_events:
            if events.sequence_number >= request.start_sequence_number:
                yield scheduler_pb2.FollowKvEventsResponse(events=events)

    async def GetSchedulerStatus(  # type: ignore[override]
        self, request: scheduler_status_pb2.GetSchedulerStatusRequest, context: Any
    ) -> scheduler_status_pb2.GetSchedulerStatusResponse:
        return scheduler_status_pb2.GetSchedulerStatusResponse(running_count=3)

    async def ManageModel(  # type: ignore[override]
        self, request: scheduler_pb2.ManageModelRequest, context: Any
    ) -> scheduler_pb2.ManageModelResponse:
        if request.source == "none":
            raise QuireError(Reason.MODEL_LOAD_FAILED, "no such folder")
        return scheduler_pb2.ManageModelResponse(models=self.models)

    async def ManageExecutor(  # type: ignore[override]
        self, request: scheduler_pb2.ManageExecutorRequest, context: Any
    ) -> scheduler_pb2.ManageExecutorResponse:
        self.executor_changes.append(request)
        if request.target.startswith("nowhere"):
            raise QuireError(Reason.NOT_FOUND, "no such executor")
        return scheduler_pb2.ManageExecutorResponse(
            executors=[scheduler_status_pb2.ExecutorStatus(target=request.target)]
        )

    # What a test says and waits for.

    def turn_to(self, sent: Any) -> None:
        """What is said from now on is said to the gateway that sent this, where there are several."""
        self._context = next(context for one, context in self._sources if one is sent)

    async def say(self, **fields: Any) -> None:
        await self._context.write(scheduler_pb2.ServeResponse(**fields))

    async def tell_models(self) -> None:
        await self.say(models_changed=True, models=self.models)

    async def heard(self, what: list[Any], count: int = 1) -> Any:
        """Waits until `what` (one of the lists) has that many entries; returns the last."""
        async with self._heard:
            await asyncio.wait_for(self._heard.wait_for(lambda: len(what) >= count), 30)
        return what[count - 1]

    async def started(self, submit: scheduler_pb2.Submit, cached: int = 0) -> None:
        await self.say(started=[scheduler_pb2.RequestStarted(handle=submit.handle, cached_tokens=cached)])

    async def tokens(
        self,
        submit: scheduler_pb2.Submit,
        ids: Sequence[int],
        position: int = 0,
        choice: int = 0,
        end: types_pb2.FinishReason.ValueType | None = None,
        **fields: Any,
    ) -> None:
        """Tokens of one choice, and its end where `end` is given; a stop token is the last of the ids."""
        if end is not None:
            ended = scheduler_pb2.ChoiceEnd(handle=submit.handle, choice=choice, reason=end)
            if end == STOP:
                ended.stop_token_id = ids[-1]
            fields["ended"] = [ended]
        await self.say(
            handles=[submit.handle],
            choices=[choice],
            positions=[position],
            token_counts=[len(ids)],
            token_ids=ids,
            **fields,
        )

    async def vector(self, submit: scheduler_pb2.Submit, values: Sequence[float]) -> None:
        """The prompt's vector, and the end."""
        await self.say(
            embeddings=[scheduler_pb2.Embedding(handle=submit.handle, values=values)],
            ended=[scheduler_pb2.ChoiceEnd(handle=submit.handle, reason=STOP)],
        )

    async def fail(self, submit: scheduler_pb2.Submit, reason: Reason, choice: int = 0) -> None:
        error = QuireError(reason, "it broke").to_detail()
        await self.say(
            ended=[
                scheduler_pb2.ChoiceEnd(
                    handle=submit.handle, choice=choice, reason=types_pb2.FINISH_REASON_ERROR, error=error
                )
            ]
        )
