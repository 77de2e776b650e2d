"""Which GPU CUDA's first device is, found without torch or a driver's library."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from services.common.topology import Gpu


def cuda_devices(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The CUDA devices that this process may use."""
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return []
    return sorted((root / "dev").glob("nvidia[0-9]*"))


def first_cuda_gpu(gpus: Sequence[Gpu], devices: Sequence[Path], environment: Mapping[str, str]) -> Gpu | None:
    """The GPU of the machine's `gpus` that CUDA numbers 0. None where there is none, or where only CUDA could tell.

    A container is shown all of the machine's GPUs on the bus, but has device files of its own ones alone.
    """
    if not devices:
        return None
    names = {path.name for path in devices}
    candidates = [
        gpu for gpu in gpus if gpu.vendor == "nvidia" and (gpu.minor is None or f"nvidia{gpu.minor}" in names)
    ]
    wanted = environment.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if wanted.startswith("GPU-"):
        named = [gpu for gpu in candidates if gpu.uuid.startswith(wanted)]
        return named[0] if len(named) == 1 else None
    # CUDA numbers faster GPUs first unless told otherwise; equal ones go by their bus address.
    by_address = environment.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID" or len({gpu.device for gpu in candidates}) == 1
    if not by_address or not wanted.isdecimal() or int(wanted) >= len(candidates):
        return None
    return candidates[int(wanted)]
