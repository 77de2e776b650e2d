"""`quire quantize` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli
from tests.fixtures.models import make_rand_model

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text(TEXT)
    source = make_rand_model(tmp_path / "model")
    return ["quantize", str(source), "--threads", "1", "--samples", "4", "--context", "32",
            "--calibration", str(tmp_path / "text.txt"), "--out", str(tmp_path / "out")]  # fmt: skip


def test_what_is_printed(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*flags, "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    report = json.loads(line)
    assert report["quantization"] == "gptq, 4 bits, groups of 32, symmetric"
    assert report["samples"] == 4
    assert 4.5 < report["matrix_bits"] < 6
    weights = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert weights - 20_000 < report["bytes"] < weights
    assert cli.main([*flags[:-1], str(tmp_path / "other"), "--method", "rtn", "--asymmetric", "--bits", "3"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == f"{tmp_path / 'other'}: rtn, 3 bits, groups of 32, asymmetric"
    assert "calibration                 none" in out


def test_auto_says_what_each_layer_got(flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    auto = ["--auto", "--bits-per-weight", "5"]
    assert cli.main([*flags, *auto, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["matrix_bits"] <= 5
    assert [list(layer) for layer in report["layers"]] == [["qkv", "o", "gate_up", "down"]] * 2
    assert cli.main([*flags[:-1], str(tmp_path / "other"), *auto]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-3].split() == ["bits,", "columns", "a", "scale", "qkv", "o", "gate_up", "down"]
    first = report["layers"][0]["qkv"]
    assert lines[-2].split()[:4] == ["layer", "0", f"{first['bits']},", str(first["group_size"])]


def test_without_a_text_the_model_writes_one(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    at = flags.index("--calibration")
    assert cli.main([*flags[:at], *flags[at + 2 :], "--method", "smoothquant", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 4


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--bits", "4", "--method", "fp8"], 2, "--bits: fp8 has 8, not 4"),
        (["--group-size", "64", "--method", "smoothquant"], 2, "--group-size: smoothquant has no groups"),
        (["--asymmetric", "--method", "fp8"], 2, "--asymmetric: fp8 is symmetric"),
        (["--act-order", "--method", "awq"], 2, "--act-order: it is gptq's, not awq's"),
        (["--scales", "block"], 2, "--scales: it is fp8's and gptq-fp8's, not gptq's"),
        (["--auto", "--method", "awq"], 2, "--auto: it is gptq's, not awq's"),
        (["--auto", "--bits", "4"], 2, "--bits: --auto chooses them"),
        (["--bits-per-weight", "4"], 2, "--bits-per-weight: it is for --auto"),
        (["--calibration", "absent.txt"], 2, "--calibration: absent.txt: No such file or directory"),
        (["--context", "2000"], 2, "--context: 2000 is not in 2..1024, the model's own"),
        (["--out", "."], 2, "--out: . is not an empty folder"),
    ],
)
def test_a_wrong_flag_is_one_line(
    flags: list[str], capsys: pytest.CaptureFixture[str], more: list[str], status: int, said: str
) -> None:
    assert cli.main([*flags, *more]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"quire quantize: {said}\n"


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["quantize", "absent", "--out", "x"]) == 1
    assert capsys.readouterr().err.startswith("quire quantize: no model 'absent'")
