"""Embeddings as OpenAI writes them."""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, cast

from quire.v1.gateway_pb2 import EmbedRequest, TokenIds
from quire.v1.types_pb2 import ModelDescription, Pooling
from services.gateway.embedding import Vector
from services.gateway.http.errors import bad_request
from services.gateway.http.schemas import EmbeddingRequest

AT_ONCE = 16
"""Inputs of one request that are computed side by side."""

NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {"text": "input", "token_ids": "input", "token_ids.ids": "input", "prompt": "input", "request_id": "x-request-id"}
)

_POOLINGS: Final = {None: Pooling.POOLING_UNSPECIFIED, "last": Pooling.POOLING_LAST, "mean": Pooling.POOLING_MEAN}


def requests_of(body: EmbeddingRequest, request_id: str) -> list[EmbedRequest]:
    """One for each input."""
    inputs = body.input
    is_one = isinstance(inputs, str) or isinstance(inputs[0], int)
    several = cast("list[str | list[int]]", [inputs] if is_one else inputs)
    requests = []
    for index, one in enumerate(several):
        request = EmbedRequest(
            model=body.model,
            pooling=_POOLINGS[body.pooling],
            priority=body.priority or 0,
            request_id=request_id if len(several) == 1 else f"{request_id}-{index}",
        )
        if isinstance(one, str):
            request.text = one
        else:
            request.token_ids.CopyFrom(TokenIds(ids=one))
        requests.append(request)
    return requests


def check_dimensions(body: EmbeddingRequest, model: ModelDescription) -> None:
    """HttpError for any other number of values than the model has."""
    if body.dimensions is not None and body.dimensions != model.embedding_size:
        raise bad_request("dimensions", f"must be {model.embedding_size}, which {model.name} has, or left out")


async def embed_all(
    requests: Sequence[EmbedRequest], embed: Callable[[EmbedRequest], Awaitable[Vector]]
) -> list[Vector]:
    """The vectors in order; the first failure ends them all."""
    found: dict[int, Vector] = {}
    left = iter(enumerate(requests))

    async def work() -> None:
        for index, request in left:
            found[index] = await embed(request)

    workers = [asyncio.create_task(work()) for _ in range(min(AT_ONCE, len(requests)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [found[index] for index in range(len(requests))]


def render(body: EmbeddingRequest, vectors: Sequence[Vector]) -> dict[str, Any]:
    """The answer."""
    tokens = sum(vector.prompt_tokens for vector in vectors)
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _values(body, vector)}
            for index, vector in enumerate(vectors)
        ],
        "model": vectors[0].model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _values(body: EmbeddingRequest, vector: Vector) -> list[float] | str:
    if body.encoding_format == "base64":
        return base64.b64encode(struct.pack(f"<{len(vector.values)}f", *vector.values)).decode()
    return list(vector.values)
