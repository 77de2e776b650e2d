"""Binding on the machine at hand, in processes of their own."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import textwrap

import pytest

from services.common.topology_sysfs import read_topology

PRELUDE = """
import ctypes, errno, json, os, threading
from services.common.topology_sysfs import read_topology
from services.executor.numa import Choice
from services.executor.numa_binding import bind
from services.executor.numa_kernel import Linux

libc = ctypes.CDLL(None, use_errno=True)

def policy():
    "Mode and first word of the nodes of this thread's memory policy; none where the call is refused."
    mode, nodes = ctypes.c_int(), (ctypes.c_ulong * 64)()
    number = {"x86_64": 239, "aarch64": 236}[os.uname().machine]
    size, none = ctypes.c_ulong(64 * 64), ctypes.c_ulong(0)
    failed = libc.syscall(ctypes.c_long(number), ctypes.byref(mode), nodes, size, None, none)
    return None if failed else [mode.value, nodes[0]]

def elsewhere(function):
    found = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]
"""

FORBID = """
class Filter(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("yes", ctypes.c_ubyte), ("no", ctypes.c_ubyte), ("value", ctypes.c_uint)]

class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filters", ctypes.POINTER(Filter))]

def forbid(number):
    "From now on the kernel answers EPERM to this system call, as many containers make it."
    filters = (Filter * 4)(
        Filter(0x20, 0, 0, 0),  # load the call's number
        Filter(0x15, 0, 1, number),  # is it this one
        Filter(0x06, 0, 0, 0x00050000 | errno.EPERM),
        Filter(0x06, 0, 0, 0x7FFF0000),  # allow
    )
    program = Program(4, filters)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0, os.strerror(ctypes.get_errno())
"""


def outcome(script: str) -> object:
    """What a process prints that runs `script`."""
    code = PRELUDE + FORBID + textwrap.dedent(script)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_threads_stay_on_the_cpus_given() -> None:
    cpu = min(read_topology().cpus)
    found = outcome(f"""
        go, seen = threading.Event(), []
        older = threading.Thread(target=lambda: (go.wait(), seen.append(sorted(os.sched_getaffinity(0)))))
        older.start()
        Linux().pin(frozenset([{cpu}]))
        go.set()
        older.join()
        print(json.dumps([sorted(os.sched_getaffinity(0)), *seen, elsewhere(lambda: sorted(os.sched_getaffinity(0)))]))
    """)
    assert found == [[cpu]] * 3, "this thread, an older one and a newer one"


def test_memory_prefers_the_node_and_threads_inherit_it() -> None:
    """Where the kernel has the call; where it refuses it, the refusal is named."""
    nodes = read_topology().nodes
    node = nodes[0].node_id if nodes else 0
    refusal, own, inherited = outcome(f"""
        try:
            Linux().prefer({node})
            refusal = None
        except OSError as error:
            refusal = error.errno
        print(json.dumps([refusal, policy(), elsewhere(policy)]))
    """)
    if refusal is None:
        assert own == inherited == [1, 1 << node]
    else:
        assert errno.errorcode[refusal] in ("EPERM", "ENOSYS", "EINVAL")


def test_an_absent_node_is_an_error_of_the_call() -> None:
    kind = outcome("""
        try:
            Linux().prefer(1000)
            print(json.dumps("nothing"))
        except OSError as error:
            print(json.dumps(type(error).__name__))
    """)
    assert kind in ("OSError", "PermissionError")


@pytest.mark.parametrize(
    ("calls", "expected"),
    [(["set_mempolicy"], [True, False]), (["set_mempolicy", "sched_setaffinity"], [False, False])],
)
def test_k5_a_kernel_that_forbids_the_calls_is_survived(calls: list[str], expected: list[bool]) -> None:
    cpu = min(read_topology().cpus)
    found = outcome(f"""
        numbers = {{
            "x86_64": {{"set_mempolicy": 238, "sched_setaffinity": 203}},
            "aarch64": {{"set_mempolicy": 237, "sched_setaffinity": 122}},
        }}[os.uname().machine]
        for name in {calls!r}:
            forbid(numbers[name])
        binding = bind(Choice(0, frozenset([{cpu}]), True, "asked for"), read_topology(), Linux())
        print(json.dumps([binding.threads, binding.memory]))
    """)
    assert found == expected
