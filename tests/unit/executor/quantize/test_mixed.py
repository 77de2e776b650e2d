"""`--auto`: what is measured, what is chosen, and that it is written so that it can be read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.weights import expected_shapes
from services.executor.quantize import run
from services.executor.quantize.choice import CalibrationSize, Choice, Source
from services.executor.quantize.differentiable import Angles, logits, run_layer
from services.executor.quantize.grid import Grid, round_to_nearest
from services.executor.quantize.layer import GROUPS, matrix_names, read_layer
from services.executor.quantize.mixed import check_bits, spend, stored_bytes
from services.executor.quantize.recipe import candidates, plan
from services.executor.quantize.sensitivity import measure_losses
from services.executor.quantize.stream import embed
from tests.fixtures.models import make_rand_model, reference_logits
from tests.unit.executor.torch_runs import Runs

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 12
AUTO = Choice("gptq", bits_per_weight=5.0)


@contextmanager
def no_bar(what: str, done: int, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


def request(path: Path, choice: Choice) -> run.Request:
    return run.Request(Source(str(path), path, TEXT, CalibrationSize(6, 64), 1), choice)


def test_computes_as_the_reference(tmp_path: Path) -> None:
    path = make_rand_model(tmp_path / "model", config={"attention_bias": True, "mlp_bias": True})
    checkpoint = open_checkpoint(path)
    tokens = np.random.default_rng(0).integers(0, 256, (1, 40), np.int32)
    angles = Angles.of(checkpoint.spec, 40)
    x = embed(checkpoint, tokens)
    for index in range(checkpoint.spec.layer_count):
        x = run_layer(read_layer(checkpoint, index), checkpoint.spec, angles, x)
    tensors = {name: torch.from_numpy(checkpoint.tensor(name).data.copy()) for name in ("final_norm", "head")}
    head = tensors["head"].view(torch.float32).view(checkpoint.spec.vocab_size, -1)
    found = logits(x, tensors["final_norm"].view(torch.float32).view(-1), head, checkpoint.spec)
    assert torch.allclose(found[0].double(), reference_logits(path, tokens[0].tolist()), rtol=1e-3, atol=1e-3)


def test_estimates_the_divergence_that_rounding_brings(tmp_path: Path) -> None:
    """To a factor of 3, at a width where the loss is still quadratic; GPTQ would do better than rounding does."""
    path = make_rand_model(tmp_path / "model")
    checkpoint = open_checkpoint(path)
    random = np.random.default_rng(0)
    tokens = random.integers(0, 256, (8, 64), np.int32)
    fine, coarse = (Grid(bits, 32, True, torch.float16) for bits in (8, 4))
    done: list[int] = []
    losses = measure_losses(checkpoint, tokens, [fine, coarse], by_importance=False, done=done.append)
    assert sum(done) == 4
    assert losses.keys() == {f"layers.{index}.{group}" for index in range(2) for group in GROUPS}
    out = tmp_path / "out"
    run.quantize_model(request(path, Choice("rtn", 8, 32)), out, no_bar)
    divergences = []
    for sample in tokens.tolist():
        ours = Runs(out).step({0: sample})[0].double().log_softmax(-1)
        wanted = reference_logits(path, sample)[-1].log_softmax(-1)
        divergences.append(float((wanted.exp() * (wanted - ours)).sum()))
    estimate = sum(own[fine] for own in losses.values())
    assert estimate / 3 < np.mean(divergences) < estimate * 3
    assert all(own[fine] < own[coarse] / 30 for own in losses.values())


def test_a_group_that_nothing_listens_to_gets_the_fewest_bits(tmp_path: Path) -> None:
    """The last layer's MLP is cut off from the residual stream, and what multiplies it costs nothing."""
    path = make_rand_model(tmp_path / "model")
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][:] = 0
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    run.quantize_model(request(path, AUTO), tmp_path / "out", no_bar)
    formats = open_checkpoint(tmp_path / "out").formats()
    assert {formats[f"layers.1.{name}"].bits for name in ("gate", "up", "down")} == {2}
    assert max(formats[f"layers.0.{name}"].bits for name in ("q", "o", "gate", "down")) == 8


def test_what_is_written_keeps_to_its_size_and_can_be_read(tmp_path: Path) -> None:
    """By its rules every matrix has one grid; those of a group the same; fused names match too."""
    path = make_rand_model(tmp_path / "model")
    out = tmp_path / "out"
    report = run.quantize_model(request(path, AUTO), out, no_bar)
    assert report.recipe.is_mixed
    assert 4.5 < report.matrix_bits <= 5.0
    checkpoint = open_checkpoint(out)
    shapes = expected_shapes(checkpoint.spec)
    sizes = [stored_bytes(shapes[name], report.recipe.grids[name]) for name in matrix_names(checkpoint.spec)]
    weights = sum(int(np.prod(shapes[name])) for name in matrix_names(checkpoint.spec))
    assert report.matrix_bits == pytest.approx(8 * sum(sizes) / weights)
    label = json.loads((out / "config.json").read_text())["quantization_config"]
    for name, grid in report.recipe.grids.items():
        assert checkpoint.formats()[name].bits == grid.bits
    for index, groups in enumerate(report.recipe.by_layer()):
        for group, module in (("qkv", "self_attn.qkv_proj"), ("gate_up", "mlp.gate_up_proj")):
            rules = [
                own
                for rule, own in label["dynamic"].items()
                if re.match(rule.removeprefix("+:"), f"model.layers.{index}.{module}")
            ]
            assert (rules[0] if rules else label)["bits"] == groups[group]["bits"]
    prompt = [*b"The quick brown fox"]
    found, wanted = Runs(out).step({0: prompt})[0].double(), reference_logits(path, prompt)[-1]
    assert float(torch.corrcoef(torch.stack((found, wanted)))[0, 1]) > 0.85


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_zero_points_are_stored_in_one_way(tmp_path: Path, is_symmetric: bool) -> None:
    """Also where only some matrices have 3 bits."""
    path = make_rand_model(tmp_path / "model")
    spec = open_checkpoint(path).spec
    choice = replace(AUTO, is_symmetric=is_symmetric)
    recipe = plan(choice, spec)
    three = next(grid for grid in candidates(choice, spec) if grid.bits == 3)
    mixed = replace(recipe, grids={**recipe.grids, "layers.0.down": three})
    assert mixed.label()["checkpoint_format"] == "gptq_v2"
    weight = torch.randn(32, 96, generator=torch.Generator().manual_seed(0))
    for grid in (three, recipe.grids["layers.0.q"]):
        matrix = round_to_nearest(weight, grid)
        words = mixed.pack(matrix)["qzeros"].array().view(np.uint32)
        assert (words & np.uint32((1 << grid.bits) - 1))[0, 0] == matrix.zeros[0, 0]


def test_a_run_that_was_ended_keeps_its_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_rand_model(tmp_path / "source")
    run.quantize_model(request(source, AUTO), tmp_path / "whole", no_bar)
    with monkeypatch.context() as patch:
        patch.setattr(run, "find_method", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.quantize_model(request(source, AUTO), tmp_path / "out", no_bar)
    with pytest.raises(QuireError, match=r"bits per weight was \[5\.0, None\], not \[5\.5, None\]"):
        run.quantize_model(request(source, replace(AUTO, bits_per_weight=5.5)), tmp_path / "out", no_bar)
    monkeypatch.setattr(run, "measure_losses", lambda *args, **more: 1 / 0)  # is not measured again
    run.quantize_model(request(source, AUTO), tmp_path / "out", no_bar)
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_too_few_bits(tmp_path: Path) -> None:
    """That is known before anything is measured or written."""
    path, out = make_rand_model(tmp_path / "model"), tmp_path / "out"
    for bits, mixed in ((2.0, None), (4.0, (4, 8))):
        choice = replace(AUTO, bits_per_weight=bits, mixed_bits=mixed)
        with pytest.raises(
            QuireError, match=rf"--bits-per-weight: {bits:g} is too few; the least is \d\.\d+"
        ) as refused:
            run.quantize_model(request(path, choice), out, no_bar)
        assert refused.value.reason is Reason.INVALID_FIELD
    assert not out.exists()


def test_the_least_that_is_said_suffices(tmp_path: Path) -> None:
    spec = open_checkpoint(make_rand_model(tmp_path / "model")).spec
    grid = Grid(2, 32, True, torch.float16)
    with pytest.raises(QuireError) as refused:
        check_bits([grid], spec, 2.0)
    least = float(str(refused.value).rpartition(" ")[2]) + 0.001
    check_bits([grid], spec, least)
    losses = {f"layers.{i}.{g}": {grid: 1.0} for i in range(2) for g in GROUPS}
    assert set(spend(losses, spec, least).values()) == {grid}


def test_only_the_bits_that_are_allowed(tmp_path: Path) -> None:
    path = make_rand_model(tmp_path / "model")
    choice = replace(AUTO, bits_per_weight=6.0, mixed_bits=(4, 8))
    report = run.quantize_model(request(path, choice), tmp_path / "out", no_bar)
    assert {grid.bits for grid in report.recipe.grids.values()} == {4, 8}
    with pytest.raises(QuireError, match=r"--auto-bits: 4, 5: some of \(2, 3, 4, 8\)"):
        replace(AUTO, mixed_bits=(4, 5))
    with pytest.raises(QuireError, match="--auto-bits: it is for --auto"):
        Choice("gptq", mixed_bits=(4,))
