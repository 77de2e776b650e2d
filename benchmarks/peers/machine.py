"""On what, and with what, was measured."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import quire

# What makes a difference to matrix products, by the names of Linux.
X86_FEATURES = "avx avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 amx_int8 amx_bf16"
ARM_FEATURES = "asimd asimddp i8mm bf16 sve sve2"


def parse_cpuinfo(text: str) -> tuple[str, str]:
    """Model name and instruction-set features, from /proc/cpuinfo's first processor."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        key, found, value = line.partition(":")
        if found:
            fields.setdefault(key.strip(), value.strip())
    features = set((fields.get("flags") or fields.get("Features") or "").split())
    family = ", ".join(f"{key} {fields[key]}" for key in ("cpu family", "model") if key in fields)
    name = fields.get("model name") or fields.get("CPU implementer") or "unknown"
    return f"{name} ({family})" if family else name, " ".join(
        f for f in f"{X86_FEATURES} {ARM_FEATURES}".split() if f in features
    )


def describe() -> dict[str, str]:
    """Facts about this machine and this version of Quire. The load is that of the last minute, by whomever."""
    model, features = parse_cpuinfo(Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "instruction set": features,
        "cpus": str(os.cpu_count()),
        "memory": f"{memory / 2**30:.0f} GiB",
        "system": platform.platform(),
        "python": platform.python_version(),
        "quire": quire.__version__,
        "commit": _commit(),
        "load before": f"{os.getloadavg()[0]:.2f}",
    }


def _commit() -> str:
    """The commit of this source tree, with a + where files differ from it."""
    command = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty=+",
        "--abbrev=12",
        "--exclude=*",
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
