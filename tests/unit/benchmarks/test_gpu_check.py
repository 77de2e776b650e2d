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
import torch

from benchmarks.gpu import check, report, tune
from benchmarks.gpu.check import Part, run_part
from benchmarks.gpu.report import PartReport, Row, failures, table
from benchmarks.gpu.tune import combinations, write

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # --dry sets it: it is put back


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, object]]:
    out = tmp_path_factory.mktemp("check") / "gpu.json"
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu.check", "--dry", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
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


def test_a_run_goes_on_where_another_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "gpu.json"
    lost = PartReport("lost", 3.0, [Row("a", 0.5, "x", 1.0)], "RuntimeError: of the card")
    report.write(out, {}, [PartReport("ceilings", 1.0, []), lost])
    names = ("ceilings", "lost", "later")
    parts = [Part(name, 9.0, lambda name=name: iter([Row(name, 2.0, "")])) for name in names]  # type: ignore[misc]
    monkeypatch.setattr(check, "_parts", lambda setting: parts)
    assert check.main(["--dry", "--out", str(out), "--resume"]) == 1
    found = {part.part: part for part in report.read(out)}
    assert set(found) == set(names)
    assert found["lost"] == lost
    assert found["ceilings"].rows[0].value == found["later"].rows[0].value == 2.0
    assert "of the card" in capsys.readouterr().out


def test_behind_a_part_that_leaves_no_card_the_program_starts_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, started = tmp_path / "gpu.json", []
    monkeypatch.setattr(check, "_parts", lambda setting: [part_of(1.0)])
    monkeypatch.setattr(check, "_is_usable", lambda place: False)
    monkeypatch.setattr(os, "execv", lambda path, command: started.append(command))
    check.main(["--dry", "--out", str(out)])
    (command,) = started
    assert command[2:6] == ["benchmarks.gpu.check", "--resume", "--out", str(out)]
    assert [part.part for part in report.read(out)] == ["some"]


def test_no_time_is_a_part_cut_short() -> None:
    kept: list[PartReport] = []
    assert run_part(part_of(1.0), 0.0, kept.append, lambda: None) == kept[0]
    assert (kept[0].rows, kept[0].ended_by) == ([], "no time was left")


def test_without_a_card_the_check_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert check.main(["--out", str(tmp_path / "gpu.json")]) == 2
    assert "there is no CUDA device" in capsys.readouterr().err


def test_tuning_writes_a_table_that_kernels_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "card.json"
    out.write_text(json.dumps({"multiply_int4": [], "other": [{"shape": {}, "config": {}}]}))
    assert tune.main(["--dry", "--out", str(out), "--only", "paged_attention"]) == 0
    assert "paged_attention" in capsys.readouterr().out
    from kernels.gpu.tuned import read_table

    assert set(read_table(out)) >= {"multiply_int4", "other"}


def test_entries_of_other_kernels_stay(tmp_path: Path) -> None:
    out = tmp_path / "tables" / "card.json"
    write(out, {"a": [{"shape": {"rows": 1}, "config": {"warps": 4}}]})
    write(out, {"b": []})
    assert set(json.loads(out.read_text())) == {"a", "b"}
    assert combinations(warps=[4, 8], stages=[3]) == [{"warps": 4, "stages": 3}, {"warps": 8, "stages": 3}]
