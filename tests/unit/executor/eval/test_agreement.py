"""`quire eval agreement` against plain formulas over float64 logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from quire import cli
from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.eval.drawn import MOST_SEQUENCES, draw_passages
from services.executor.eval.options import Choice, load
from services.executor.sampling.draw import draw
from tests.fixtures.models import make_rand_model, reference_logits
from tests.fixtures.vocabularies import BOS_ID, byte_level
from tests.unit.executor.eval.conftest import COMMON, Evaluate, expected_logits

TEXT = "The quick brown fox jumps over the lazy dog, twice. " * 3
SIDE = ["model", "backend", "dtype", "kv_format", "device"]
FIELDS = ["reference", "candidate", "text", "context", "stride", "positions", "top1_agreement"]
FIELDS += ["kl_mean", "kl_p99", "logit_error_median", "logit_error_max"]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def nudged_copy(of: Path, to: Path) -> Path:
    """The same model with weights a little off."""
    make_rand_model(to)
    tensors = load_file(of / "model.safetensors")
    noise = np.random.default_rng(1)
    for name, tensor in tensors.items():
        tensors[name] = tensor * noise.uniform(0.8, 1.2, tensor.shape).astype(np.float32)
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


def test_equals_plain_formulas(tmp_path: Path, text: Path, evaluate: Evaluate) -> None:
    reference = make_rand_model(tmp_path / "reference")
    candidate = nudged_copy(reference, tmp_path / "candidate")
    models = ["--model", candidate, "--against-model", reference, "--dtype", "fp32"]
    report = evaluate("agreement", *models, "--text", text, "--context", "80", "--tokens", "150")
    ids = [*TEXT.encode()][:150]
    p, q = (expected_logits(path, [BOS_ID], ids, 80, 40) for path in (reference, candidate))
    kl = (p.softmax(-1) * (p.log_softmax(-1) - q.log_softmax(-1))).sum(-1)
    error = (q - p).norm(dim=-1) / p.norm(dim=-1)
    same = (p.argmax(-1) == q.argmax(-1)).double().mean()
    assert 0.1 < same < 0.95
    assert list(report) == FIELDS
    assert list(report["reference"]) == list(report["candidate"]) == SIDE
    assert (report["reference"]["model"], report["candidate"]["model"]) == ("reference", "candidate")
    assert (report["text"], report["positions"]) == ("text.txt", 150)
    assert report["top1_agreement"] == pytest.approx(float(same))
    assert report["kl_mean"] == pytest.approx(float(kl.mean()), rel=1e-3)
    assert report["kl_p99"] == pytest.approx(np.percentile(kl.numpy(), 99), rel=1e-3)
    assert report["logit_error_median"] == pytest.approx(float(np.median(error.numpy())), rel=1e-3)
    assert report["logit_error_max"] == pytest.approx(float(error.max()), rel=1e-3)


def test_a_model_agrees_with_itself(tmp_path: Path, text: Path, evaluate: Evaluate) -> None:
    path = make_rand_model(tmp_path / "model")
    report = evaluate("agreement", "--model", path, "--dtype", "fp32", "--against-dtype", "fp32", "--text", text)
    assert report["top1_agreement"] == 1
    assert report["kl_mean"] == report["kl_p99"] == report["logit_error_max"] == 0


def test_dtypes_differ_a_little_on_text_that_the_reference_writes(tmp_path: Path, evaluate: Evaluate) -> None:
    path = make_rand_model(tmp_path / "model")
    flags = ["--dtype", "bf16", "--against-dtype", "fp32", "--context", "40", "--tokens", "390"]
    report = evaluate("agreement", "--model", path, *flags)
    assert (report["reference"]["dtype"], report["candidate"]["dtype"]) == ("fp32", "bf16")
    assert report["text"] is None
    assert report["positions"] == 390  # ten passages of 39, two more than are written at a time
    assert 0.8 < report["top1_agreement"] <= 1
    assert 0 < report["kl_mean"] < report["kl_p99"] < 0.1
    assert 0 < report["logit_error_median"] < report["logit_error_max"] < 0.2


def test_the_cpu_backend_against_torch(tmp_path: Path, text: Path, evaluate: Evaluate) -> None:
    """Torch takes all but the instruction set from the candidate."""
    path = make_rand_model(tmp_path / "model")
    flags = ["--backend", "cpu", "--instruction-set", "portable", "--dtype", "fp32", "--against-backend", "torch"]
    report = evaluate("agreement", "--model", path, *flags, "--text", text, "--tokens", "60")
    assert [report[side]["backend"] for side in ("reference", "candidate")] == ["torch", "cpu"]
    assert report["reference"]["dtype"] == report["candidate"]["dtype"] == "fp32"
    assert "portable" in report["candidate"]["device"]
    assert report["top1_agreement"] > 0.97
    assert report["kl_mean"] < 1e-3


def test_drawn_text_is_the_models_own(tmp_path: Path) -> None:
    """Each token is what the sampling rules draw from the logits of a whole pass."""
    path = make_rand_model(tmp_path)
    model = load(Choice("--model", str(path), "torch", "fp32"), 1, 16, MOST_SEQUENCES)
    heard: list[int] = []
    passages = draw_passages(model, 100, 12, heard.append)
    assert [len(passage.ids) for passage in passages] == [12] * 9  # at least 100, in equal parts of at most 12
    assert sum(heard) == 108
    for seed in (0, 7, 8):
        ids = passages[seed].ids.tolist()
        assert passages[seed].prefix == (BOS_ID,)
        logits = reference_logits(path, [BOS_ID, *ids]).float().numpy()
        rows = [SampleRow(0, SamplingRule(seed=seed), [BOS_ID], ids[:at]) for at in range(12)]
        assert draw(list(logits[:12]), rows) == ids
    assert len({tuple(passage.ids) for passage in passages}) == 9


def test_what_is_printed(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_rand_model(tmp_path / "model")
    flags = ["eval", "agreement", *COMMON, "--model", str(path), "--dtype", "bf16"]
    flags += ["--against-dtype", "fp32", "--text", str(text)]
    assert cli.main([*flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert cli.main(flags) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("reference  model  torch fp32, KV fp32")
    assert lines[1].startswith("candidate  model  torch bf16, KV bf16")
    assert lines[2] == f"{report['positions']} positions"
    assert f"{report['top1_agreement']:.2%}" in lines[3]
    assert f"{report['kl_mean']:.3e} mean" in lines[4]
    assert f"{report['logit_error_max']:.3e} largest" in lines[5]


def test_models_of_unlike_vocabularies_are_refused(
    tmp_path: Path, text: Path, refusal: Callable[..., tuple[int, str]]
) -> None:
    path = make_rand_model(tmp_path / "model")
    larger = make_rand_model(tmp_path / "larger", vocabulary=byte_level(["the"]))
    models = ["--model", path, "--against-model", larger, "--dtype", "fp32"]
    said = "quire eval agreement: --against-model: its vocabulary has 261 tokens, that of model has 260"
    assert refusal("agreement", *models, "--text", text) == (2, said)
    assert refusal("agreement", *models) == (2, said)


def test_models_that_read_the_text_otherwise_are_refused(
    tmp_path: Path, text: Path, refusal: Callable[..., tuple[int, str]]
) -> None:
    path = make_rand_model(tmp_path / "model")
    other = make_rand_model(tmp_path / "other", vocabulary=byte_level(add_bos=False))
    said = "quire eval agreement: --against-model: its tokenizer reads this text otherwise than that of model"
    models = ["--model", path, "--against-model", other, "--dtype", "fp32"]
    assert refusal("agreement", *models, "--text", text) == (2, said)


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (
            [],
            2,
            "name the reference with --against-model, --against-backend or another --against flag",
        ),
        (["--against-model", "absent"], 1, "--against-model: no model 'absent'"),
        (["--against-backend", "abacus"], 2, "--against-backend: invalid choice: 'abacus'"),
        (["--against-dtype", "fp13"], 2, "--against-dtype: invalid choice: 'fp13'"),
        (["--against-kv-format", "fp13"], 2, "--against-kv-format: invalid choice: 'fp13'"),
        (["--against-dtype", "fp32", "--text", "absent.txt"], 2, "--text: absent.txt: No such file or directory"),
        (["--against-model", "./short", "--context", "65"], 2, "--context: 65 is beyond the 64 tokens"),
    ],
)
def test_bad_flags_are_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Callable[..., tuple[int, str]],
    flags: list[str],
    status: int,
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_rand_model(tmp_path / "model")
    make_rand_model(tmp_path / "short", context_length=64)
    found, line = refusal("agreement", "--model", "./model", *flags)
    assert found == status
    assert f"quire eval agreement: {said}" in line


def test_the_reference_takes_the_rest_from_the_candidate(tmp_path: Path, text: Path, evaluate: Evaluate) -> None:
    path = make_rand_model(tmp_path / "model")
    flags = ["--dtype", "bf16", "--against-backend", "torch", "--text", text, "--tokens", "5"]
    report = evaluate("agreement", "--model", path, *flags)
    assert report["reference"] == report["candidate"]
    assert report["reference"]["dtype"] == "bf16"
