"""What binding to a NUMA node asks of the kernel."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from errno import ENOSYS
from pathlib import Path
from typing import Protocol

_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}  # the call's number; libc has no function for it
_MPOL_PREFERRED = 1
_WORD_BITS = ctypes.sizeof(ctypes.c_ulong) * 8


class Kernel(Protocol):
    """Each method raises OSError where the kernel refuses."""

    def pin(self, cpus: frozenset[int]) -> None:
        """All threads of the process, and those that they start, run on `cpus` alone."""

    def prefer(self, node: int) -> None:
        """Memory that this thread, and those that it starts from now on, touch first comes from `node`."""


class Linux:
    """The kernel at hand."""

    def pin(self, cpus: frozenset[int]) -> None:
        for thread in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # it has just ended
                os.sched_setaffinity(int(thread.name), cpus)

    def prefer(self, node: int) -> None:
        # Preferred, not strict: where the node is full, memory from elsewhere is slow, but none is the end. What is
        # mapped from a file does not follow the policy, nor mbind: its pages stay where they were first read.
        number = _SET_MEMPOLICY.get(platform.machine())
        if number is None:
            raise OSError(ENOSYS, f"the number of set_mempolicy on {platform.machine()} is not known")
        mask = (ctypes.c_ulong * (node // _WORD_BITS + 1))()
        mask[node // _WORD_BITS] = 1 << node % _WORD_BITS
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        # The kernel takes one bit less than it is told that there are.
        bits = ctypes.c_ulong(len(mask) * _WORD_BITS + 1)
        if call(ctypes.c_long(number), ctypes.c_long(_MPOL_PREFERRED), mask, bits) != 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
