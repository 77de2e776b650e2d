"""`quire simulate --cache-only`: its report, its picture, and how it says no."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import cli


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three turns of one conversation, then another one."""
    path = tmp_path / "trace.jsonl"
    turns = [(600, [1, 2]), (1100, [1, 3, 4]), (1700, [1, 3, 5, 6]), (700, [7, 8])]
    lines = [
        {"timestamp": 1000 * at, "input_length": length, "output_length": 1, "hash_ids": ids}
        for at, (length, ids) in enumerate(turns)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_the_report_as_json(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--cache-only", "--trace", str(trace), "--block-size", "256", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    # Full blocks: 2 of id 1, 2 of id 3, 2 of id 5, 2 of id 7; ids 2, 4, 6 and 8 are too short for any.
    assert report["distinct_blocks"] == 8
    assert report["prompt_tokens"] == 4100
    assert report["ideal_hit_rate"] == pytest.approx((512 + 1024) / 4100)
    largest = report["points"][-1]
    assert (largest["blocks"], largest["hit_rate"], largest["evicted_blocks"]) == (10, report["ideal_hit_rate"], 0)
    assert report["points"][0]["refused_requests"] == 4
    assert report["points"][0]["bytes"] is None


def test_sizes_in_bytes_of_a_model(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "vocab_size": 100,
                "max_position_embeddings": 4096,
                "torch_dtype": "bfloat16",
            }
        )
    )
    block = 2 * 32 * 2 * 2 * 256  # keys and values of 32 numbers of 2 bytes, in 2 layers, for 256 tokens
    args = ["simulate", "--cache-only", "--trace", str(trace), "--block-size", "256", "--model", str(config)]
    assert cli.main([*args, "--memory", f"{8 * block},{7 * block}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["block_bytes"] == block
    assert [(point["blocks"], point["bytes"]) for point in report["points"]] == [(7, 7 * block), (8, 8 * block)]
    with pytest.raises(SystemExit) as end:
        cli.main([*args, "--memory", "1KB"])
    assert end.value.code == 1
    assert capsys.readouterr().err == "quire simulate: --memory: a block alone takes 64 KiB\n"


def test_more_blocks_than_a_load_needs_take_no_memory(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", "--cache-only", "--trace", str(trace), "--json", "--blocks"]
    assert cli.main([*args, f"1000,{10**12}"]) == 0
    enough, more = json.loads(capsys.readouterr().out)["points"]
    assert more["blocks"] == 10**12
    assert more["hit_rate"] == enough["hit_rate"]


def test_the_table_and_the_picture(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "curve.png"
    args = ["simulate", "--cache-only", "--trace", str(trace), "--blocks", "100,20", "--requests", "3"]
    assert cli.main([*args, "--plot", str(picture)]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("3 prompts, 3,400 tokens")
    assert columns.split()[:2] == ["blocks", "memory"]
    assert [row.split()[0] for row in rows] == ["20", "100"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--cache-only", "--trace", "no-such-file"], "No such file"),
        (["--cache-only", "--trace", "{trace}", "--plot", "{trace}.what"], "--plot: "),
        (["--cache-only", "--trace", "{trace}", "--model", "{trace}.what"], "{trace}.what"),
    ],
)
def test_what_cannot_be_read_or_drawn_is_one_line(
    trace: Path, args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", *(arg.format(trace=trace) for arg in args)])
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("quire simulate: ")
    assert said.format(trace=trace) in line


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "says when requests come"),
        (["--cache-only", "--trace", "x", "--memory", "1GiB"], "--memory needs --model"),
        (["--cache-only", "--trace", "x", "--memory", "lots"], "no size such as"),
        (["--cache-only", "--trace", "x", "--blocks", "0"], "0 is not positive"),
        (["--cache-only", "--trace", "x", "--block-size", "100"], "100 does not divide 512"),
        (["--cache-only", "--trace", "x", "--policy", "fifo"], "invalid choice"),
    ],
)
def test_wrong_use_is_status_2(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["simulate", *args])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
