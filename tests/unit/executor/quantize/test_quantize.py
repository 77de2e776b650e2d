"""Whole checkpoints: every method and format, read back by every reader, and after a kill."""

from __future__ import annotations

import io
import json
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import save_file

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.dequantize import to_float32
from services.executor.models.tokenizer_bundle import build_bundle
from services.executor.models.weights import expected_shapes
from services.executor.quantize import recipe as recipes
from services.executor.quantize import run
from services.executor.quantize.choice import FP8_METHODS, CalibrationSize, Choice, Source
from services.executor.quantize.command import main
from services.executor.quantize.grid import Grid
from services.executor.quantize.hf_names import plain_name
from services.executor.quantize.output_folder import UNFINISHED, OutputFolder
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.models import make_rand_model, reference_logits
from tests.unit.executor.torch_runs import Runs

TEXT = "The quick brown fox jumps over the lazy dog; pack my box with five dozen jugs. " * 12
PROMPT = [*b"The quick brown fox"]

VOCABULARY = {
    "tokenizer__ggml__model": "gpt2",
    "tokenizer__ggml__pre": "llama-bpe",
    "tokenizer__chat_template": "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
}

CHOICES = [
    Choice("rtn"),
    Choice("rtn", 8, -1),
    Choice("gptq", 4, 32),
    Choice("gptq", 3, 32, False, True),
    Choice("gptq", 2, 32, True, True),
    Choice("gptq", 4, -1, False),
    Choice("awq", 4, 32),
    Choice("awq", 4, 32, True),
    Choice("awq", 3, 32),
    Choice("smoothquant"),
    Choice("fp8"),
    Choice("fp8", fp8_scales="tensor"),
    Choice("fp8", fp8_scales="block"),
    Choice("gptq-fp8"),
    Choice("gptq-fp8", fp8_scales="block"),
]


@contextmanager
def no_bar(what: str, done: int, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    yield lambda count: None


def request(path: Path, choice: Choice, text: str | None = TEXT) -> run.Request:
    return run.Request(Source(str(path), path, text, CalibrationSize(6, 64), 1), choice)


def plain_copy(folder: Path, source: Path, to: Path) -> Path:
    """The folder's weights dequantized, as a plain fp32 checkpoint of the source's shape."""
    shutil.copytree(source, to)
    checkpoint = open_checkpoint(folder)
    weights = {plain_name(name): to_float32(checkpoint.tensor(name)) for name in expected_shapes(checkpoint.spec)}
    save_file(weights, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_what_is_written_is_what_was_meant(tmp_path: Path, choice: Choice) -> None:
    """Logits are those of the dequantized weights in float64, and near those of the source."""
    source = make_rand_model(tmp_path / "source", config={"attention_bias": True})
    out = tmp_path / "out"
    report = run.quantize_model(request(source, choice), out, no_bar)
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    logits = Runs(out).step({0: PROMPT})[0].double()
    same = reference_logits(plain_copy(out, source, tmp_path / "plain"), PROMPT)[-1]
    assert torch.allclose(logits, same, rtol=1e-3, atol=1e-3)
    wanted = reference_logits(source, PROMPT)[-1]
    bits = choice.bits or (8 if choice.method in ("smoothquant", *FP8_METHODS) else 4)
    assert float(torch.corrcoef(torch.stack((logits, wanted)))[0, 1]) > {2: 0.1, 3: 0.5, 4: 0.85, 8: 0.99}[bits]
    assert bits <= report.matrix_bits < bits + 2
    assert report.bytes == sum(values.nbytes for values in load_file_bytes(out / "model.safetensors"))
    assert build_bundle(out) == build_bundle(source)


def load_file_bytes(path: Path) -> list[np.ndarray[Any, Any]]:
    """Every tensor as bytes; numpy has no e4m3 and no bf16."""
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    entries = json.loads(data[8:start])
    spans = [entry["data_offsets"] for name, entry in entries.items() if name != "__metadata__"]
    return [np.frombuffer(data[start + begin : start + end], np.uint8) for begin, end in spans]


def test_gptq_does_better_than_rounding_to_nearest(tmp_path: Path) -> None:
    source = make_rand_model(tmp_path / "source")
    wanted = reference_logits(source, PROMPT).log_softmax(-1)

    def divergence(choice: Choice) -> float:
        out = tmp_path / str(choice)
        run.quantize_model(request(source, choice), out, no_bar)
        found = reference_logits(plain_copy(out, source, tmp_path / f"plain {choice}"), PROMPT).log_softmax(-1)
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    plain = divergence(Choice("rtn", 3, 32, False))
    assert divergence(Choice("gptq", 3, 32, False)) < 0.9 * plain


@pytest.mark.parametrize("choice", [Choice("gptq", act_order=True), Choice("awq"), Choice("rtn")], ids=str)
def test_a_run_that_was_ended_goes_on_and_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: Choice
) -> None:
    source = make_rand_model(tmp_path / "source", layers=3)
    run.quantize_model(request(source, choice), tmp_path / "whole", no_bar)
    quantized: list[int] = []
    read = run.read_layer

    def ending(checkpoint: Any, index: int) -> Any:
        quantized.append(index)
        if quantized.count(index) == 1 and index == 2:
            raise KeyboardInterrupt
        return read(checkpoint, index)

    monkeypatch.setattr(run, "read_layer", ending)
    with pytest.raises(KeyboardInterrupt):
        run.quantize_model(request(source, choice), tmp_path / "out", no_bar)
    unfinished = tmp_path / "out" / UNFINISHED
    assert unfinished.is_dir()
    with pytest.raises(QuireError, match="holds an unfinished model of another request"):
        run.quantize_model(request(source, replace(choice, group_size=-1)), tmp_path / "out", no_bar)
    (unfinished / "layer-00002.safetensors").write_bytes(b"ended while it was written")
    run.quantize_model(request(source, choice), tmp_path / "out", no_bar)
    assert quantized == [0, 1, 2, 2]
    files = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_run_that_was_ended_while_it_put_the_files_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_rand_model(tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "finish", lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.quantize_model(request(source, Choice("gptq")), tmp_path / "out", no_bar)
    (tmp_path / "out" / "model.safetensors").write_bytes(b"a part")
    run.quantize_model(request(source, Choice("gptq")), tmp_path / "out", no_bar)
    assert open_checkpoint(tmp_path / "out").spec.layer_count == 2


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    """With its shape, its tokenizer, its template, and its rows in Hugging Face's order."""
    folder = make_rand_model(tmp_path / "folder")
    path = write_gguf(tmp_path / "model.gguf", folder, gguf.GGMLQuantizationType.F16, **VOCABULARY)
    out = tmp_path / "out"
    run.quantize_model(request(path, Choice("rtn", 8)), out, no_bar)
    found, source = open_checkpoint(out), open_checkpoint(path)
    assert found.spec == source.spec
    assert found.tensor("embedding").format == "F16"
    ours, theirs = Runs(out).step({0: PROMPT})[0], Runs(path).step({0: PROMPT})[0]
    assert float(torch.corrcoef(torch.stack((ours, theirs)))[0, 1]) > 0.999
    for name in ("tokenizer.json", "tokenizer_config.json"):
        made, expected = (json.loads(_member(build_bundle(model), name)) for model in (out, path))
        assert made == {key: value for key, value in expected.items() if key != "eot_token"}
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False) == "user: a"
    config = transformers.AutoConfig.from_pretrained(out)
    assert (config.eos_token_id, config.head_dim, config.num_key_value_heads) == ([2, 5], 16, 2)


def test_a_gguf_file_without_a_usable_vocabulary(tmp_path: Path) -> None:
    """Is refused before any work is done."""
    path = write_gguf(tmp_path / "model.gguf", make_rand_model(tmp_path / "folder"))
    with pytest.raises(QuireError, match="vocabularies are not supported"):
        run.quantize_model(request(path, Choice("rtn")), tmp_path / "out", no_bar)
    assert not (tmp_path / "out").exists()


def _member(bundle: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(bundle)) as files:
        return files.read(name)


def test_matrices_may_have_grids_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = make_rand_model(tmp_path / "source")
    uniform = recipes.plan

    def mixed(choice: Choice, spec: Any) -> recipes.Recipe:
        recipe = uniform(choice, spec)
        own = {"layers.1.down": Grid(8, 32, True, torch.float16), "layers.0.q": Grid(2, 64, False, torch.float16)}
        return replace(recipe, grids={**recipe.grids, **own})

    monkeypatch.setattr(run, "plan", mixed)
    run.quantize_model(request(source, Choice("gptq")), tmp_path / "out", no_bar)
    formats: Mapping[str, Any] = open_checkpoint(tmp_path / "out").formats()
    assert (formats["layers.1.down"].bits, formats["layers.0.q"].bits, formats["layers.0.q"].group_size) == (8, 2, 64)
    assert formats["layers.0.down"].bits == 4


def test_a_quantized_model_can_be_a_source(tmp_path: Path) -> None:
    source = make_rand_model(tmp_path / "source")
    run.quantize_model(request(source, Choice("rtn", 8, 32)), tmp_path / "eight", no_bar)
    run.quantize_model(request(tmp_path / "eight", Choice("gptq")), tmp_path / "four", no_bar)
    config = json.loads((tmp_path / "four" / "config.json").read_text())
    assert config["quantization_config"]["bits"] == 4
    assert open_checkpoint(tmp_path / "four").spec == open_checkpoint(tmp_path / "eight").spec


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        (Choice("gptq", group_size=128), "--group-size: layers.0.q has 64 columns, which groups of 128 do not divide"),
        (Choice("awq", group_size=64), "--group-size: layers.0.down has 96 columns, which groups of 64 do not divide"),
    ],
    ids=str,
)
def test_groups_that_do_not_fit(tmp_path: Path, choice: Choice, said: str) -> None:
    source = make_rand_model(tmp_path / "source")
    with pytest.raises(QuireError, match=said) as refused:
        run.quantize_model(request(source, choice), tmp_path / "out", no_bar)
    assert refused.value.reason is Reason.INVALID_FIELD
    assert not (tmp_path / "out").exists()


def test_a_refused_text_leaves_no_folder(tmp_path: Path) -> None:
    """So that the same flags with more text are taken."""
    source = make_rand_model(tmp_path / "source")
    with pytest.raises(QuireError, match="--calibration: it has 5 tokens"):
        run.quantize_model(request(source, Choice("gptq"), "short"), tmp_path / "out", no_bar)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("bits", ["nan", "inf", "0", "-1"])
def test_the_command_refuses_bits_that_are_no_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bits: str
) -> None:
    argv = [str(tmp_path), "--out", str(tmp_path / "out"), "--auto", "--bits-per-weight", bits]
    assert main(argv) == 2
    assert f"quire quantize: --bits-per-weight: {float(bits):g} is not in 0..32" in capsys.readouterr().err
