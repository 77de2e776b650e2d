"""The executor's process: settings, server, engine, health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from quire.v1 import executor_pb2, executor_pb2_grpc
from services.common.errors import QuireError
from services.common.rpc import Server, channel
from services.common.startup import begin
from services.executor.batch import StepLimits
from services.executor.engine import Engine
from services.executor.kv_link import KvLink
from services.executor.loader import make_loader
from services.executor.metrics import ExecutorMetrics
from services.executor.numa_binding import Binding, bind_process, gpu_in_use
from services.executor.nvml import find_nvml, register_gpu
from services.executor.servicer import ExecutorServicer
from services.executor.settings import ExecutorSettings
from services.executor.watchdog import watch

log = logging.getLogger("quire.executor")


def main(argv: Sequence[str]) -> int:
    """Runs an executor until a signal; 2 (refused settings) where the model or the NUMA node given cannot be had."""
    settings = begin(ExecutorSettings, "executor", argv)
    try:
        binding = bind_process(settings)
    except QuireError as error:
        log.error("%s", error.message)
        return 2
    return asyncio.run(serve(settings, binding))


async def serve(settings: ExecutorSettings, binding: Binding) -> int:
    registry = CollectorRegistry()
    server = Server(settings, [executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"]], registry)
    link = KvLink((lambda: channel(settings.kvmanager, settings)) if settings.kvmanager else None)
    limits = StepLimits(settings.max_sequences, settings.max_step_tokens)
    metrics = ExecutorMetrics(registry)
    if binding.node is not None:
        metrics.numa_bound(binding.node, binding.threads, binding.memory)
    if (gpu := gpu_in_use(settings)) is not None:
        register_gpu(registry, gpu, find_nvml())
    engine = Engine(limits, make_loader(settings), link, metrics, server.set_ready)
    executor_pb2_grpc.add_ExecutorServiceServicer_to_server(ExecutorServicer(engine), server.grpc)
    await server.start()
    engine.start()
    watching = asyncio.create_task(watch(engine, settings.step_timeout_seconds, server))
    running = asyncio.create_task(server.run_until_signal(lambda: engine.drain(settings.drain_seconds)))
    try:
        if settings.model is not None and not await _load_at_start(engine, settings, running):
            return 2
        await running
        return 0
    finally:
        watching.cancel()
        running.cancel()
        await engine.stop()
        await server.grpc.stop(0)


async def _load_at_start(engine: Engine, settings: ExecutorSettings, running: asyncio.Task[None]) -> bool:
    """Loads the model given at start, unless a signal comes first; False, with a clear line, where that fails."""
    started = time.monotonic()
    loading = asyncio.create_task(engine.load(settings.model_name or "", settings.model or ""))
    await asyncio.wait({loading, running}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        return True
    try:
        loading.result()
    except QuireError as error:
        log.error("cannot serve %s: %s", settings.model, error.message)
        return False
    description = engine.description
    log.info(
        "serving",
        extra={
            "model": description.model.name,
            "backend": description.backend,
            "dtype": description.dtype,
            "seconds": round(time.monotonic() - started, 2),
            "decode_ms": round(description.decode_step_seconds * 1e3, 2),
            "prefill_tok_s": round(description.prefill_tokens_per_second),
        },
    )
    return True
