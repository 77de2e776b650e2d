"""Plain truth about windows, and the command as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import cli
from tests.fixtures.models import reference_logits

Evaluate = Callable[..., dict[str, Any]]
COMMON = ["--backend", "torch", "--threads", "1"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def evaluate(capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Runs `quire eval KIND ... --json` with torch on one thread and returns what it printed."""

    def run(kind: str, *args: str | Path) -> dict[str, Any]:
        assert cli.main(["eval", kind, *COMMON, *map(str, args), "--json"]) == 0
        (line,) = capsys.readouterr().out.splitlines()
        report: dict[str, Any] = json.loads(line)
        return report

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs `quire eval KIND ...` that must fail: its exit status and last line; standard output stays empty."""

    def run(kind: str, *args: str | Path) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            cli.main(["eval", kind, *COMMON, *map(str, args)])
        out, err = capsys.readouterr()
        assert out == ""
        return int(end.value.code or 0), err.splitlines()[-1]

    return run


def expected_logits(path: Path, prefix: Sequence[int], ids: Sequence[int], context: int, stride: int) -> torch.Tensor:
    """Float64 logits that predict ids, each from the first window that holds it: [N, V], NaN where nothing precedes."""
    room = context - len(prefix)
    stride = min(stride, room)
    starts = [max(0, -(-(at + 1 - room) // stride)) * stride for at in range(len(ids))]
    passes = {start: reference_logits(path, [*prefix, *ids[start : start + room]]) for start in set(starts)}
    blank = torch.full_like(passes[0][0], torch.nan)
    rows = [(passes[start], at - start + len(prefix) - 1) for at, start in enumerate(starts)]
    return torch.stack([found[row] if row >= 0 else blank for found, row in rows])
