"""GGUF files: every format read as gguf reads it, llama's row order undone, faults named."""

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import load_spec, open_checkpoint
from services.executor.models.dequantize import to_float32
from services.executor.models.gguf_metadata import read_header
from services.executor.models.hf import HfCheckpoint
from services.executor.models.rope import inverse_frequencies
from services.executor.models.spec import RopeScaling
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.models import make_rand_model
from tests.unit.executor.torch_runs import Runs, token_ids

HEAD_SIZE = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_rand_model(tmp_path / "folder")


def test_llama_equals_its_folder(folder: Path, tmp_path: Path) -> None:
    found, expected = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder)), HfCheckpoint(folder)
    assert found.shapes() == expected.shapes()
    for name in expected.shapes():
        np.testing.assert_array_equal(to_float32(found.tensor(name)), to_float32(expected.tensor(name)))
    assert found.spec.eos_token_ids == (2, 5)
    assert found.spec.bos_token_id == 1
    assert (found.spec.head_size, found.spec.kv_head_count, found.spec.vocab_size) == (16, 2, expected.spec.vocab_size)


def test_biases_are_permuted_with_their_rows(tmp_path: Path) -> None:
    folder = make_rand_model(tmp_path / "folder", config={"attention_bias": True})
    found, expected = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder)), HfCheckpoint(folder)
    assert found.spec.attention_bias
    for name in ("layers.1.q_bias", "layers.1.k_bias", "layers.0.v_bias"):
        np.testing.assert_array_equal(to_float32(found.tensor(name)), to_float32(expected.tensor(name)))


def test_qwen2_rows_stay_in_place(folder: Path, tmp_path: Path) -> None:
    found = open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, architecture="qwen2"))
    expected = HfCheckpoint(folder)
    for name in ("layers.0.q", "layers.1.k"):
        np.testing.assert_array_equal(to_float32(found.tensor(name)), to_float32(expected.tensor(name)))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32"])
def test_formats_read_as_gguf_reads_them(folder: Path, tmp_path: Path, kind: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, gguf.GGMLQuantizationType[kind])
    found = open_checkpoint(path)
    reader = gguf.GGUFReader(path)
    for stored, name in (("token_embd.weight", "embedding"), ("blk.1.ffn_down.weight", "layers.1.down")):
        tensor = next(tensor for tensor in reader.tensors if tensor.name == stored)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(to_float32(found.tensor(name)), expected)
        assert found.tensor(name).format == kind


def test_rope_factors_are_llama3_scaling(folder: Path, tmp_path: Path) -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
    plain, scaled = (inverse_frequencies(HEAD_SIZE, 10000.0, kind) for kind in (None, scaling))
    path = write_gguf(tmp_path / "m.gguf", folder, rope_factors=plain / scaled)
    spec = load_spec(path)
    assert spec.rope_scaling is not None
    np.testing.assert_allclose(inverse_frequencies(HEAD_SIZE, 10000.0, spec.rope_scaling), scaled, rtol=1e-6)
    assert not np.allclose(plain, scaled)


def test_logits_equal_the_folders(folder: Path, tmp_path: Path) -> None:
    ids = token_ids(0, 100, 256)
    path = write_gguf(tmp_path / "m.gguf", folder)
    assert torch.equal(Runs(path).prefill(0, ids, 40), Runs(folder).prefill(0, ids, 40))


def test_header_equals_gguf_readers(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder, gguf.GGMLQuantizationType.Q8_0)
    header, reader = read_header(path), gguf.GGUFReader(path)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF."):
            assert header.fields[name] == field.contents()
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.offset, info.byte_count) == (tensor.data_offset, tensor.n_bytes)
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
    assert read_header(path, arrays="none").fields["tokenizer.ggml.tokens"] == []


@pytest.mark.parametrize("kept", [0, 3, 20, 200, 5000, -1])
def test_cut_files_are_refused(folder: Path, tmp_path: Path, kept: int) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(QuireError, match=r"cut short|not a GGUF") as error:
        open_checkpoint(path)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


def test_absurd_lengths_in_the_header_are_refused(folder: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", folder)
    data = bytearray(path.read_bytes())
    data[24:32] = struct.pack("<Q", 1 << 62)  # length of the first field's name
    path.write_bytes(data)
    with pytest.raises(QuireError, match="cut short"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "mamba"}, "architecture mamba is not supported"),
        ({"skip": "blk.1.ffn_up.weight"}, r"tensor layers\.1\.up .* is missing"),
        ({"skip": "token_embd.weight"}, r"token_embd\.weight is missing"),
        ({"llama__expert_count": 4}, "mixtures of experts"),
        ({"llama__rope__dimension_count": 8}, "part of the head"),
        ({"llama__attention__key_length": 32}, r"tensor layers\.0\.q has shape"),
        ({"split__count": 2}, "split in parts"),
        ({"rope_factors": np.ones(5, np.float32)}, "5 rope factors"),
    ],
    ids=str,
)
def test_faults_are_named(folder: Path, tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        open_checkpoint(write_gguf(tmp_path / "m.gguf", folder, **options))
    assert error.value.reason is Reason.MODEL_LOAD_FAILED
