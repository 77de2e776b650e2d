"""NaN, infinity and what the files cannot hold end a run, which names the tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.common.errors import QuireError, Reason
from services.executor.quantize import run
from services.executor.quantize.choice import Choice
from tests.fixtures.models import make_rand_model
from tests.unit.executor.quantize.test_quantize import no_bar, request


def spoilt(source: Path, name: str, place: Any, change: Callable[[Any], Any]) -> Path:
    """The model with some numbers of a tensor replaced."""
    weights = load_file(source / "model.safetensors")
    weights[name][place] = change(weights[name][place])
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return source


def no_number(values: Any) -> Any:
    return np.nan


def too_large(values: Any) -> Any:
    return values * np.float32(1e7)


Q, HEAD, EMBEDDING = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight", "model.embed_tokens.weight"
FP16_SCALES = [Choice("rtn"), Choice("gptq"), Choice("awq"), Choice("gptq", bits_per_weight=5.0)]


@pytest.mark.parametrize("choice", [*FP16_SCALES, Choice("smoothquant")], ids=str)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", HEAD, EMBEDDING])
def test_weights_that_are_no_numbers_are_refused(tmp_path: Path, choice: Choice, name: str) -> None:
    source = spoilt(make_rand_model(tmp_path / "source"), name, 3, no_number)
    with pytest.raises(QuireError, match=r"tensor (layers\.1\.up|head|embedding) holds NaN or infinity") as refused:
        run.quantize_model(request(source, choice), tmp_path / "out", no_bar)
    assert refused.value.reason is Reason.MODEL_LOAD_FAILED
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize("choice", FP16_SCALES, ids=str)
def test_weights_that_scales_cannot_reach_are_refused(tmp_path: Path, choice: Choice) -> None:
    source = spoilt(make_rand_model(tmp_path / "source"), Q, (slice(0, 8), 5), too_large)
    said = r"layer 0: scales of q: not all" if choice.bits_per_weight is None else r"rounding layers\.0\.qkv would cost"
    with pytest.raises(QuireError, match=said) as refused:
        run.quantize_model(request(source, choice), tmp_path / "out", no_bar)
    assert refused.value.reason is Reason.NOT_FINITE


@pytest.mark.parametrize("choice", [Choice("rtn"), Choice("gptq")], ids=str)
def test_numbers_that_16_bits_cannot_hold_are_refused(tmp_path: Path, choice: Choice) -> None:
    source = make_rand_model(tmp_path / "source")
    weights = load_file(source / "model.safetensors")
    weights[EMBEDDING] = weights[EMBEDDING].astype(np.float16)
    weights["model.layers.1.post_attention_layernorm.weight"][3] = 7e4
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(QuireError, match=r"tensor layers\.1\.mlp_norm in F16: not all numbers are finite"):
        run.quantize_model(request(source, choice), tmp_path / "out", no_bar)
