"""A draft model beside its target: loaded with the same settings, refused where it speaks another vocabulary."""

from __future__ import annotations

import io
import json
import zipfile
from dataclasses import dataclass
from typing import Any

from services.common.errors import QuireError, Reason
from services.executor.backends.base import Backend, KvShape
from services.executor.settings import ExecutorSettings
from services.executor.speculation.draft_cache import DraftCache
from services.executor.tiers.pools import PoolMap, device_pools


@dataclass(frozen=True, slots=True)
class DraftModel:
    """In memory, its KV allocated: as many blocks as the target has."""

    backend: Backend
    shape: KvShape
    cache: DraftCache
    source: str

    def pools(self, first_pool_id: int) -> PoolMap:
        """Its one pool; ids of pools are unique over all cache groups."""
        return PoolMap(device_pools(self.shape, self.backend.kv_format, first_pool_id))


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model without KV yet."""

    backend: Backend
    mapped_bytes: int
    source: str

    def allocate(self, block_size: int, block_count: int) -> DraftModel:
        shape = KvShape(block_size, self.backend.kv_block_bytes(block_size), block_count)
        self.backend.allocate_kv(shape)
        return DraftModel(self.backend, shape, DraftCache(block_size, block_count), self.source)


def load_draft(source: str, settings: ExecutorSettings, target: Backend, bundle: bytes) -> LoadedDraft:
    """Loads a draft model for `target`, whose tokenizer bundle is given. Raises MODEL_LOAD_FAILED."""
    from services.executor.backends.choose import load_backend
    from services.executor.models.source import resolve
    from services.executor.models.tokenizer_bundle import load_bundle

    path = resolve(source, None)
    if _vocabulary(load_bundle(path)) != _vocabulary(bundle):
        raise QuireError(Reason.MODEL_LOAD_FAILED, f"draft: {source} has another vocabulary than the model")
    # Its context may be shorter: past it, sequences decode without drafts.
    loaded = load_backend(path, settings.model_copy(update={"context_length": None}), target)
    if (own := loaded.backend.spec.vocab_size) != (wanted := target.spec.vocab_size):
        raise QuireError(
            Reason.MODEL_LOAD_FAILED, f"draft: {source} has a vocabulary of {own} tokens, the model one of {wanted}"
        )
    return LoadedDraft(loaded.backend, loaded.mapped_bytes, source)


def _vocabulary(bundle: bytes) -> tuple[Any, Any]:
    """What the ids of a tokenizer stand for."""
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        tokenizer = json.loads(files.read("tokenizer.json"))
    added = sorted((token["id"], token["content"]) for token in tokenizer.get("added_tokens", []))
    return tokenizer["model"]["vocab"], added
