"""What is read of a model without its weights: configs of many families, headers of files, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import constants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.common.errors import QuireError, Reason
from services.executor.kv_bytes import KvDims
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.config_fields import read_sizes
from services.executor.models.outline import Outline, read_outline
from services.executor.models.parameters import count_parameters
from services.executor.models.weights import expected_shapes
from tests.fixtures.models import make_rand_model

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64
}  # fmt: skip
QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "use_sliding_window": False, "sliding_window": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536,
    "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 8192, "torch_dtype": "bfloat16", "tie_word_embeddings": True,
}  # fmt: skip
SMOLLM2_1_7B = SMOLLM2_135M | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "num_key_value_heads": 32,
}  # fmt: skip


def outline_of(tmp_path: Path, config: Any) -> Outline:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return read_outline(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("config", "kv", "parameters"),
    [
        (LLAMA_8B, KvDims(32, 8, 128, 128), 8_030_261_248),
        (LLAMA_70B, KvDims(80, 8, 128, 128), 70_553_706_496),
        (QWEN_7B, KvDims(28, 4, 128, 128), 7_615_616_512),
        (SMOLLM2_135M, KvDims(30, 3, 64, 64), 134_515_008),
        (SMOLLM2_1_7B, KvDims(24, 32, 64, 64), 1_711_376_384),
    ],
    ids=["llama-8b", "llama-70b", "qwen-7b", "smollm2-135m", "smollm2-1.7b"],
)
def test_well_known_models(tmp_path: Path, config: dict[str, Any], kv: KvDims, parameters: int) -> None:
    outline = outline_of(tmp_path, config)
    assert outline.kv == kv
    assert outline.weights.parameters.total == parameters
    assert outline.weights.parameters.size("bf16") == 2 * parameters
    assert (outline.weights.is_exact, outline.weights.dtype, outline.weights.stored_bytes) == (True, "bf16", None)
    assert outline.context_length == config["max_position_embeddings"]
    assert outline.notes == ()


def test_a_folder_without_weights_will_do(tmp_path: Path) -> None:
    outline_of(tmp_path, LLAMA_8B)
    assert read_outline(str(tmp_path)).weights.parameters.total == 8_030_261_248


@pytest.mark.parametrize(
    "config", [{}, {"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True}], ids=str
)
def test_the_number_of_weights_is_what_loading_expects(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = make_rand_model(tmp_path / "m", config=config)
    spec = open_checkpoint(folder).spec
    expected = sum(math.prod(shape) for shape in expected_shapes(spec).values())
    whole = read_outline(str(folder)).weights
    assert (whole.parameters.total, whole.dtype, whole.stored_bytes) == (expected, "fp32", 4 * expected)
    (folder / "model.safetensors").unlink()
    alone = read_outline(str(folder)).weights
    assert (alone.parameters, alone.stored_bytes, alone.is_exact) == (whole.parameters, None, True)


def test_an_index_without_its_shards_states_the_bytes(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"model.norm.weight": "model-00001-of-1"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert outline_of(tmp_path, LLAMA_8B).weights.stored_bytes == 16_060_522_496


@pytest.mark.parametrize("index", [{}, {"weight_map": 3}, {"weight_map": {"a": 3}}, {"weight_map": {}, "metadata": 1}])
def test_an_index_of_something_else_is_named(tmp_path: Path, index: dict[str, Any]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(QuireError, match=r"model\.safetensors\.index\.json: no index of weights"):
        outline_of(tmp_path, LLAMA_8B)


def test_an_index_that_says_nothing_leaves_the_config(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert outline_of(tmp_path, LLAMA_8B).weights.source == "config.json"


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


@pytest.mark.parametrize(
    ("config", "kv", "note"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
             "n_positions": 1024, "vocab_size": 50257},
            KvDims(12, 12, 64, 64), "as many as there are heads",
        ),
        (
            {"architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544, "multi_query": True,
             "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024, "torch_dtype": "bfloat16"},
            KvDims(32, 1, 64, 64), "no backend computes FalconForCausalLM",
        ),
        (
            LLAMA_8B | {"architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "head_dim": 128},
            KvDims(32, 8, 128, 128), "no backend computes Qwen3ForCausalLM",
        ),
        (LLAMA_8B | {"sliding_window": 4096}, KvDims(32, 8, 128, 128), "sliding_window 4096"),
        (
            {"architectures": ["Some"], "text_config": without(LLAMA_8B, "architectures")},
            KvDims(32, 8, 128, 128), "no backend computes Some",
        ),
        (
            LLAMA_8B | {"layer_types": [*["linear_attention"] * 3, "full_attention"] * 8},
            KvDims(8, 8, 128, 128), "8 of 32 layers keep KV",
        ),
        (
            LLAMA_8B | {"num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
            KvDims(61, 1, 576, 0), "latent attention",
        ),
        (LLAMA_8B | {"quantization_config": {"quant_method": "gptq", "bits": 4}}, KvDims(32, 8, 128, 128), "q4_1"),
    ],
    ids=["gpt2", "falcon", "head_dim", "window", "text_config", "hybrid", "latent", "quantized"],
)  # fmt: skip
def test_other_families(tmp_path: Path, config: dict[str, Any], kv: KvDims, note: str) -> None:
    outline = outline_of(tmp_path, config)
    assert outline.kv == kv
    assert any(note in said for said in outline.notes), outline.notes


def test_a_mixture_counts_all_its_experts(tmp_path: Path) -> None:
    """Mixtral 8x7B has 46.7 billion weights."""
    mixtral = LLAMA_8B | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "vocab_size": 32000}
    weights = outline_of(tmp_path, mixtral).weights
    assert weights.parameters.total == 46_702_792_704
    assert not weights.is_exact


def test_gpt2_is_about_right(tmp_path: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024, "vocab_size": 50257}
    assert outline_of(tmp_path, gpt2).weights.parameters.total == pytest.approx(124_439_808, rel=0.01)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (without(LLAMA_8B, "num_hidden_layers"), "num_hidden_layers is missing"),
        (without(LLAMA_8B, "num_attention_heads"), "num_attention_heads is missing"),
        (without(LLAMA_8B, "hidden_size"), "hidden_size is missing"),
        (without(LLAMA_8B, "vocab_size"), "vocab_size is missing"),
        (LLAMA_8B | {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        (LLAMA_8B | {"num_hidden_layers": True}, "num_hidden_layers is True"),
        (LLAMA_8B | {"num_key_value_heads": -8}, "num_key_value_heads is -8"),
        (LLAMA_8B | {"num_key_value_heads": [8] * 32}, r"num_key_value_heads is \[8"),
        (LLAMA_8B | {"num_key_value_heads": 7}, "32 heads cannot share 7"),
        (LLAMA_8B | {"head_dim": "128"}, "head_dim is '128'"),
        (LLAMA_8B | {"hidden_size": 16}, "head_dim"),
        (LLAMA_8B | {"is_encoder_decoder": True}, "is_encoder_decoder"),
        (LLAMA_8B | {"architectures": {}, "torch_dtype": 7, "hidden_size": None}, "hidden_size is missing"),
        (LLAMA_8B | {"layer_types": ["mamba"] * 32}, "layer_types"),
        ([1], "expected an object"),
    ],
)  # fmt: skip
def test_bad_configs_name_the_field(tmp_path: Path, config: Any, said: str) -> None:
    with pytest.raises(QuireError, match=said):
        outline_of(tmp_path, config)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**12) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
_FIELDS = [
    *LLAMA_8B, "head_dim", "text_config", "layer_types", "quantization_config", "kv_lora_rank", "qk_rope_head_dim",
    "multi_query", "sliding_window", "use_sliding_window", "num_experts", "n_shared_experts", "attention_bias",
    "is_encoder_decoder",
]  # fmt: skip


@settings(suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(st.dictionaries(st.sampled_from(_FIELDS), _JSON, max_size=3))
def test_whatever_a_config_says_is_an_answer_or_a_named_error(fields: dict[str, Any]) -> None:
    try:
        sizes = read_sizes(LLAMA_8B | fields)
    except QuireError as error:
        said = error.message
    else:
        assert count_parameters(sizes.layers).total > 0
        return
    assert said.startswith("config.json: ")


def test_what_is_no_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(4))
    for source, reason in (
        ("nothing", Reason.MODEL_NOT_FOUND),
        (str(tmp_path / "absent.json"), Reason.MODEL_NOT_FOUND),
        ("owner/name:file.gguf", Reason.MODEL_NOT_FOUND),
        ("owner/name", Reason.MODEL_LOAD_FAILED),
        (str(tmp_path / "bad.json"), Reason.MODEL_LOAD_FAILED),
        (str(tmp_path / "bad.gguf"), Reason.MODEL_LOAD_FAILED),
        (str(tmp_path), Reason.MODEL_LOAD_FAILED),
    ):
        with pytest.raises(QuireError) as failure:
            read_outline(source)
        assert failure.value.reason is reason, (source, failure.value)


def test_a_config_in_the_hubs_cache_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps(LLAMA_8B))
    assert read_outline("org/name").kv == KvDims(32, 8, 128, 128)


def write_gguf(path: Path, architecture: str, **fields: int | list[int]) -> Path:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"block_count": 2, "embedding_length": 64, "context_length": 256, "attention.head_count": 4} | fields
    for key, value in sizes.items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(f"{architecture}.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((10, 64), np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(64, np.float32))
    writer.add_tensor("rope_freqs.weight", np.zeros(8, np.float32))  # no weights
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((32, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_of_any_architecture(tmp_path: Path) -> None:
    fields = {"attention.head_count_kv": 2, "attention.key_length": 48, "attention.value_length": 32}
    outline = read_outline(str(write_gguf(tmp_path / "m.gguf", "gemma3", **fields)))
    assert (outline.kv, outline.context_length) == (KvDims(2, 2, 48, 32), 256)
    assert outline.weights.parameters.total == 10 * 64 + 64 + 32 * 32
    assert outline.weights.stored_bytes == 4 * (10 * 64 + 64) + 32 * 34
    assert outline.notes == ("no backend computes gemma3",)
    plain = read_outline(str(write_gguf(tmp_path / "n.gguf", "llama")))
    assert (plain.kv, plain.notes) == (KvDims(2, 4, 16, 16), ())


def test_a_gguf_whose_layers_differ_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "openelm", **{"attention.head_count_kv": [1, 2]})
    with pytest.raises(QuireError, match="head_count_kv differs between layers"):
        read_outline(str(path))


def test_a_gguf_without_sizes_names_the_field(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"llama\.block_count is 0"):
        read_outline(str(write_gguf(tmp_path / "m.gguf", "llama", block_count=0)))
