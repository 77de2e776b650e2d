"""The reference model computes what the model did that it was made from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.off_grid import WEIGHTS, check, permuted
from tests.fixtures.models import make_rand_model, reference_logits

IDS = list(range(40, 80))


def permuted_copy(of: Path, to: Path) -> Path:
    shutil.copytree(of, to)
    config = json.loads((of / "config.json").read_text())
    save_file(permuted(config, load_file(of / WEIGHTS)), to / WEIGHTS, metadata={"format": "pt"})
    return to


@pytest.mark.parametrize(
    ("shape", "config"),
    [
        ({}, {}),
        ({"heads": 6, "kv_heads": 1, "hidden": 96}, {"tie_word_embeddings": True}),
        ({"kv_heads": 4}, {"attention_bias": True, "mlp_bias": True}),
    ],
)
def test_the_function_stays(tmp_path: Path, shape: dict[str, int], config: dict[str, bool]) -> None:
    path = make_rand_model(tmp_path / "plain", config=config, **shape)
    made = permuted_copy(path, tmp_path / "made")
    torch.testing.assert_close(reference_logits(made, IDS), reference_logits(path, IDS), rtol=0, atol=1e-9)


def test_every_matrix_is_in_another_order_and_holds_the_same_numbers(tmp_path: Path) -> None:
    path = make_rand_model(tmp_path / "plain")
    before = load_file(path / WEIGHTS)
    after = load_file(permuted_copy(path, tmp_path / "made") / WEIGHTS)
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert not torch.equal(after[name], tensor), name
        assert torch.equal(after[name].flatten().sort().values, tensor.flatten().sort().values), name


def test_groups_of_columns_are_mixed(tmp_path: Path) -> None:
    """Of each matrix but o, whose heads stay apart, new groups of 32 take columns of many old ones."""
    path = make_rand_model(tmp_path / "plain", hidden=128, intermediate=256, heads=4, kv_heads=2, head_size=32)
    marked = {
        name: torch.arange(tensor.shape[-1]).float().expand(tensor.shape).contiguous()
        for name, tensor in load_file(path / WEIGHTS).items()
    }
    config = json.loads((path / "config.json").read_text())
    for name, tensor in permuted(config, marked).items():
        if tensor.ndim == 2 and "o_proj" not in name:
            groups = (tensor[0] // 32).reshape(-1, 32)
            assert all(len(group.unique()) > 2 for group in groups), name


def test_a_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    path = make_rand_model(tmp_path / "plain")
    made = permuted_copy(path, tmp_path / "made")
    check(path, made)
    tensors = load_file(made / WEIGHTS)
    tensors["model.layers.1.self_attn.v_proj.weight"] *= 1.01
    save_file(tensors, made / WEIGHTS, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="does not compute what"):
        check(path, made)
