"""AWQ and SmoothQuant: factors that leave the function as it was, and make rounding cost less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from services.executor.models.spec import ModelSpec
from services.executor.quantize import awq, smoothquant
from services.executor.quantize.fold import fold, shared
from services.executor.quantize.grid import Grid, round_to_nearest
from services.executor.quantize.layer import GROUPS, Layer
from services.executor.quantize.moments import Peaks, SecondMoments, output_error
from services.executor.quantize.stream import CalibrationStream

Correlated = Callable[..., tuple[Tensor, Tensor]]
SPEC = ModelSpec("llama", 64, 64, 96, 1, 4, 2, 16, 512, 1e-5, 10000.0)


def make_layer(biases: bool) -> Layer:
    generator = torch.Generator().manual_seed(0)
    sizes = {
        "q": (64, 64),
        "k": (32, 64),
        "v": (32, 64),
        "o": (64, 64),
        "gate": (96, 64),
        "up": (96, 64),
        "down": (64, 96),
    }
    layer = {name: torch.randn(size, generator=generator) / 8 for name, size in sizes.items()}
    if biases:
        layer |= {f"{name}_bias": torch.randn(size[0], generator=generator) for name, size in sizes.items()}
    for norm in ("attention_norm", "mlp_norm"):
        layer[norm] = (torch.rand(64, generator=generator) + 0.5).bfloat16().float()
    layer["mlp_norm"][7] = 0.0
    return layer


def output(layer: Layer) -> Tensor:
    hidden = torch.randn(3, 40, 64, generator=torch.Generator().manual_seed(1))
    stream = CalibrationStream(SPEC, hidden)
    stream.pass_through(layer)
    return stream.hidden


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("group", GROUPS)
def test_a_fold_leaves_the_function_unchanged(group: str, biases: bool) -> None:
    layer = make_layer(biases)
    before = output(layer)
    original = dict(layer)
    width = layer[GROUPS[group][0]].shape[1]
    factors = torch.exp(torch.randn(width, generator=torch.Generator().manual_seed(2)))
    taken = fold(layer, group, shared(factors, group, SPEC), SPEC, torch.bfloat16)
    assert torch.allclose(output(layer), before, rtol=1e-4, atol=1e-4)
    assert torch.allclose(taken, shared(factors, group, SPEC), rtol=2**-8) or group == "gate_up"
    for name in GROUPS[group]:
        assert torch.equal(layer[name], original[name] * taken)
    for norm in ("attention_norm", "mlp_norm"):  # the files lose nothing of them
        assert torch.equal(layer[norm].bfloat16().float(), layer[norm])


def test_a_factor_that_a_norm_cannot_hold_is_not_taken() -> None:
    layer = make_layer(biases=False)
    factors = torch.ones(64)
    factors[3], factors[4] = 1e12, 1e-12
    taken = fold(layer, "qkv", factors, SPEC, torch.float16)
    assert torch.equal(taken[3:5], torch.ones(2))


@pytest.mark.parametrize("is_symmetric", [True, False])
def test_awq_errs_less_than_rounding_to_nearest(correlated: Correlated, is_symmetric: bool) -> None:
    weight, inputs = correlated(64, 128)
    moments = SecondMoments(128)
    moments.add(inputs)
    for bits, most in ((3, 0.8), (4, 0.8)):
        grid = Grid(bits, 32, is_symmetric, torch.float16)
        factors = awq.find_factors([(weight, grid)], moments.gram, moments.mean_magnitude)
        scaled, gram = weight * factors, moments.gram / factors / factors[:, None]
        plain = output_error(rounded(weight, grid) - weight, moments.gram)
        with_factors = output_error(rounded(scaled, grid) - scaled, gram)
        clipped = output_error(rounded(awq.clip(scaled, gram, grid), grid) - scaled, gram)
        assert with_factors < most * plain
        assert clipped < with_factors * 1.02  # groups are clipped without a look at each other


def test_awq_takes_no_factors_where_none_help() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    grid = Grid(4, 32, True, torch.float16)
    assert torch.equal(awq.find_factors([(weight, grid)], torch.eye(64), torch.ones(64)), torch.ones(64))


def test_clipping_keeps_what_nothing_improves() -> None:
    """All weights are on the grid already."""
    grid = Grid(4, 32, True, torch.float16)
    weight = rounded(torch.randn(4, 64, generator=torch.Generator().manual_seed(0)), grid)
    weight = rounded(weight, grid)
    assert output_error(rounded(awq.clip(weight, torch.eye(64), grid), grid) - weight, torch.eye(64)) <= output_error(
        rounded(weight, grid) - weight, torch.eye(64)
    )


def test_smoothquant_evens_inputs_and_weights_out(correlated: Correlated) -> None:
    weight, inputs = correlated(64, 128)
    inputs[:, 3] *= 40
    peaks = Peaks(128)
    peaks.add(inputs)
    factors = smoothquant.find_factors([weight[:32], weight[32:]], peaks.largest)
    smooth, scaled = inputs / factors, weight * factors
    assert torch.allclose(smooth.abs().amax(0), scaled.abs().amax(0), rtol=1e-4)

    def error(weights: Tensor, x: Tensor) -> float:
        """Of int8 products: a scale a token, and a scale a row."""
        steps = x.abs().amax(1, keepdim=True) / 127
        exact = inputs.double() @ weight.double().T
        return float((torch.round(x / steps) * steps @ rounded(weights, INT8).T - exact).square().mean())

    assert error(scaled, smooth) < 0.5 * error(weight, inputs)


INT8 = Grid(8, None, True, torch.bfloat16)


def test_inputs_and_weights_that_are_always_zero_are_left_alone() -> None:
    weight, peaks = torch.ones(2, 3), torch.tensor([0.0, 4.0, 1.0])
    weight[:, 2] = 0
    assert smoothquant.find_factors([weight], peaks).tolist() == [1.0, 2.0, 1.0]


def rounded(weight: Tensor, grid: Grid) -> Tensor:
    return torch.from_numpy(round_to_nearest(weight, grid).dequantize())
