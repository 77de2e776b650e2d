"""`quire bench engine --fit`: a model is measured, and what is written can be simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli
from services.executor.bench_fit import batches, blocks_needed
from services.executor.cost_model import Machine, StepShape
from tests.fixtures.models import make_rand_model


def test_a_model_is_measured_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_rand_model(tmp_path / "model", context_length=256)
    file = tmp_path / "machine.json"
    flags = ["--model", str(tmp_path / "model"), "--max-sequences", "4", "--max-step-tokens", "64"]
    assert cli.main(["bench", "engine", "--fit", str(file), *flags]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written == json.loads(file.read_text())
    machine = Machine.read(file)
    assert (machine.max_sequences, machine.max_step_tokens, machine.context_length) == (4, 64, 256)
    assert machine.cost.seconds(StepShape(4, 100, 0, 0)) > 0
    assert machine.cost.seconds(StepShape(0, 0, 64, 64 * 65 // 2)) > 0
    load = ["--concurrency", "2", "--requests", "6", "--prompt-tokens", "20", "--output-tokens", "5"]
    assert cli.main(["simulate", "--engine", str(file), *load, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["engine"]["kv_format"] == machine.description["kv_format"]
    assert report["policies"][0]["requests"] == 6
    assert not report["policies"][0]["failures"]


def test_a_file_that_cannot_be_written_is_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_rand_model(tmp_path / "model", context_length=128)
    flags = ["--model", str(tmp_path / "model"), "--max-sequences", "2"]
    assert cli.main(["bench", "engine", "--fit", str(tmp_path / "no" / "machine.json"), *flags]) == 1
    assert "No such file or directory" in capsys.readouterr().err


def test_batches_fit_into_the_blocks_that_are_made() -> None:
    assert max(batch.sequences for batch in batches(64)) == 64
    assert len(batches(1)) == len({batch.prompt for batch in batches(1)})
    for size in (16, 32):
        assert all(b.sequences * b.length <= blocks_needed(64, size) * size for b in batches(64))
