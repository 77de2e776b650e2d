"""The models that can be asked for, and their tokenizers: fetched by fingerprint, verified, loaded in threads."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc

from quire.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from services.common.errors import QuireError, Reason, from_rpc_error
from services.gateway.encoding import Encoder
from services.gateway.quota.limits import Caps
from services.gateway.tokenizer import ModelTokenizer

log = logging.getLogger("quire.gateway.models")
MAX_BUNDLE_BYTES = 256 << 20
TOKENIZER_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class LoadedTokenizer:
    """A tokenizer with what is derived from it once."""

    tokenizer: ModelTokenizer
    special_texts: frozenset[str]


class ModelCatalogue:
    """Owns the list of models and one tokenizer per fingerprint."""

    def __init__(
        self, stub_with: Callable[[str], scheduler_pb2_grpc.SchedulerServiceAsyncStub], encoder: Encoder
    ) -> None:
        """`stub_with` returns a scheduler that has the tokenizer with a fingerprint."""
        self._stub_with, self._encoder = stub_with, encoder
        self._models: dict[str, types_pb2.ModelDescription] = {}
        self._tokenizers: dict[str, asyncio.Task[LoadedTokenizer]] = {}
        self.known = False  # whether a scheduler ever told its models

    def update(self, models: list[types_pb2.ModelDescription]) -> None:
        """Takes the present list over, begins to fetch new tokenizers and forgets those of models that are gone."""
        self.known = True
        self._models = {model.name: model for model in sorted(models, key=lambda m: m.name)}
        present = {model.tokenizer_fingerprint for model in models}
        for fingerprint in self._tokenizers.keys() - present:
            del self._tokenizers[fingerprint]
        for fingerprint in present:
            self._loading(fingerprint)

    @property
    def models(self) -> list[types_pb2.ModelDescription]:
        return list(self._models.values())

    def find(self, name: str, caps: Caps) -> types_pb2.ModelDescription:
        """The model of that name; the only one where the name is empty. MODEL_NOT_FOUND, SCHEDULER_LOST.

        To a caller who may not ask for a model it does not exist.
        """
        if not self.known:
            raise QuireError(Reason.SCHEDULER_LOST, "no scheduler has answered yet")
        allowed = [model for model in self._models.values() if caps.allows(model.name)]
        if not name and len(loaded := [model for model in allowed if not model.members]) == 1:
            return loaded[0]
        model = next((model for model in allowed if model.name == name), None)
        if model is None:
            names = ", ".join(model.name for model in allowed) or "none"
            what = f"model {name!r} is not loaded" if name else "model: must be named unless exactly one is loaded"
            raise QuireError(Reason.MODEL_NOT_FOUND, f"{what}; models: {names}", field="model")
        return model

    async def tokenizer(self, model: types_pb2.ModelDescription) -> LoadedTokenizer:
        """The model's tokenizer, waiting for it where it is still being fetched."""
        return await asyncio.shield(self._loading(model.tokenizer_fingerprint))

    def _loading(self, fingerprint: str) -> asyncio.Task[LoadedTokenizer]:
        task = self._tokenizers.get(fingerprint)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._load(fingerprint), name="load-tokenizer")
            task.add_done_callback(_log_failure)
            self._tokenizers[fingerprint] = task
        return task

    async def bundle(self, fingerprint: str) -> AsyncIterator[bytes]:
        """A tokenizer's zip in pieces, as an executor has it: hex SHA-256 of the whole is the fingerprint."""
        try:
            request = scheduler_pb2.GetTokenizerRequest(tokenizer_fingerprint=fingerprint)
            async for piece in self._stub_with(fingerprint).GetTokenizer(request, timeout=TOKENIZER_SECONDS):
                yield piece.data
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, Reason.SCHEDULER_LOST) from error

    async def _load(self, fingerprint: str) -> LoadedTokenizer:
        data = bytearray()
        async for piece in self.bundle(fingerprint):
            data += piece
            if len(data) > MAX_BUNDLE_BYTES:
                raise QuireError(Reason.TOO_LARGE, f"tokenizer {fingerprint} exceeds {MAX_BUNDLE_BYTES} bytes")
        loaded = await self._encoder.run_large(lambda: _unpack(fingerprint, bytes(data)))
        log.info("tokenizer loaded", extra={"fingerprint": fingerprint[:12], "bytes": len(data)})
        return loaded

    async def stop(self) -> None:
        """Ends fetches that still run."""
        for task in self._tokenizers.values():
            task.cancel()
        if self._tokenizers:
            await asyncio.wait(self._tokenizers.values())


def _unpack(fingerprint: str, data: bytes) -> LoadedTokenizer:
    found = hashlib.sha256(data).hexdigest()
    if found != fingerprint:
        raise QuireError(Reason.PROTOCOL, f"tokenizer bundle {fingerprint} arrived as {found}")
    tokenizer = ModelTokenizer.from_bundle(data)
    texts = (tokenizer.decode([token], skip_special=False) for token in tokenizer.special_ids)
    return LoadedTokenizer(tokenizer, frozenset(text for text in texts if text))


def _log_failure(task: asyncio.Task[LoadedTokenizer]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("tokenizer could not be loaded", extra={"error": str(error)})
