"""Quantized folders: the same model as its numbers written out plainly, whatever the scheme; labels that are wrong."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.dequantize import to_float32
from services.executor.models.hf import canonical_name
from services.executor.models.outline import read_outline
from services.executor.models.weights import QuantizedTensor, expected_shapes, file_digest, fingerprint
from services.executor.quant.parts import Part
from tests.fixtures.models import make_rand_model
from tests.fixtures.quantized import MATRIX, SCHEMES, edit_config, quantize_folder, write_parts
from tests.unit.executor.torch_runs import Runs, token_ids


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that leave short groups: 96 inputs in groups of 64, blocks of 48 columns."""
    return make_rand_model(tmp_path_factory.mktemp("quantized") / "m", config={"attention_bias": True})


@pytest.fixture(scope="module", params=SCHEMES)
def folders(request: pytest.FixtureRequest, plain: Path) -> tuple[Path, Path]:
    return quantize_folder(plain, request.param)


def test_every_tensor_is_the_plain_one(folders: tuple[Path, Path]) -> None:
    quantized, same = map(open_checkpoint, folders)
    assert quantized.spec == same.spec
    assert quantized.shapes() == same.shapes()
    for name in same.shapes():
        tensor = quantized.tensor(name)
        np.testing.assert_array_equal(to_float32(tensor), to_float32(same.tensor(name)))
        assert quantized.formats()[name] == tensor.format
    names = {canonical_name(name) for name in load_file(folders[1] / "model.safetensors") if MATRIX.fullmatch(name)}
    assert {name for name in same.shapes() if isinstance(quantized.tensor(name), QuantizedTensor)} == names


def test_logits_are_the_plain_ones(folders: tuple[Path, Path]) -> None:
    torch.set_num_threads(1)
    ids = token_ids(3, 40, 256)
    found, expected = (Runs(folder).step({0: ids})[0] for folder in folders)
    assert float(expected.abs().max()) > 1
    assert torch.equal(found, expected)


def test_an_outline_counts_weights_rather_than_words(folders: tuple[Path, Path]) -> None:
    quantized, same = folders
    outline = read_outline(str(quantized))
    assert outline.weights.parameters == read_outline(str(same)).weights.parameters
    assert outline.weights.is_exact
    assert outline.weights.dtype in ("q4_1", "q8_0")
    stored = (quantized / "model.safetensors").read_bytes()
    assert outline.weights.stored_bytes == len(stored) - 8 - int.from_bytes(stored[:8], "little")


def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def parts_of(folder: Path) -> dict[str, Part]:
    from services.executor.models.safetensors_file import SafetensorsFile

    file = SafetensorsFile(folder / "model.safetensors")
    return {
        name: Part(part.format, part.shape, part.data.copy()) for name in file.entries for part in [file.part(name)]
    }


def refused(folder: Path, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        open_checkpoint(folder)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


@pytest.fixture
def gptq(plain: Path, tmp_path: Path) -> Path:
    return quantize_folder(Path(shutil.copytree(plain, tmp_path / "m")), "gptq-4")[0]


def test_another_label_is_another_model(gptq: Path) -> None:
    """What words mean hangs on the label: nothing kept under the old one may be found again."""

    def found() -> str:
        checkpoint = open_checkpoint(gptq)
        return fingerprint(map(file_digest, checkpoint.files()), checkpoint.spec, "x")

    first = found()
    label = json.loads((gptq / "config.json").read_text())["quantization_config"]
    edit_config(gptq, quantization_config=label | {"checkpoint_format": "gptq_v2"})
    assert found() != first


def test_labels_in_files_of_their_own(gptq: Path) -> None:
    label = json.loads((gptq / "config.json").read_text())["quantization_config"]
    expected = open_checkpoint(gptq).formats()
    edit_config(gptq, quantization_config=None)
    refused(gptq, r"tensor layers\.\d\.\w+ is stored as g_idx, qweight, qzeros, scales, but no quantization_config")
    del label["quant_method"]
    (gptq / "quantize_config.json").write_text(json.dumps(label))
    checkpoint = open_checkpoint(gptq)
    assert checkpoint.formats() == expected
    assert checkpoint.files()[-1].name == "quantize_config.json"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method bitsandbytes is not supported; supported: gptq, awq"),
        ({"bits": 4}, "quant_method none is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, r"layers\.0\.\w+ \[.*\]: g_idx is no part of it"),
        ({"quant_method": "fp8"}, "g_idx is no part of it"),
        ("gptq", "quantization_config is 'gptq', expected an object"),
    ],
    ids=str,
)
def test_labels_of_something_else(gptq: Path, label: Any, message: str) -> None:
    edit_config(gptq, quantization_config=label)
    refused(gptq, message)


def test_a_plain_checkpoint_under_a_label(plain: Path, tmp_path: Path) -> None:
    folder = copy_of(plain, tmp_path)
    edit_config(folder, quantization_config=SCHEMES["gptq-4"][0])
    refused(folder, "says gptq, but no matrix is stored so")


def test_matrices_may_stay_plain(plain: Path, tmp_path: Path) -> None:
    quantized, same = quantize_folder(copy_of(plain, tmp_path), "packed-4")
    parts, numbers = parts_of(quantized), parts_of(same)
    kept = "model.layers.1.mlp.down_proj."
    mixed = {name: part for name, part in parts.items() if not name.startswith(kept)}
    write_parts(quantized / "model.safetensors", mixed | {f"{kept}weight": numbers[f"{kept}weight"]})
    checkpoint = open_checkpoint(quantized)
    assert checkpoint.formats()["layers.1.down"] == "F32"
    expected = open_checkpoint(same)
    for name in expected_shapes(expected.spec):
        np.testing.assert_array_equal(to_float32(checkpoint.tensor(name)), to_float32(expected.tensor(name)))


def test_a_plain_and_a_quantized_matrix_of_one_name(gptq: Path) -> None:
    extra = Part.of("F32", np.zeros((96, 64)))
    write_parts(gptq / "model.safetensors", parts_of(gptq) | {"model.layers.0.mlp.up_proj.weight": extra})
    refused(gptq, r"layers\.0\.up \[96, 64\]: weight is no part of it")


def test_a_missing_part_and_a_layer_too_many(gptq: Path) -> None:
    parts = parts_of(gptq)
    lost = parts.pop("model.layers.1.mlp.up_proj.qzeros")
    write_parts(gptq / "model.safetensors", parts)
    refused(gptq, r"layers\.1\.up \[96, 64\]: qzeros is missing")
    write_parts(gptq / "model.safetensors", parts | {"model.layers.7.mlp.up_proj.qzeros": lost})
    refused(gptq, r"layers\.1\.up|layers\.7\.up is stored as qzeros, but is no matrix of this model")


def test_scales_that_are_not_finite_are_named(gptq: Path) -> None:
    parts = parts_of(gptq)
    parts["model.layers.1.mlp.up_proj.scales"].array()[1, 3] = np.inf
    write_parts(gptq / "model.safetensors", parts)
    with pytest.raises(QuireError, match=r"tensor layers\.1\.up holds NaN or infinity"):
        Runs(gptq)


def test_scales_of_an_fp8_cache_are_no_weights(plain: Path, tmp_path: Path) -> None:
    quantized, same = quantize_folder(copy_of(plain, tmp_path), "float8")
    one = Part.of("F32", np.ones(1))
    extra = {f"model.layers.0.self_attn.{name}": one for name in ("k_scale", "v_scale", "k_proj.output_scale")}
    write_parts(quantized / "model.safetensors", parts_of(quantized) | extra)
    assert open_checkpoint(quantized).shapes() == open_checkpoint(same).shapes()


def test_a_quantized_head(plain: Path, tmp_path: Path) -> None:
    quantized, same = quantize_folder(copy_of(plain, tmp_path), "gptq-8-rows")
    numbers = parts_of(same)
    rounded, stored = SCHEMES["gptq-8-rows"][1](numbers["lm_head.weight"].array())
    parts = parts_of(quantized) | {f"lm_head.{part}": value for part, value in stored.items()}
    del parts["lm_head.weight"]
    write_parts(quantized / "model.safetensors", parts)
    np.testing.assert_array_equal(to_float32(open_checkpoint(quantized).tensor("head")), rounded.dequantize())


@pytest.mark.parametrize("kept", [8, 200, 4000, -1])
def test_cut_files_are_refused(gptq: Path, kept: int) -> None:
    path = gptq / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(gptq, "cut short|cannot be read")


def test_no_pickle_is_opened(gptq: Path) -> None:
    (gptq / "model.safetensors").rename(gptq / "pytorch_model.bin")
    refused(gptq, "neither model.safetensors nor its index")
