"""Where the cuda backend computes: a GPU, or a CPU under Triton's interpreter; chosen once, when a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
import triton
from torch import Tensor

from kernels.gpu.device import gpu_of

_RESERVE = 1 << 29
"""Bytes left alone on a GPU: libraries, the driver, what allocators cannot use."""


class Mark(Protocol):
    """A point of the device's work."""

    def wait(self) -> None:
        """Returns once the device has come so far."""
        ...


class Device(Protocol):
    """What computes, and how work is given to it."""

    torch_device: torch.device
    name: str  # for people
    multiplies_bf16: bool

    def computing(self) -> AbstractContextManager[object]:
        """Work begun inside is done in the order in which it was begun."""
        ...

    def send(self, source: Tensor, target: Tensor) -> None:
        """Copies host memory to the device; `source` may change once a later `mark` was waited for."""
        ...

    def fetch(self, source: Tensor) -> Tensor:
        """Host memory that holds the source once a later `mark` was waited for."""
        ...

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Host memory that the device reaches fastest."""
        ...

    def mark(self) -> Mark: ...

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        """What does the same as `run`, as fast as the device can be told to. `run` reads and writes fixed memory.

        torch.OutOfMemoryError where there is no room for it.
        """
        ...

    def follow(self) -> None:
        """Has work of the calling thread's stream wait for all that was begun so far."""
        ...

    def free_memory(self) -> int | None:
        """Bytes of its own memory that can still be had; None where it computes from host memory."""
        ...

    def most_taken(self, run: Callable[[], None]) -> int:
        """Bytes of its own memory that `run` takes at most, beyond those that were taken before."""
        ...


class _Done:
    def wait(self) -> None:
        """There is nothing to wait for."""


class InterpretedDevice:
    """A CPU. Everything is done when the call returns; bf16 products would be wrong, so there are none."""

    torch_device = torch.device("cpu")
    name = "cpu, Triton's interpreter"
    multiplies_bf16 = False

    def computing(self) -> AbstractContextManager[object]:
        return nullcontext()

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source)

    def fetch(self, source: Tensor) -> Tensor:
        return source.clone()

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def mark(self) -> Mark:
        return _Done()

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        return run

    def follow(self) -> None:
        """There is nothing to wait for."""

    def free_memory(self) -> int | None:
        return None

    def most_taken(self, run: Callable[[], None]) -> int:
        run()
        return 0


class _EventMark:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class CudaDevice:
    """A GPU, with one stream for all steps."""

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(self.torch_device)
        self.multiplies_bf16 = gpu_of(self.torch_device).capability >= 80
        self._stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        self._graphs = torch.cuda.graph_pool_handle()

    def computing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def send(self, source: Tensor, target: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fetch(self, source: Tensor) -> Tensor:
        target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return target.copy_(source, non_blocking=True)

    def host_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        return _EventMark(self._stream)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()  # compiles, and makes what libraries keep
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._graphs, stream=self._stream, capture_error_mode="thread_local"):
                run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            # A graph takes memory of the driver too, whose refusal torch does not name.
            if "out of memory" in str(error):
                raise torch.OutOfMemoryError(str(error)) from error
            raise
        return graph.replay

    def follow(self) -> None:
        torch.cuda.current_stream(self.torch_device).wait_stream(self._stream)

    def free_memory(self) -> int | None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        return max(free - _RESERVE, 0)

    def most_taken(self, run: Callable[[], None]) -> int:
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        return max(torch.cuda.max_memory_allocated(self.torch_device) - before, 0)


def find_device() -> Device | None:
    """The GPU where there is one, else the interpreter where it was asked for (TRITON_INTERPRET=1), else None."""
    if triton.knobs.runtime.interpret:
        return InterpretedDevice()
    return CudaDevice(torch.cuda.current_device()) if torch.cuda.is_available() else None
