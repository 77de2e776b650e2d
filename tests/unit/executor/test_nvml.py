"""Metrics of a GPU, as a driver would tell them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from services.common.topology import Gpu
from services.executor.nvml import register_gpu

GPU = Gpu("0000:17:00.0", "nvidia", "0x2335", 1)


class Driver:
    """NVML of one card."""

    NVMLError = LookupError
    NVML_TEMPERATURE_GPU = 0

    def __init__(self, address: str = GPU.address) -> None:
        self.address, self.answers = address.encode(), True

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByPciBusId(self, address: bytes) -> bytes:
        if address != self.address:
            raise LookupError("Not Found")
        return address

    def nvmlDeviceGetName(self, handle: bytes) -> str:
        return "NVIDIA H200"

    def nvmlDeviceGetMemoryInfo(self, handle: bytes) -> SimpleNamespace:
        if not self.answers:
            raise LookupError("GPU is lost")
        return SimpleNamespace(total=1000, used=300)

    def nvmlDeviceGetTemperature(self, handle: bytes, sensor: int) -> int:
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: bytes) -> int:
        return 0x40 | 0x1  # hot; and idle, which is nobody's complaint


def test_what_the_driver_says_is_scraped() -> None:
    registry, driver = CollectorRegistry(), Driver()
    assert register_gpu(registry, GPU, driver)
    text = generate_latest(registry).decode()
    assert 'quire_executor_gpu{address="0000:17:00.0",name="NVIDIA H200",numa_node="1"} 1.0' in text
    assert 'quire_executor_gpu_memory_bytes{kind="used"} 300.0' in text
    assert "quire_executor_gpu_temperature_celsius 41.0" in text
    assert 'quire_executor_gpu_throttled{reason="hardware_thermal"} 1.0' in text
    assert 'quire_executor_gpu_throttled{reason="power_cap"} 0.0' in text
    driver.answers = False
    assert "quire_executor_gpu" not in generate_latest(registry).decode()


@pytest.mark.parametrize("driver", [None, Driver("0000:99:00.0")])
def test_without_binding_or_answer_there_are_none(driver: Driver | None, caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    with caplog.at_level(logging.INFO, "quire.executor"):
        assert not register_gpu(registry, GPU, driver)
    assert generate_latest(registry) == b""
    assert len(caplog.records) == 1
