"""Binds this process to a NUMA node, threads and memory, and says aloud what the kernel refuses."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass

from services.common.topology import Gpu, Topology
from services.common.topology_sysfs import read_topology
from services.executor.gpus import cuda_devices, first_cuda_gpu
from services.executor.numa import Choice, PoolPlace, choose_node, cpu_pool_place, gpu_pool_place
from services.executor.numa_kernel import Kernel, Linux
from services.executor.settings import ExecutorSettings

log = logging.getLogger("quire.executor")


@dataclass(frozen=True, slots=True)
class Binding:
    """What became of a choice. Without a node, nothing was to be bound."""

    node: int | None
    threads: bool
    memory: bool


def bind_process(settings: ExecutorSettings) -> Binding:
    """Binds this process as its settings wish. Raises INVALID_FIELD for a node that it cannot compute on.

    Comes before any thread that computes and any memory of weights and KV.
    """
    topology = read_topology()
    return bind(choose_node(settings.numa_node, topology, gpu_in_use(settings)), topology, Linux())


def gpu_in_use(settings: ExecutorSettings) -> Gpu | None:
    """The GPU that computes where one does, as far as it is known before CUDA is asked."""
    return first_cuda_gpu(read_topology().gpus, cuda_devices(), os.environ) if may_use_gpu(settings) else None


def kv_place(device: str) -> PoolPlace:
    """Where the KV of a backend lies that computes on `device`, as the backend names it."""
    topology = read_topology()
    if device.startswith("cpu"):
        return cpu_pool_place(topology)
    return gpu_pool_place(first_cuda_gpu(topology.gpus, cuda_devices(), os.environ))


def may_use_gpu(settings: ExecutorSettings) -> bool:
    """Whether a GPU computes where there is one. Torch, which knows better, is imported when it is late to bind."""
    wanted = settings.backend != "cpu" and settings.instruction_set == "auto"
    return wanted and importlib.util.find_spec("torch") is not None


def bind(choice: Choice, topology: Topology, kernel: Kernel) -> Binding:
    """Carries a choice out as far as the kernel lets it."""
    node = choice.node
    if node is None:
        if len(topology.usable) > 1:
            log.info(
                "computing on all NUMA nodes",
                extra={
                    "nodes": [node.node_id for node in topology.usable],
                    "because": choice.why,
                    "hint": "memory stays near with --numa-node N, or `quire up --executors N` with one a node or more",
                },
            )
        return Binding(None, False, False)
    refused: list[str] = []
    threads = not choice.cpus or _try("threads", lambda: kernel.pin(choice.cpus), refused)
    memory = not choice.asks_memory or _try("memory", lambda: kernel.prefer(node), refused)
    if refused:
        log.warning("the kernel refuses to bind to the NUMA node", extra={"node": node, "what": "; ".join(refused)})
    elif choice.cpus or choice.asks_memory:
        log.info("bound to a NUMA node", extra={"node": node, "because": choice.why, "cpus": len(choice.cpus)})
    return Binding(node, threads, memory)


def _try(part: str, act: Callable[[], None], refused: list[str]) -> bool:
    try:
        act()
    except OSError as error:
        refused.append(f"{part}: {error.strerror}")
        return False
    return True
