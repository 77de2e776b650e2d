"""From a model's source to a backend that is ready to step: files, tokenizer bundle, weights, KV, warm-up."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from quire.v1 import types_pb2
from services.common.errors import QuireError, Reason
from services.common.kv_policy import KvPolicy
from services.common.sizes import format_size, parse_size
from services.executor.admission import ModelLimits
from services.executor.backends.base import Backend, KvShape
from services.executor.capacity import AUTO_SHARE, KvDemand, kv_shape, served_context
from services.executor.grammar.grammars import Grammars
from services.executor.grammar.vocabulary import Vocabulary
from services.executor.memory import measure
from services.executor.models.spec import ModelSpec
from services.executor.sampling_defaults import read_sampling
from services.executor.settings import ExecutorSettings
from services.executor.speculation.draft import DraftProposer
from services.executor.speculation.draft_model import DraftModel, LoadedDraft, load_draft
from services.executor.speculation.early_exit import EarlyExitProposer
from services.executor.speculation.proposer import Proposer
from services.executor.speculation.setting import DraftSetting, parse_draft
from services.executor.tiers.lower_tiers import LowerTiers, open_tiers
from services.executor.tiers.pools import NO_POOLS, PoolMap, device_pools

log = logging.getLogger("quire.executor")
MOST_MASK_THREADS = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory, its KV allocated."""

    name: str
    source: str
    backend: Backend
    shape: KvShape
    policy: KvPolicy
    fingerprint: str
    tokenizer_bundle: bytes
    tokenizer_fingerprint: str
    parameter_count: int
    loaded_at: int  # Unix seconds
    tiers: LowerTiers | None = None
    default_sampling: types_pb2.SamplingParams | None = None  # what the publisher says
    proposer: Proposer | None = None
    draft: DraftModel | None = None
    grammars: Grammars | None = None

    @property
    def limits(self) -> ModelLimits:
        spec = self.backend.spec
        return ModelLimits(
            vocab_size=spec.vocab_size,
            context_length=spec.context_length,
            eos_token_ids=spec.eos_token_ids,
            hidden_size=spec.hidden_size,
            block_size=self.shape.block_size,
            pool_starts=self.shape.pool_starts,
            pools=self.pools,
            draft_pools=self.draft_pools,
        )

    @property
    def served_context(self) -> int:
        """Tokens of prompt and output that a request may have: no more than its keys and values find room for."""
        return served_context(self.shape, self.policy, self.backend.spec.context_length)

    @property
    def pools(self) -> PoolMap:
        """Those of the device and of lower tiers."""
        return self.tiers.pools if self.tiers is not None else PoolMap(device_pools(self.shape, self.backend.kv_format))

    @property
    def draft_pools(self) -> PoolMap:
        """Of the draft model's cache group; empty without one."""
        return self.draft.pools(len(self.pools.pools)) if self.draft is not None else NO_POOLS

    def describe(self) -> dict[str, str]:
        """What computes and in which formats, for reports."""
        backend = self.backend
        return {
            "model": self.name,
            "backend": backend.name,
            "dtype": backend.dtype,
            "kv_format": backend.kv_format,
            "device": backend.device,
        }


Loader = Callable[[str, str], LoadedModel]
"""Loads (name, source); name "" takes the source's own. Runs in a thread of its own and raises QuireError."""


def make_loader(settings: ExecutorSettings) -> Loader:
    """The loader that an executor with these settings uses."""

    def load(name: str, source: str) -> LoadedModel:
        try:
            return _load(settings, name, source)
        except QuireError:
            raise
        except Exception as error:
            log.exception("loading failed", extra={"source": source})
            raise QuireError(Reason.MODEL_LOAD_FAILED, f"{source}: {type(error).__name__}: {error}") from error

    return load


def _load(settings: ExecutorSettings, name: str, source: str) -> LoadedModel:
    # Imported here, in the loading thread: a port must be open before all this is.
    from services.executor.backends.choose import load_backend
    from services.executor.models.source import default_name, resolve
    from services.executor.models.tokenizer_bundle import load_bundle
    from services.executor.models.weights import expected_shapes

    started = time.monotonic()
    path: Path = resolve(source, None)
    bundle = load_bundle(path)
    loaded = load_backend(path, settings)
    setting = parse_draft(settings.draft)
    drafting = load_draft(setting.model, settings, loaded.backend, bundle) if setting.model is not None else None
    shape = allocate(loaded.backend, settings, loaded.mapped_bytes, drafting)
    draft = drafting.allocate(shape.block_size, shape.block_count) if drafting is not None else None
    log.info("model loaded", extra={"source": source, "seconds": round(time.monotonic() - started, 2)})
    return LoadedModel(
        name=name or default_name(source) or source,
        source=source,
        backend=loaded.backend,
        shape=shape,
        policy=settings.kv_policy,
        tiers=open_tiers(settings, loaded.backend, shape, loaded.fingerprint),
        proposer=_proposer(setting, loaded.backend, draft, settings.max_step_tokens),
        draft=draft,
        fingerprint=loaded.fingerprint,
        tokenizer_bundle=bundle,
        tokenizer_fingerprint=hashlib.sha256(bundle).hexdigest(),
        parameter_count=sum(math.prod(part) for part in expected_shapes(loaded.backend.spec).values()),
        loaded_at=int(time.time()),
        default_sampling=read_sampling(path),
        grammars=_grammars(loaded.backend.spec, bundle),
    )


def _grammars(spec: ModelSpec, bundle: bytes) -> Grammars:
    threads = min(MOST_MASK_THREADS, max(1, len(os.sched_getaffinity(0)) // 4))
    return Grammars(
        lambda: Vocabulary.from_bundle(bundle, spec.vocab_size, spec.eos_token_ids), spec.vocab_size, threads
    )


def _proposer(setting: DraftSetting, backend: Backend, draft: DraftModel | None, step_tokens: int) -> Proposer | None:
    if draft is not None:
        return DraftProposer(draft.backend, draft.cache, draft.source, step_tokens)
    if setting.early_exit:
        try:
            return EarlyExitProposer(backend, setting.layers)
        except ValueError as error:
            raise QuireError(Reason.MODEL_LOAD_FAILED, f"draft: {error}") from None
    if not setting.ngram:
        return None
    try:
        from services.executor.speculation.ngram import NgramProposer
    except ImportError as error:
        what = f"draft: prompt lookup is native code, which cannot be loaded ({error}); `make native` compiles it"
        raise QuireError(Reason.MODEL_LOAD_FAILED, what) from None
    return NgramProposer(backend)


def allocate(
    backend: Backend, settings: ExecutorSettings, mapped_bytes: int, drafting: LoadedDraft | None = None
) -> KvShape:
    """Sizes the pools by what is free now that the weights are in memory, and makes them.

    Each block of the target has one of the draft model beside it, which the caller makes.
    Mapped weights lie in the page cache, which counts as free; but they are read in every step and must stay.
    """
    memory = measure()
    mapped_bytes += drafting.mapped_bytes if drafting is not None else 0
    of_device = backend.device_memory()
    available = max(memory.available - mapped_bytes, 0) if of_device is None else of_device
    policy, size = settings.kv_policy, settings.block_size
    demand = KvDemand(
        block_size=size,
        max_sequences=settings.max_sequences,
        context_length=backend.spec.context_length,
        memory=None if settings.kv_memory == "auto" else parse_size(settings.kv_memory),
        blocks=settings.kv_blocks,
        policy=policy,
        share=AUTO_SHARE if of_device is None else 1,
    )
    own_bytes = backend.kv_block_bytes(size)
    hot_bytes = own_bytes + (drafting.backend.kv_block_bytes(size) if drafting is not None else 0)
    colder_bytes = (backend.kv_block_bytes(size, age.format) for age in policy.colder)
    shape = kv_shape(demand, [hot_bytes, *colder_bytes], available)
    if shape.byte_count > available:
        raise QuireError(
            Reason.MODEL_LOAD_FAILED,
            f"kv_blocks: {demand.blocks} take {format_size(shape.byte_count)}, {format_size(available)} are free",
        )
    whole_bytes = shape.byte_count
    shape = replace(shape, block_bytes=own_bytes)
    backend.allocate_kv(shape)
    served = served_context(shape, policy, demand.context_length)
    if served < demand.context_length and demand.blocks is None:  # else somebody wanted no more
        log.warning("KV memory bounds the context", extra={"context": served, "of_the_model": demand.context_length})
    log.info(
        "KV allocated",
        extra={
            "blocks": shape.pool_starts[-1],
            "tokens": shape.pool_starts[-1] * size,
            "mib": whole_bytes >> 20,
            "context": served,
            "policy": str(policy) or "hot",
            "free_mib": available >> 20,
            "bound_by": memory.bound if of_device is None else "device",
            "nodes": memory.nodes,
        },
    )
    return shape
