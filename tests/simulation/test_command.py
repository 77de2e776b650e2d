"""`quire simulate`: its report, its picture, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire import cli

LOAD = ["--concurrency", "4", "--requests", "12", "--prompt-tokens", "20", "--output-tokens", "5"]


def simulated(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert cli.main(["simulate", *args, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two turns of one conversation, and another one."""
    path = tmp_path / "trace.jsonl"
    turns = [(600, [1, 2]), (1100, [1, 3, 4]), (700, [7, 8])]
    lines = [
        {"timestamp": 3000 * at, "input_length": length, "output_length": 40, "hash_ids": ids}
        for at, (length, ids) in enumerate(turns)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_policies_are_compared_over_the_same_load(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["fair", "fcfs", "static", "no-preemption"]
    report = simulated(capsys, *LOAD, "--policy", ",".join(names), "--dollars-per-hour", "3.6", "--executors", "2")
    assert [found["policy"] for found in report["policies"]] == names
    assert report["load"] == {
        "trace": None,
        "requests": 12,
        "rate": None,
        "burstiness": None,
        "concurrency": 4,
        "seed": 0,
    }
    for found in report["policies"]:
        assert (found["requests"], found["failures"], found["executors"]) == (12, {}, 2)
        assert found["dollars"] == pytest.approx(2 * 0.001 * found["duration_s"], abs=1e-4)


def test_a_trace_shares_what_it_says(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = simulated(capsys, "--trace", str(trace), "--trace-lengths", "0.125")
    (found,) = report["policies"]
    assert report["load"]["trace"] == "trace.jsonl"
    assert found["cached_share"] == pytest.approx(64 / (75 + 138 + 88), abs=1e-3)  # 512 tokens, an eighth as many
    assert found["duration_s"] > 6


def test_the_schedulers_settings_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    report = simulated(capsys, *LOAD[2:], "--concurrency", "12", "--max-queued", "3", "--max-sequences", "2")
    assert report["policies"][0]["failures"]["QUEUE_FULL"] > 0


def test_tables_and_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "run.png"
    tenants = ["--tenant", "flood:10", "--tenant", "light:1:2:5", "--slo-ttft", "500", "--slo-itl", "100"]
    load = ["--rate", "20", "--requests", "40", "--burstiness", "2", "--prompt-tokens", "20", "--output-tokens", "5"]
    assert cli.main(["simulate", *load, *tenants, "--policy", "fair,fcfs", "--plot", str(picture)]) == 0
    table = capsys.readouterr().out
    assert "output tokens/s" in table
    assert len([line for line in table.splitlines() if line.split()[1:2] in (["flood"], ["light"])]) == 4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "none were stated" not in table


def test_rows_without_a_value_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", *LOAD]) == 0
    table = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split()[-1] for line in table}
    assert rows["within targets"] == rows["good requests/s"] == rows["Jain index, mean"] == "-"
    assert "within targets: none were stated (--slo-ttft, --slo-itl)" in table
    assert "Jain index: in no --window did several tenants wait throughout" in table


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([*LOAD, "--policy", "fair,random"], "'random' is not one of fair, fcfs, static, no-preemption"),
        ([*LOAD, "--rate", "3"], "not allowed with"),
        (["--rate", "0"], "0 is not in 1e-05..1e+06 a second"),
        (["--rate", "1e-300"], "1e-300 is not in"),
        (["--rate", "inf"], "inf is not in"),
        (["--rate", "nan"], "nan is not in"),
        ([*LOAD, "--tenant", ":3"], "is not NAME"),
        ([*LOAD, "--tenant", "a:b"], "--tenant"),
        ([*LOAD, "--grant-ms", "0"], "--grant-ms: Input should be greater than 0"),
        ([*LOAD, "--burstiness", "-1"], "-1 is below 0"),
    ],
)
def test_wrong_use_is_status_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", *args])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--engine", "--trace"])
def test_files_that_cannot_be_read_are_status_1(flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", "--requests", "3", "--rate", "1", flag, str(tmp_path / "none.jsonl")])
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("quire simulate: ")
    (tmp_path / "bad.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", "--requests", "3", "--rate", "1", flag, str(tmp_path / "bad.csv")])
    assert end.value.code == 1
    assert "bad.csv" in capsys.readouterr().err


def test_a_prompt_that_no_executor_holds_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", "--rate", "5", "--prompt-tokens", "1000000000", "--requests", "2"])
    assert end.value.code == 1
    assert "--prompt-tokens: 1000000000 is more than the 8128 that" in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert "examples:" in text
    assert "--lookahead-tokens" in text
