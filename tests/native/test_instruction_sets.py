"""Which kernels run here, so that none stays untested unseen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kernels import _native
from tests.native.packed_models import FORMATS, FUSED, SETS

NEEDS = {
    "portable": set(),
    "avx2": {"avx2", "fma", "f16c"},
    "avx512": {"avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"},
    "avx512_vnni": {
        "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16",
    },
}  # fmt: skip
"""Flags of the CPU, as Linux names them."""
EMULATED = Path(_native.__file__).parent.name.startswith("emulate")
"""Whether this build has the AVX-512 sets compiled for AVX2."""


def flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return {flag for line in lines if line.startswith("flags") for flag in line.split()}


def test_every_set_that_this_cpu_has_is_there() -> None:
    needs = {name: need if not EMULATED or name == "portable" else NEEDS["avx2"] for name, need in NEEDS.items()}
    assert list(SETS) == [name for name, need in needs.items() if need <= flags()]
    assert set(FUSED) == set(SETS) - {"portable"}


def test_sets_are_asked_for_by_name() -> None:
    x, packed = np.ones((1, 32), np.float32), np.zeros(4096, np.uint8)
    for name in SETS:
        assert not _native.matmul(x, packed, 0, 32, name).any()
    for name in ("avx", "AVX2", "", "auto"):
        with pytest.raises(ValueError, match="portable"):
            _native.matmul(x, packed, 0, 32, name)


def test_formats_are_numbered_in_order() -> None:
    assert list(_native.FORMATS.values()) == list(range(len(FORMATS)))
