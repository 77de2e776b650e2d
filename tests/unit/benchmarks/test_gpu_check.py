"""The check of a GPU, proven on a CPU: every part runs, tiny, and what is wrong or late is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from benchmarks.gpu import check, report
from benchmarks.gpu.check import Part, run_part
from benchmarks.gpu.report import PartReport, Row, failures, table
from benchmarks.gpu.tune import combinations, write

ROOT = Path(__file__).parents[3]


def run(*command: str | Path, interpret: str = "1") -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)], cwd=ROOT, env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    out = tmp_path_factory.mktemp("check") / "gpu.json"
    done = run("benchmarks.gpu.check", "--dry", "--out", out)
    return done, json.loads(out.read_text())


def test_every_part_runs_tiny_and_finds_nothing_wrong(dry) -> None:
    done, found = dry
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all is right" in done.stdout
    parts = {part["part"]: part for part in found["parts"]}
    assert len(parts) == 10
    assert all(part["rows"] and not part["ended_by"] for part in parts.values())
    right = [row for name, part in parts.items() if name.startswith("right") for row in part["rows"]]
    assert len(right) > 25
    assert {row["verdict"] for row in right} == {"ok", ""}
    assert found["proves"] == "the check itself, nothing about a GPU"


def test_what_misses_is_told_and_only_what_is_wrong_fails() -> None:
    parts = [
        PartReport(
            "right, kernels", 1.0, [Row("a", 0.5, "of budget", 1.0, "at most"), Row("b", 2.0, "", 1.0, "at most")]
        ),
        PartReport("right, models", 1.0, [Row("c", float("nan"), "", 1.0)]),
        PartReport("speed", 1.0, [Row("d", 0.1, "x", 1.0)], "its time was over"),
    ]
    assert failures(parts) == 3
    lines = table(parts).splitlines()
    assert [line.split()[-1] for line in lines[1:]] == ["ok", "missed", "missed", "missed", "SHORT"]


def part_of(*numbers: float, then: Callable[[], object] = lambda: None) -> Part:
    def rows() -> Iterator[Row]:
        yield from (Row(str(number), number, "") for number in numbers)
        then()

    return Part("some", 9.0, rows)


def fail() -> None:
    raise RuntimeError("an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("then", "ended_by"),
    [
        (lambda: None, ""),
        (fail, "RuntimeError: an illegal memory access"),
        (lambda: time.sleep(9), "its time was over"),
    ],
    ids=["whole", "fault", "late"],
)
def test_what_came_before_a_fault_is_kept(then: Callable[[], object], ended_by: str) -> None:
    kept: list[tuple[int, str]] = []
    report = run_part(
        part_of(1.0, 2.0, then=then), 0.3, lambda one: kept.append((len(one.rows), one.ended_by)), lambda: None
    )
    assert [row.value for row in report.rows] == [1.0, 2.0]
    assert report.ended_by.startswith(ended_by)
    assert bool(report.ended_by) == bool(ended_by)
    assert [count for count, _ in kept] == [1, 2, 2]
    assert kept[-1][1] == report.ended_by


def test_a_part_that_does_not_come_back_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "GRACE", 0.1)
    monkeypatch.setattr(check, "_limit", lambda seconds: nullcontext())  # as in a driver, where no signal is heard
    told, left = [], threading.Event()
    run_part(part_of(1.0, then=lambda: left.wait(9)), 0.1, lambda one: told.append(one.ended_by), left.set)
    assert "it did not come back" in told


def test_a_run_goes_on_where_another_was_lost(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    lost = PartReport("right, sampler", 3.0, [Row("a", 0.5, "x", 1.0)], "RuntimeError: lost")
    report.write(out, {}, [PartReport("ceilings", 1.0, []), lost])
    done = run("benchmarks.gpu.check", "--dry", "--out", out, "--resume", "--only", "right, sampler")
    assert done.returncode == 1
    assert "RuntimeError: lost" in done.stdout
    assert report.read(out)[1] == lost


def test_no_time_is_a_part_cut_short(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run("benchmarks.gpu.check", "--dry", "--out", out, "--seconds", "0", "--only", "ceilings")
    assert done.returncode == 1
    assert json.loads(out.read_text())["parts"][0]["ended_by"] == "no time was left"


def test_without_a_card_the_check_says_so(tmp_path: Path) -> None:
    done = run("benchmarks.gpu.check", "--out", tmp_path / "gpu.json", interpret="0")
    assert done.returncode == 2
    assert "there is no CUDA device" in done.stderr


def test_tuning_writes_a_table_that_kernels_read(tmp_path: Path) -> None:
    out = tmp_path / "card.json"
    out.write_text(json.dumps({"multiply_int4": [], "other": [{"shape": {}, "config": {}}]}))
    done = run("benchmarks.gpu.tune", "--dry", "--out", out, "--only", "paged_attention")
    assert done.returncode == 0, done.stderr
    assert "paged_attention" in done.stdout
    from kernels.gpu.tuned import read_table

    assert set(read_table(out)) >= {"multiply_int4", "other"}


def test_entries_of_other_kernels_stay(tmp_path: Path) -> None:
    out = tmp_path / "tables" / "card.json"
    write(out, {"a": [{"shape": {"rows": 1}, "config": {"warps": 4}}]})
    write(out, {"b": []})
    assert set(json.loads(out.read_text())) == {"a", "b"}
    assert combinations(warps=[4, 8], stages=[3]) == [{"warps": 4, "stages": 3}, {"warps": 8, "stages": 3}]
