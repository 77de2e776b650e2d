"""Which backend computes a model: the one asked for, else the cpu backend where it can, else torch."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.common.topology_sysfs import read_topology
from services.executor.backends.base import Backend
from services.executor.gpus import cuda_devices
from services.executor.memory import measure
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.weights import Checkpoint, file_digest, fingerprint, load_failed
from services.executor.settings import ExecutorSettings

log = logging.getLogger("quire.executor")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A backend with its weights, and what only loading knows."""

    backend: Backend
    fingerprint: str
    mapped_bytes: int  # weights in the page cache, which the system counts as free memory


def load_backend(path: Path, settings: ExecutorSettings, beside: Backend | None = None) -> Loaded:
    """Loads a model folder or .gguf file; shares threads with the backend `beside`.

    Raises MODEL_LOAD_FAILED, and INVALID_FIELD for the context length.
    """
    checkpoint = open_checkpoint(path)
    threads = settings.threads or len(os.sched_getaffinity(0))
    if settings.backend == "cuda":
        return _load_cuda(checkpoint, settings, threads)
    if not uses_cpu_backend(settings, _cpu_refusal, lambda: bool(cuda_devices()) and _torch_has_cuda()):
        return _load_torch(checkpoint, settings, threads)
    return _load_cpu(checkpoint, settings, threads, beside)


def uses_cpu_backend(
    settings: ExecutorSettings, refusal: Callable[[ExecutorSettings], str | None], has_cuda: Callable[[], bool]
) -> bool:
    """Whether the cpu backend is to compute, else torch. `refusal` says why it cannot, `has_cuda` whether torch could
    use a GPU; each is asked only where it matters. Raises MODEL_LOAD_FAILED for a wish that cannot be met.
    """
    if settings.backend == "torch":
        if settings.instruction_set != "auto":
            raise load_failed("instruction_set: the torch backend has none to choose from")
        return False
    asked_for = settings.backend == "cpu" or settings.instruction_set != "auto"
    reason = refusal(settings)
    if reason is not None and asked_for:
        raise load_failed(f"the cpu backend cannot serve this: {reason}")
    if reason is None and not asked_for and has_cuda():
        log.info("computing with torch: there is a CUDA device")
        return False
    if reason is not None:
        log.warning("computing with torch, not with the cpu backend", extra={"because": reason})
    return reason is None


def _torch_has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


def _cpu_refusal(settings: ExecutorSettings) -> str | None:
    try:
        from kernels import _native
    except ImportError as error:
        return f"the native kernels cannot be loaded ({error}); `make native` compiles them"
    from services.executor.backends.cpu.support import refusal

    return refusal(settings, _native.instruction_sets())


def _load_cpu(checkpoint: Checkpoint, settings: ExecutorSettings, threads: int, beside: Backend | None) -> Loaded:
    from services.executor.backends.cpu.backend import CpuBackend

    limit = _own_memory_limit()
    backend = CpuBackend.load(
        checkpoint,
        dtype=settings.dtype,
        kv_format=settings.kv_format,
        instruction_set=settings.instruction_set,
        context_length=settings.context_length,
        threads=threads,
        own_memory_limit=limit,
        pool=beside.pool if isinstance(beside, CpuBackend) else None,
    )
    weights = backend.weights
    if limit and weights.mapped_bytes:
        log.warning(
            "no room for a copy of the weights; they may lie on another NUMA node",
            extra={"mib": weights.mapped_bytes >> 20, "limit_mib": limit >> 20},
        )
    digests = map(bytes.fromhex, weights.source_digests)
    return Loaded(backend, fingerprint(digests, checkpoint.spec, backend.numerics), weights.mapped_bytes)


def _own_memory_limit() -> int:
    """Bytes of weights that may be copied from the page cache: half of what is free, but none without need.

    A mapped file's pages lie on the NUMA node that first read them, whatever the policy of later readers. An executor
    on one node of several would read them from another.
    """
    return measure().available // 2 if read_topology().is_confined else 0


def _load_cuda(checkpoint: Checkpoint, settings: ExecutorSettings, threads: int) -> Loaded:
    from services.executor.backends.cuda.support import MOST_QUERIES, refusal

    if (reason := refusal(settings)) is not None:
        raise load_failed(f"the cuda backend cannot serve this: {reason}")
    import torch

    from services.executor.backends.cuda.backend import StepSizes
    from services.executor.backends.cuda.device import find_device
    from services.executor.backends.cuda.load import load_backend as load

    torch.set_num_threads(threads)
    device = find_device()
    assert device is not None, "refusal() found one"
    queries = 1 if settings.draft == "none" else MOST_QUERIES
    backend = load(
        checkpoint,
        device,
        dtype=settings.dtype,
        kv_format=settings.kv_format,
        context_length=settings.context_length,
        sizes=StepSizes(settings.max_sequences, settings.max_step_tokens, queries),
        fixed_splits=settings.deterministic,
    )
    digests = map(file_digest, checkpoint.files())
    return Loaded(backend, fingerprint(digests, checkpoint.spec, backend.numerics), 0)


def _load_torch(checkpoint: Checkpoint, settings: ExecutorSettings, threads: int) -> Loaded:
    if importlib.util.find_spec("torch") is None:
        raise load_failed("the torch backend needs PyTorch, which is not installed (pip install 'quire-llm[torch]')")
    if settings.deterministic:
        raise load_failed("deterministic: the torch backend does not promise it; cpu and cuda do")
    from services.executor.openmp import yield_soon

    yield_soon()
    from services.executor.backends.torch_backend import TorchBackend

    backend = TorchBackend.load(
        checkpoint, dtype=settings.dtype, threads=threads, context_length=settings.context_length
    )
    if settings.kv_format not in ("auto", backend.kv_format):
        raise load_failed(
            f"kv_format: the torch backend keeps keys and values as {backend.kv_format}, like its weights"
        )
    digests = map(file_digest, checkpoint.files())
    return Loaded(backend, fingerprint(digests, checkpoint.spec, backend.numerics), 0)
