"""Hugging Face folders: specs read from configs, faults named, fingerprints that see every change."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import load_spec, open_checkpoint
from services.executor.models.dequantize import to_float32
from services.executor.models.hf import canonical_name
from services.executor.models.spec import RopeScaling
from services.executor.models.weights import expected_shapes, file_digest, fingerprint
from tests.fixtures.models import make_rand_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_rand_model(tmp_path)


def edit(folder: Path, file: str = "config.json", **values: Any) -> None:
    path = folder / file
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def rewrite(folder: Path, **tensors: np.ndarray | None) -> None:
    """Replaces tensors whose names end so; None removes."""
    found = load_file(folder / "model.safetensors")
    for end, value in tensors.items():
        for name in [name for name in found if name.endswith(end.replace("__", "."))]:
            del found[name]
            if value is not None:
                found[name] = value
    save_file(found, folder / "model.safetensors")


def refused(folder: Path, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        open_checkpoint(folder)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


def test_spec_of_a_plain_llama(folder: Path) -> None:
    edit(folder, eos_token_id=[7, 8], bos_token_id=3)
    edit(folder, "generation_config.json", eos_token_id=[9, 7])
    spec = load_spec(folder)
    assert (spec.layer_count, spec.hidden_size, spec.head_count, spec.kv_head_count, spec.head_size) == (
        2,
        64,
        4,
        2,
        16,
    )
    assert spec.eos_token_ids == (9, 7, 8)
    assert spec.bos_token_id == 3
    assert (spec.rope_theta, spec.rope_scaling, spec.tied_embeddings) == (10000.0, None, False)
    assert not spec.attention_bias


def test_absent_values_take_the_architectures_defaults(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    del config["head_dim"], config["rope_theta"], config["tie_word_embeddings"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").unlink()
    spec = load_spec(folder)
    assert (spec.head_size, spec.rope_theta, spec.tied_embeddings) == (16, 10000.0, False)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_rope_scaling_under_either_name(folder: Path, key: str) -> None:
    rope = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    edit(folder, **{key: rope | {"original_max_position_embeddings": 512}})
    assert load_spec(folder).rope_scaling == RopeScaling("llama3", 32.0, 1.0, 4.0, 512)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM is not supported"),
        ({"architectures": None}, "architecture none"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope scaling yarn"),
        ({"quantization_config": {"bits": 4}}, "quant_method none is not supported"),
        ({"sliding_window": 16}, "sliding window"),
        ({"hidden_size": "64"}, "hidden_size is '64'"),
        ({"hidden_size": 128}, r"tensor embedding has shape \[\d+, 64\], expected \[\d+, 128\]"),
        ({"num_hidden_layers": 3}, r"tensor layers\.2\.attention_norm \[64\] is missing"),
        ({"num_hidden_layers": 1}, r"tensor layers\.1\.\w+ is not part"),
        ({"num_attention_heads": 3}, "3 heads cannot share 2"),
        ({"vocab_size": 0}, "vocab_size is 0"),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused(folder: Path, values: dict[str, Any], message: str) -> None:
    edit(folder, **values)
    refused(folder, message)


def test_a_window_switched_off_is_none(folder: Path) -> None:
    edit(folder, sliding_window=16, use_sliding_window=False)
    assert load_spec(folder).context_length == 1024


def test_missing_tensors_and_other_shapes_are_named(folder: Path) -> None:
    rewrite(folder, layers__1__mlp__up_proj__weight=np.zeros((95, 64), np.float32))
    refused(folder, r"tensor layers\.1\.up has shape \[95, 64\], expected \[96, 64\]")
    rewrite(folder, layers__1__mlp__up_proj__weight=None)
    refused(folder, r"tensor layers\.1\.up \[96, 64\] is missing")


def test_an_untied_model_needs_its_head(folder: Path) -> None:
    rewrite(folder, lm_head__weight=None)
    refused(folder, "tensor head .* is missing")
    edit(folder, tie_word_embeddings=True)
    assert "head" not in expected_shapes(load_spec(folder))


def test_integer_weights_are_refused(folder: Path) -> None:
    rewrite(folder, model__norm__weight=np.ones(64, np.int32))
    with pytest.raises(QuireError, match="format I32"):
        open_checkpoint(folder).tensor("final_norm")


@pytest.mark.parametrize("kept", [0, 4, 100, 3000, -1])
def test_cut_files_are_refused(folder: Path, kept: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    refused(folder, "cut short|cannot be read")


@pytest.mark.parametrize("header", [b"[]", b"{", b'{"x": 1}', b'{"x": {"dtype": "F32", "shape": [2]}}'])
def test_broken_headers_are_refused(folder: Path, header: bytes) -> None:
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    refused(folder, "the header cannot be read")


def test_a_tensor_must_fill_its_bytes(folder: Path) -> None:
    header = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refused(folder, "does not fill its 4 bytes")


def test_folders_without_weights_or_config(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "neither model.safetensors nor its index")
    (folder / "config.json").unlink()
    refused(folder, r"config\.json cannot be read")
    refused(tmp_path / "absent", "neither a model folder nor a .gguf file")


def shard(folder: Path) -> dict[str, str]:
    """Splits the weights in two files; returns the weight map."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: f"model-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return places


def test_shards_read_like_one_file(folder: Path) -> None:
    whole = open_checkpoint(folder)
    expected = {name: to_float32(whole.tensor(name)).copy() for name in whole.shapes()}
    shard(folder)
    found = open_checkpoint(folder)
    assert [path.name for path in found.files()] == ["model-0.safetensors", "model-1.safetensors"]
    for name, values in expected.items():
        np.testing.assert_array_equal(to_float32(found.tensor(name)), values)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    refused(folder, r"names model-1\.safetensors, which is missing")


def test_shards_outside_the_folder_are_refused(folder: Path) -> None:
    places = shard(folder) | {"x": "../secret.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    refused(folder, "outside the folder")


def test_fingerprints_see_weights_spec_and_numerics(folder: Path) -> None:
    """F2: other weights under the same name never share a fingerprint."""

    def found(numerics: str) -> str:
        checkpoint = open_checkpoint(folder)
        return fingerprint(map(file_digest, checkpoint.files()), checkpoint.spec, numerics)

    seen = {found("a")}
    assert found("a") in seen
    seen.add(found("b"))
    edit(folder, rope_theta=5000.0)
    seen.add(found("a"))
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    seen.add(found("a"))
    assert len(seen) == 4
    assert all(len(value) == 64 for value in seen)


def test_names_of_buffers_are_skipped() -> None:
    assert canonical_name("model.layers.3.self_attn.rotary_emb.inv_freq") is None
    assert canonical_name("model.layers.12.self_attn.q_proj.bias") == "layers.12.q_bias"
    assert canonical_name("model.layers.0.mlp.experts.weight") == "model.layers.0.mlp.experts.weight"
