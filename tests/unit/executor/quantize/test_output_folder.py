"""What is kept between runs, and the folder in the end."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from services.common.errors import QuireError, Reason
from services.executor.models.hf import canonical_name
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import expected_shapes
from services.executor.quant.parts import Part
from services.executor.quantize import output_folder
from services.executor.quantize.hf_names import plain_name
from services.executor.quantize.output_folder import UNFINISHED, OutputFolder
from services.executor.quantize.safetensors_out import write_safetensors

REQUEST: dict[str, Any] = {"model": [["a", 1]], "method": "gptq"}


def test_names_are_those_that_are_read() -> None:
    spec = ModelSpec("llama", 64, 64, 96, 2, 4, 2, 16, 512, 1e-5, 1e4, None, True, True, True)
    for name in expected_shapes(spec):
        assert canonical_name(plain_name(name)) == name


@pytest.mark.parametrize(
    ("written", "message"),
    [(b"{", "holds a damaged unfinished model"), (b"\xff", "holds a damaged"), (b"[]", "method was None, not gptq")],
)
def test_a_damaged_request_is_refused(tmp_path: Path, written: bytes, message: str) -> None:
    OutputFolder(tmp_path / "out", REQUEST)
    (tmp_path / "out" / UNFINISHED / "request.json").write_bytes(written)
    with pytest.raises(QuireError, match=message) as raised:
        OutputFolder(tmp_path / "out", REQUEST)
    assert raised.value.reason is Reason.INVALID_FIELD


def test_what_is_kept_is_there_in_the_next_run(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out", REQUEST)
    assert folder.tokens() is None
    assert (folder.progress().layers, folder.progress().hidden) == (0, None)
    tokens, hidden = np.arange(6, dtype=np.int32).reshape(2, 3), torch.randn(2, 3, 4)
    folder.keep_tokens(tokens)
    folder.keep_layer(0, {"a": Part.of("I8", np.arange(3))}, hidden)
    again = OutputFolder(tmp_path / "out", dict(reversed(REQUEST.items())))
    kept = again.tokens()
    assert kept is not None
    assert np.array_equal(kept, tokens)
    assert again.progress().layers == 1
    found = again.progress().hidden
    assert found is not None
    assert torch.equal(found, hidden)
    again.keep_layer(1, {"b": Part.of("F16", np.ones(3))}, None)
    assert (again.progress().layers, again.progress().hidden) == (2, None)


def test_another_request_is_refused(tmp_path: Path) -> None:
    OutputFolder(tmp_path / "out", REQUEST)
    with pytest.raises(QuireError, match=r"--out: .* \(method was gptq, not awq\); delete it") as refused:
        OutputFolder(tmp_path / "out", REQUEST | {"method": "awq"})
    assert refused.value.reason is Reason.INVALID_FIELD


def test_what_the_system_refuses_is_said_of_the_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for place, said in (
        (tmp_path / "file" / "sub", "Not a directory"),
        (Path("/proc/no-such-place"), "No such file or directory"),
    ):
        with pytest.raises(QuireError, match=f"--out: {place}.*: {said}") as refused:
            OutputFolder(place, REQUEST)
        assert refused.value.reason is Reason.INVALID_FIELD
    folder = OutputFolder(tmp_path / "out", REQUEST)

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(output_folder, "write_safetensors", full)
    with pytest.raises(QuireError, match=rf"--out: {tmp_path / 'out'}: No space left on device"):
        folder.keep_layer(0, {}, None)


def test_what_an_earlier_run_left_is_cleared(tmp_path: Path) -> None:
    folder = OutputFolder(tmp_path / "out", REQUEST)
    folder.keep_layer(0, {"a": Part.of("I8", np.arange(3))}, None)
    (tmp_path / "out" / "model-00001-of-00002.safetensors").write_bytes(b"a part")
    folder.clear()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [UNFINISHED]
    assert OutputFolder(tmp_path / "out", REQUEST).progress().layers == 0


def test_a_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(QuireError, match="is not an empty folder"):
            OutputFolder(place, REQUEST)
    (tmp_path / "empty" / UNFINISHED).mkdir(parents=True)  # ended before the request was written
    OutputFolder(tmp_path / "empty", REQUEST)


@pytest.mark.parametrize("most", [40, 10**9])
def test_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    monkeypatch.setattr(output_folder, "SHARD_BYTES", most)
    out = tmp_path / "out"
    folder = OutputFolder(out, REQUEST)
    expected = {}
    for index in range(3):
        values = {f"m{index}.a": np.arange(5, dtype=np.int8) + index, f"m{index}.b": np.full((2, 3), index, np.float32)}
        expected |= values
        folder.keep_layer(index, {n: Part.of("I8" if "a" in n else "F32", v) for n, v in values.items()}, None)
    expected["top"] = np.arange(30, dtype=np.int8).reshape(5, 6)
    folder.keep_top({"top": Part.of("I8", expected["top"])})
    size = folder.finish(3, {"notes.txt": b"here", "config.json": b"{}"})
    assert size == sum(values.nbytes for values in expected.values())
    assert not (out / UNFINISHED).exists()
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert len(files) == (1 if most > 100 else 4)
    found = {name: values for file in files for name, values in load_file(out / file).items()}
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert (out / "notes.txt").read_bytes() == b"here"
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == size
        assert all(name in load_file(out / file) for name, file in index["weight_map"].items())
        assert index["weight_map"].keys() == expected.keys()


def test_numbers_lie_aligned(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a", {"odd": Part.of("I8", np.arange(3)), "wide": Part.of("I64", np.arange(2))})
    data = (tmp_path / "a").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert (8 + length) % 8 == 0
    assert header["wide"]["data_offsets"] == [0, 16]
    assert header["odd"]["data_offsets"] == [16, 19]
