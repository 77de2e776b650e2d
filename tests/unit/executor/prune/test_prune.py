"""Smaller models: what is left computes as the whole model with the rest at zero, and is what matters most."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import open_checkpoint
from services.executor.prune import distill as distillation
from services.executor.prune import run
from services.executor.prune.command import main
from services.executor.prune.distill import learning_rate
from services.executor.prune.run import Report, Request, prune_model
from services.executor.prune.target import Target
from services.executor.quantize.choice import CalibrationSize, Source
from services.executor.quantize.output_folder import UNFINISHED, OutputFolder
from tests.fixtures.models import make_rand_model, reference_logits
from tests.unit.executor.torch_runs import Runs

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 12
PROMPT = [*b"The quick brown fox"]


@contextmanager
def no_bar(what: str, done: int, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


def prune(source: Path, out: Path, target: Target, *, distill_seconds: float = 0.0, samples: int = 4) -> Report:
    size = CalibrationSize(samples, 64)
    clock = itertools.count()  # a second a look
    request = Request(Source(str(source), source, TEXT, size, 1), target, distill_seconds)
    return prune_model(request, out, no_bar, lambda: float(next(clock)))


def silenced(source: Path, to: Path, *, layer: int, channels: slice, group: int) -> Path:
    """A copy whose layer has some MLP channels and one of its two groups of heads that add nothing."""
    shutil.copytree(source, to)
    weights = load_file(to / "model.safetensors")
    weights[f"model.layers.{layer}.mlp.down_proj.weight"][:, channels] = 0
    weights[f"model.layers.{layer}.self_attn.o_proj.weight"][:, group * 32 : group * 32 + 32] = 0
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_what_adds_nothing_goes_first(tmp_path: Path) -> None:
    """A different half of the channels and a different group of heads in each layer; the logits stay."""
    source = make_rand_model(tmp_path / "whole", config={"attention_bias": True})
    source = silenced(source, tmp_path / "first", layer=0, channels=slice(0, 96, 2), group=1)
    source = silenced(source, tmp_path / "both", layer=1, channels=slice(48, 96), group=0)
    report = prune(source, tmp_path / "out", Target(mlp_width=48, heads=2))
    spec = open_checkpoint(tmp_path / "out").spec
    assert (spec.intermediate_size, spec.head_count, spec.kv_head_count, spec.head_size) == (48, 2, 1, 16)
    assert report.weights < report.source_weights
    found, wanted = Runs(tmp_path / "out").step({0: PROMPT})[0].double(), reference_logits(source, PROMPT)[-1]
    assert float(torch.corrcoef(torch.stack((found, wanted)))[0, 1]) > 0.999


def test_a_layer_that_does_nothing_goes_first(tmp_path: Path) -> None:
    source = make_rand_model(tmp_path / "whole", layers=3)
    source = silenced(source, tmp_path / "first", layer=1, channels=slice(0, 96), group=0)
    source = silenced(source, tmp_path / "both", layer=1, channels=slice(0, 96), group=1)
    assert prune(source, tmp_path / "out", Target(layers=2)).layers == (0, 2)
    found, wanted = Runs(tmp_path / "out").step({0: PROMPT})[0].double(), reference_logits(source, PROMPT)[-1]
    assert float(torch.corrcoef(torch.stack((found, wanted)))[0, 1]) > 0.999


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"layers": 3}, "--layers: 3 is not in 1..2, the model's own"),
        ({"mlp_width": 0}, "--mlp-width: 0 is not in 1..96, the model's own"),
        ({"heads": 3}, "--heads: 3 cannot be left of this model, but 2, 4 can"),
        ({}, "--layers: name what shall be left"),
    ],
)
def test_what_cannot_be_left(tmp_path: Path, asked: dict[str, int], said: str) -> None:
    source = make_rand_model(tmp_path / "source")
    with pytest.raises(QuireError, match=said) as refused:
        prune(source, tmp_path / "out", Target(**asked))
    assert refused.value.reason is Reason.INVALID_FIELD
    assert not (tmp_path / "out").exists()


def test_distillation_brings_back_what_pruning_took(tmp_path: Path) -> None:
    """What is written is what was learned: its divergence on text held back is smaller than before."""
    source = make_rand_model(tmp_path / "whole", layers=3)
    report = prune(source, tmp_path / "out", Target(layers=2, mlp_width=64), distill_seconds=200.0, samples=10)
    assert report.learned is not None
    assert report.learned.steps == 200
    assert report.learned.after < 0.9 * report.learned.before
    plain = prune(source, tmp_path / "plain", Target(layers=2, mlp_width=64), samples=10)
    assert plain.learned is None
    assert plain.bytes == report.bytes
    tokens = [*TEXT[:60].encode()]
    wanted = reference_logits(source, tokens).log_softmax(-1)

    def divergence(folder: str) -> float:
        found = reference_logits(tmp_path / folder, tokens).log_softmax(-1)
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    assert divergence("out") < divergence("plain")


@pytest.mark.parametrize("text", [TEXT, None])
def test_one_sample_cannot_be_held_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str | None) -> None:
    """That is known before the model writes a text, and before there is a folder."""
    monkeypatch.setattr(run, "draw_text", lambda *args: 1 / 0)
    source = make_rand_model(tmp_path / "source")
    request = Request(Source(str(source), source, text, CalibrationSize(1, 64), 1), Target(layers=1), 1.0)
    with pytest.raises(QuireError, match="--samples: distillation holds a sample back"):
        prune_model(request, tmp_path / "out", no_bar)
    assert not (tmp_path / "out").exists()


def test_only_heads_that_transformers_loads(tmp_path: Path) -> None:
    """Of a llama the hidden size is a multiple of them; others need not care."""
    source = make_rand_model(tmp_path / "source", heads=8, kv_heads=8, head_size=8)
    spec = open_checkpoint(source).spec
    with pytest.raises(QuireError, match="--heads: 6 cannot be left of this model, but 1, 2, 4, 8 can"):
        Target(heads=6).smaller(spec)
    other = replace(spec, architecture="mistral")
    assert Target(heads=6).smaller(other).kv_head_count == 6
    prune(source, tmp_path / "out", Target(heads=4, mlp_width=64, layers=1))
    with torch.inference_mode():
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        theirs = loaded(torch.tensor([PROMPT])).logits[0, -1]
    ours = Runs(tmp_path / "out").step({0: PROMPT})[0]
    assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)


def test_begins_anew_after_it_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with other flags; but not in the folder of another command."""
    source, out = make_rand_model(tmp_path / "source"), tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "keep_top", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prune(source, out, Target(mlp_width=64))
    assert (out / UNFINISHED).is_dir()
    prune(source, out, Target(layers=1))
    prune(source, tmp_path / "fresh", Target(layers=1))
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (tmp_path / "fresh" / name).read_bytes()
    assert not (out / UNFINISHED).exists()
    OutputFolder(tmp_path / "other", {"method": "gptq"})
    with pytest.raises(QuireError, match="holds an unfinished model of another request"):
        prune(source, tmp_path / "other", Target(layers=1))


def spoilt(source: Path, name: str, place: object, value: float) -> Path:
    """The model with some numbers of a tensor replaced."""
    weights = load_file(source / "model.safetensors")
    weights[name][place] = value
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    return source


@pytest.mark.parametrize(
    ("name", "place", "value", "said"),
    [
        ("lm_head.weight", (3, 4), np.nan, "tensor head holds NaN"),
        ("model.embed_tokens.weight", ord("q"), np.nan, "tensor embedding holds NaN"),
        ("model.layers.1.mlp.down_proj.weight", ..., 3e38, "what leaves layer 1: not all numbers are finite"),
    ],
)
def test_what_is_no_number_ends_it(tmp_path: Path, name: str, place: object, value: float, said: str) -> None:
    source = spoilt(make_rand_model(tmp_path / "source"), name, place, value)
    with pytest.raises(QuireError, match=said):
        prune(source, tmp_path / "out", Target(layers=1))
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_distillation_ends_where_its_loss_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distillation, "learning_rate", lambda share: float("inf"))
    source = make_rand_model(tmp_path / "source")
    with pytest.raises(QuireError, match="the divergence from the whole model") as ended:
        prune(source, tmp_path / "out", Target(layers=1), distill_seconds=50.0)
    assert ended.value.reason is Reason.NOT_FINITE


def test_the_learning_rate_rises_and_falls_to_nothing() -> None:
    rates = [learning_rate(share / 100) for share in range(101)]
    assert [rates[0], rates[-1]] == pytest.approx([0, 0])
    assert rates.index(max(rates)) == 5
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = make_rand_model(tmp_path / "source", layers=3)
    text = tmp_path / "text"
    text.write_text(TEXT)
    size = ["--calibration", str(text), "--samples", "4", "--context", "64", "--threads", "1"]
    argv = [str(source), "--out", str(tmp_path / "out"), "--layers", "2", *size]
    assert main([*argv, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["layers"]) == 2
    assert made["weights"] < made["source_weights"]
    assert made["distillation"] is None
    assert open_checkpoint(tmp_path / "out").spec.layer_count == 2
    assert main(argv) == 2
    assert "--out" in capsys.readouterr().err
    with pytest.raises(SystemExit) as wrong:
        main([*argv, "--threads", "-1"])
    assert wrong.value.code == 2
    assert "--threads: -1 is less than 0" in capsys.readouterr().err
    assert main([*argv, "--distill-minutes", "-1"]) == 2
    assert "--distill-minutes: -1 is no time" in capsys.readouterr().err
