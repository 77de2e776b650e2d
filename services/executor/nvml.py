"""What the driver says of the GPU, asked at each scrape: memory, temperature, what slows it down, its NUMA node.

Through NVML's Python binding (nvidia-ml-py) where it is installed; without it there are no such metrics.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from typing import Any, Protocol

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.common.topology import Gpu

log = logging.getLogger("quire.executor")

REASONS = {
    "power_cap": 0x4,
    "hardware": 0x8,
    "software_thermal": 0x20,
    "hardware_thermal": 0x40,
    "power_brake": 0x80,
}
"""Bits of NVML's reasons for lower clocks, those that are no wish of anybody's."""


class Nvml(Protocol):
    """Of NVML's binding, what is used; errors are its `NVMLError`."""

    NVMLError: type[Exception]
    NVML_TEMPERATURE_GPU: int

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> Any: ...
    def nvmlDeviceGetName(self, handle: Any) -> str | bytes: ...
    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> Any: ...
    def nvmlDeviceGetTemperature(self, handle: Any, sensor: int) -> int: ...
    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: Any) -> int: ...


class GpuMetrics(Collector):
    """Of one GPU. What the driver does not tell is left out."""

    def __init__(self, nvml: Nvml, handle: Any, gpu: Gpu) -> None:
        self._nvml, self._handle, self._gpu = nvml, handle, gpu

    def collect(self) -> Iterator[GaugeMetricFamily]:
        nvml, handle = self._nvml, self._handle
        try:
            name = nvml.nvmlDeviceGetName(handle)
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            temperature = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        except nvml.NVMLError as error:
            log.warning("the driver does not answer about the GPU", extra={"error": str(error)})
            return
        about = GaugeMetricFamily(
            "quire_executor_gpu", "The GPU that computes", labels=["name", "address", "numa_node"]
        )
        node = "" if self._gpu.node is None else str(self._gpu.node)
        about.add_metric([name.decode() if isinstance(name, bytes) else name, self._gpu.address, node], 1)
        yield about
        bytes_ = GaugeMetricFamily("quire_executor_gpu_memory_bytes", "Memory of the GPU", labels=["kind"])
        bytes_.add_metric(["total"], memory.total)
        bytes_.add_metric(["used"], memory.used)
        yield bytes_
        yield GaugeMetricFamily("quire_executor_gpu_temperature_celsius", "Temperature of the GPU", temperature)
        slowed = GaugeMetricFamily("quire_executor_gpu_throttled", "1 where this lowers its clocks", labels=["reason"])
        for reason, bit in REASONS.items():
            slowed.add_metric([reason], int(bool(reasons & bit)))
        yield slowed


def register_gpu(registry: CollectorRegistry, gpu: Gpu, nvml: Nvml | None) -> bool:
    """Adds the GPU's metrics; False, with a line that says why, where there can be none."""
    if nvml is None:
        log.info("no metrics of the GPU: NVML's binding is not installed (pip install nvidia-ml-py)")
        return False
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByPciBusId(gpu.address.encode())
    except nvml.NVMLError as error:
        log.warning("no metrics of the GPU", extra={"gpu": gpu.address, "error": str(error)})
        return False
    registry.register(GpuMetrics(nvml, handle, gpu))
    return True


def find_nvml() -> Nvml | None:
    """The binding, where it is installed."""
    try:
        found: Nvml = importlib.import_module("pynvml")
    except ImportError:
        return None
    return found
