"""The torch backend against transformers and against a float64 forward pass written apart."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.common.errors import QuireError, Reason
from services.executor.backends.base import KvShape, PromptScoreRows, SampleRow, SamplingRule, StepInputs
from services.executor.backends.torch_backend import TorchBackend
from services.executor.models.checkpoint import open_checkpoint
from tests.fixtures.models import LLAMA3_SCALING, make_rand_model, reference_logits
from tests.unit.executor.torch_runs import BLOCK_SIZE, Runs, token_ids

BUDGET = {"fp32": 2e-4, "bf16": 0.35, "fp16": 0.05}
"""Largest difference of a logit; logits reach about 10."""

LLAMA3 = LLAMA3_SCALING | {"rope_theta": 10000.0}


def load(path: Path, *, dtype: str = "fp32", context_length: int | None = None) -> TorchBackend:
    return TorchBackend.load(open_checkpoint(path), dtype=dtype, threads=1, context_length=context_length, device="cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def save_hf(path: Path, kind: str, shard_size: str = "5GB", **config: Any) -> torch.nn.Module:
    """A tiny random model of transformers, saved as a folder."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

    classes = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM)}
    sizes = {
        "vocab_size": 199,
        "hidden_size": 48,
        "intermediate_size": 100,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
    }
    torch.manual_seed(7)
    config_class, model_class = classes[kind]
    model: torch.nn.Module = model_class(config_class(**(sizes | config))).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # zero after initialization
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(path, max_shard_size=shard_size)
    return model


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"num_key_value_heads": 6}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 20}),
        ("llama", {"rope_parameters": LLAMA3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}}),
        ("llama", {"shard_size": "30KB"}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 3}),
    ],
    ids=str,
)
def test_logits_equal_transformers(tmp_path: Path, kind: str, config: dict[str, Any]) -> None:
    model = save_hf(tmp_path, kind, **config)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == ("shard_size" in config)
    ids = token_ids(0, 200, 199)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0]
    runs = Runs(tmp_path)
    found = [runs.step({0: ids[:150]})[0]] + [runs.step({0: [token]})[0] for token in ids[150:]]
    assert float(expected.abs().max()) > 3
    assert float((torch.stack(found) - expected[149:]).abs().max()) < BUDGET["fp32"]


@pytest.mark.parametrize("dtype", BUDGET)
def test_mixed_batches_equal_an_uncached_pass(tmp_path: Path, dtype: str) -> None:
    """Prompts in chunks beside decodes, every unused slot NaN."""
    path = make_rand_model(tmp_path, seed=3)
    runs = Runs(path, dtype)
    prompts = {i: token_ids(i, 5 + 37 * i, runs.backend.spec.vocab_size) for i in range(4)}
    last: dict[int, torch.Tensor] = {}
    fed = dict.fromkeys(prompts, 0)
    while any(fed[i] < len(prompt) for i, prompt in prompts.items()):
        sizes = {i: 1 if fed[i] > 90 else 29 for i in prompts if fed[i] < len(prompts[i])}
        last |= runs.step({i: prompts[i][fed[i] : fed[i] + size] for i, size in sizes.items()})
        fed = {i: fed[i] + sizes.get(i, 0) for i in fed}
    for i, prompt in prompts.items():
        expected = reference_logits(path, prompt)[-1]
        assert float((last[i] - expected).abs().max()) < BUDGET[dtype]


def test_prompt_scores_match_a_whole_pass(tmp_path: Path) -> None:
    path = make_rand_model(tmp_path)
    runs = Runs(path)
    ids = token_ids(5, 150, runs.backend.spec.vocab_size)
    runs.step({3: ids[:20]})
    runs.step({7: [1, 2], 3: ids[20:]}, [PromptScoreRows(first_row=2, targets=ids[21:], count=2)])
    expected = reference_logits(path, ids).log_softmax(-1)
    (scores,) = runs.scores
    assert len(scores.chosen) == len(ids) - 21
    for i, (chosen, top) in enumerate(zip(scores.chosen, scores.top_ids, strict=True)):
        row = expected[20 + i]
        assert chosen == pytest.approx(float(row[ids[21 + i]]), abs=1e-4)
        assert top == row.topk(2).indices.tolist()


def test_copied_blocks_serve_another_sequence(tmp_path: Path) -> None:
    runs = Runs(make_rand_model(tmp_path))
    ids = token_ids(6, 2 * BLOCK_SIZE, runs.backend.spec.vocab_size)
    expected = runs.prefill(0, [*ids, 9], 1000)
    runs.backend.copy_blocks([(int(runs.tables[0, i]), int(runs.tables[1, i])) for i in range(2)])
    runs.computed[1] = len(ids)
    assert torch.equal(runs.step({1: [9]})[1], expected)


def test_samples_for_itself(tmp_path: Path) -> None:
    path = make_rand_model(tmp_path)
    backend = load(path, context_length=100)
    assert backend.spec.context_length == 100
    backend.allocate_kv(KvShape(8, backend.kv_block_bytes(8), 4))
    ids = token_ids(1, 13, backend.spec.vocab_size)
    arrays = [np.array(values, np.int32) for values in (ids, range(13), [0, 13], [13], [[2, 1]])]
    greedy = SampleRow(12, SamplingRule(temperature=0.0, logprob_count=1), ids, [])
    (sampled,) = backend.step(StepInputs(*arrays, [greedy])).sampled
    assert sampled is not None
    assert sampled.token_id == int(reference_logits(path, ids)[-1].argmax())
    assert sampled.scores is not None
    assert sampled.scores.top_ids == [[sampled.token_id]]


def test_a_step_may_sample_nothing(tmp_path: Path) -> None:
    backend = load(make_rand_model(tmp_path))
    backend.allocate_kv(KvShape(8, backend.kv_block_bytes(8), 4))
    arrays = [np.array(values, np.int32) for values in ([1, 2], [0, 1], [0, 2], [2], [[3]])]
    assert backend.step(StepInputs(*arrays, [])).sampled == []


def test_logits_of_any_rows(tmp_path: Path) -> None:
    """A whole step: rows in the order asked for, and KV that later steps see."""
    path = make_rand_model(tmp_path)
    backend = load(path)
    backend.allocate_kv(KvShape(8, backend.kv_block_bytes(8), 8))
    first, second = [*b"one text"], [*b"another"]
    of_first, of_second = reference_logits(path, first), reference_logits(path, second)

    def logits(ids: list[int], positions: list[int], starts: list[int], rows: list[int]) -> torch.Tensor:
        contexts = [positions[end - 1] + 1 for end in starts[1:]]
        arrays = (np.array(values, np.int32) for values in (ids, positions, starts, contexts, [[5], [2]]))
        found = backend.logits(StepInputs(*arrays, []), rows)
        assert found.dtype == np.float32
        return torch.from_numpy(found)

    found = logits(first[:6] + second[:2], [*range(6), 0, 1], [0, 6, 8], [7, 2, 2])
    assert float((found - torch.stack([of_second[1], of_first[2], of_first[2]])).abs().max()) < BUDGET["fp32"]
    found = logits(first[6:] + second[2:], [6, 7, *range(2, 7)], [0, 2, 7], [*range(7)])
    assert float((found - torch.cat((of_first[6:], of_second[2:]))).abs().max()) < BUDGET["fp32"]
    assert logits([1, 1], [0, 0], [0, 1, 2], []).shape == (0, backend.spec.vocab_size)


@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_block_bytes_are_what_is_allocated(tmp_path: Path, dtype: str, size: int) -> None:
    backend = load(make_rand_model(tmp_path), dtype=dtype)
    assert backend.kv_block_bytes(8) == 2 * 2 * 2 * 16 * 8 * size  # layers, keys and values, heads, width, slots
    backend.allocate_kv(KvShape(8, backend.kv_block_bytes(8), 5))
    assert backend._kv is not None
    assert backend._kv.nbytes == 5 * backend.kv_block_bytes(8)


def test_auto_names_a_real_format(tmp_path: Path) -> None:
    backend = load(make_rand_model(tmp_path), dtype="auto")
    assert backend.dtype in ("fp32", "bf16")
    assert backend.dtype in backend.numerics


@pytest.mark.parametrize("length", [0, 1025])
def test_refuses_a_context_beyond_the_models(tmp_path: Path, length: int) -> None:
    with pytest.raises(QuireError, match="context_length") as error:
        load(make_rand_model(tmp_path), context_length=length)
    assert error.value.reason is Reason.INVALID_FIELD


def test_not_finite_weights_are_named(tmp_path: Path) -> None:
    from safetensors.numpy import load_file, save_file

    path = make_rand_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = np.inf
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(QuireError, match=r"layers\.1\.up holds NaN or infinity") as error:
        load(path)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


def test_large_finite_weights_pass(tmp_path: Path) -> None:
    """The sum of all of them overflows; none of them is infinite."""
    from safetensors.numpy import load_file, save_file

    path = make_rand_model(tmp_path)
    tensors = load_file(path / "model.safetensors")
    tensors["model.embed_tokens.weight"][:2, :2] = 3e38
    save_file(tensors, path / "model.safetensors")
    load(path)
