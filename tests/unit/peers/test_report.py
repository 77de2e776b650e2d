"""Tables, JSON and the plot."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.peers.memory_read import shares
from benchmarks.peers.report import text, write
from benchmarks.peers.samples import OURS, Record, Sample

MACHINE = {"cpu": "a CPU", "instruction set": "avx2", "threads": "2"}


def record() -> Record:
    rounds = [(400.0, 200.0), (440.0, 200.0), (480.0, 200.0)]
    samples = []
    for number, (own, peer) in enumerate(rounds):
        around = Sample("engine", OURS, number, 3.0, {"decode 1": own})
        samples += [around, Sample("engine", "llama.cpp Q4_0", number, 5.0, {"decode 1": peer}), around]
    return Record(samples, {OURS: {"version": "1 & 2"}, "llama.cpp Q4_0": {"weights": "Q4_0"}})


def test_the_tables_hold_bars_medians_ratios_and_facts() -> None:
    lines = text(MACHINE, record()).splitlines()
    assert lines[0] == "a CPU: avx2; 2 threads"
    title = "decode, batch 1, against llama.cpp Q4_0"
    assert f"| {title} | 1.6 x | 2.1 x | **2.2** x | 2 to 2.4 | 3 | aim met |" in lines
    assert "| engine | quire | llama.cpp Q4_0 |" in lines
    assert "| decode 1 | 440 | 200 (2.20x) |" in lines
    assert "| llama.cpp Q4_0 | weights Q4_0 |" in lines


def test_every_measurement_is_written_with_a_plot(tmp_path: Path) -> None:
    write(tmp_path, MACHINE, "--rounds 3", record())
    result = json.loads((tmp_path / "result.json").read_text())
    assert (len(result["samples"]), result["arguments"], result["machine"]) == (9, "--rounds 3", MACHINE)
    assert [row["verdict"] for row in result["bars"]] == ["aim met"]
    drawn = ElementTree.parse(tmp_path / "engines.svg").getroot()
    bars = [element for element in drawn.iter() if element.tag.endswith("rect") and element.get("x")]
    assert [float(bar.get("width", "")) for bar in bars] == [460.0, 209.1]


def test_without_engines_there_is_no_plot(tmp_path: Path) -> None:
    write(tmp_path, MACHINE, "", Record())
    assert {path.name for path in tmp_path.iterdir()} == {"result.json", "result.md"}


def test_shares_of_a_read_by_its_speed() -> None:
    # 100 MB a step: 200 steps a second against 25 GB/s, then 300 against 50 GB/s.
    found = shares([20e9, 30e9, 70e9], [200.0, 300.0], 100_000_000)
    assert found == {"read GB/s": 30.0, "share below 40 GB/s": 0.8, "share above 40 GB/s": 0.6}
