"""`quire eval perplexity` against a whole pass per token in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from quire import cli
from services.executor.backends.torch_model import TorchModel
from tests.fixtures.models import make_rand_model, make_succ_model
from tests.fixtures.vocabularies import BOS_ID, byte_level
from tests.unit.executor.eval.conftest import COMMON, Evaluate, expected_logits

TEXT = "Grüße aus Köln: the quick brown fox jumps over the lazy dog, 漢字 and all. " * 3
FIELDS = [
    ("model", str),
    ("backend", str),
    ("dtype", str),
    ("kv_format", str),
    ("device", str),
    ("kv_policy", str),
    ("kv_bytes", int),
    ("kv_bytes_hot", int),
    ("text", str),
    ("context", int),
    ("stride", int),
    ("scored", int),
    ("nll", float),
    ("nll_error", float),
    ("perplexity", float),
    ("bits_per_byte", float),
]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT.encode())
    return path


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize(
    ("flags", "context", "stride"),
    [
        ([], 512, 256),  # the whole text in one window, of more rows than are scored at a time
        (["--context", "96"], 96, 48),
        (["--context", "80", "--stride", "80"], 80, 80),
        (["--context", "50", "--stride", "7", "--tokens", "120"], 50, 7),
    ],
)
def test_equals_a_plain_reference(
    tmp_path: Path, text: Path, evaluate: Evaluate, flags: list[str], context: int, stride: int, adds_bos: bool
) -> None:
    path = make_rand_model(tmp_path / "model", vocabulary=byte_level(add_bos=adds_bos))
    report = evaluate("perplexity", "--model", path, "--dtype", "fp32", "--text", text, *flags)
    ids = [*TEXT.encode()][: 120 if "--tokens" in flags else None]
    logits = expected_logits(path, [BOS_ID] if adds_bos else [], ids, context, stride)
    losses = -logits.log_softmax(-1)[range(len(ids)), ids]
    scored = losses[~losses.isnan()]
    assert (report["context"], report["stride"], report["scored"]) == (context, stride, len(scored))
    assert report["nll"] == pytest.approx(float(scored.mean()), rel=1e-5)
    assert report["nll_error"] == pytest.approx(float(scored.std() / math.sqrt(len(scored))), rel=1e-5)
    assert report["perplexity"] == pytest.approx(math.exp(scored.mean()), rel=1e-4)
    if adds_bos:  # then every byte belongs to a scored token
        assert report["bits_per_byte"] == pytest.approx(float(scored.sum()) / math.log(2) / len(ids), rel=0.01)


def test_windows_longer_than_a_step(tmp_path: Path, evaluate: Evaluate) -> None:
    """Tokens that only give context come in several steps."""
    path = make_rand_model(tmp_path / "model")
    ids = [*(bytes(range(32, 127)) * 7)]
    (tmp_path / "long.txt").write_bytes(bytes(ids))
    flags = ["--context", "620", "--stride", "20", "--tokens", "639", "--dtype", "fp32"]
    report = evaluate("perplexity", "--model", path, "--text", tmp_path / "long.txt", *flags)
    first = expected_logits(path, [BOS_ID], ids[:639], 620, 20).log_softmax(-1)
    assert report["nll"] == pytest.approx(float(-first[range(639), ids[:639]].mean()), rel=1e-5)


def test_a_text_that_follows_the_table_costs_nothing(tmp_path: Path, evaluate: Evaluate) -> None:
    """Chosen logits are about 40, all others 0."""
    path = make_succ_model(tmp_path / "model", {256: 97, 97: 98, 98: 99, 99: 97})
    (tmp_path / "known.txt").write_text("abc" * 40)
    known = evaluate("perplexity", "--model", path, "--dtype", "fp32", "--text", tmp_path / "known.txt")
    assert known["scored"] == 120
    assert known["perplexity"] == pytest.approx(1, abs=1e-6)
    (tmp_path / "odd.txt").write_text("abc" * 39 + "abb")
    odd = evaluate("perplexity", "--model", path, "--dtype", "fp32", "--text", tmp_path / "odd.txt")
    assert odd["nll"] == pytest.approx(40 / 120, rel=0.01)
    assert odd["bits_per_byte"] == pytest.approx(40 / math.log(2) / 120, rel=0.01)


def test_older_keys_and_values_in_fewer_bits(tmp_path: Path, text: Path, evaluate: Evaluate) -> None:
    """With a window of --context tokens that views change in; what is hot alone stays exactly what it was."""
    path = make_rand_model(tmp_path / "model", context_length=512)
    long = tmp_path / "long.txt"
    long.write_text(text.read_text() * (1 + 600 // len(text.read_text())))
    flags = ["perplexity", "--model", path, "--text", long, "--context", "512", "--tokens", "512", "--dtype", "fp32"]
    ages = ["--kv-hot-tokens", "64", "--kv-warm-tokens", "256"]
    hot, warm, cold = (evaluate(*flags, *ages, "--kv", kv) for kv in ("hot", "hot+warm", "hot+warm+cold"))
    assert evaluate(*flags)["nll"] == hot["nll"]
    assert (hot["kv_policy"], cold["kv_policy"]) == ("", "hot:64,int8:256,int4")
    assert 0 < abs(warm["nll"] - hot["nll"]) < abs(cold["nll"] - hot["nll"]) < 0.05 * hot["nll"]
    assert cold["kv_bytes"] < warm["kv_bytes"] < hot["kv_bytes"] == hot["kv_bytes_hot"]


def test_what_is_printed(tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = make_rand_model(tmp_path / "model")
    flags = ["eval", "perplexity", *COMMON, "--model", str(path), "--text", str(text), "--tokens", "40"]
    assert cli.main([*flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(name, type(value)) for name, value in report.items()] == FIELDS
    assert (report["model"], report["text"], report["scored"]) == ("model", "text.txt", 40)
    assert cli.main(flags) == 0
    out, err = capsys.readouterr()
    assert f"perplexity {report['perplexity']:.4f} ±" in " ".join(out.split())
    assert f"bits per byte {report['bits_per_byte']:.4f}" in " ".join(out.split())
    assert err == f"loading {path}\n"


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--text", "absent.txt"], 2, "--text: absent.txt: No such file or directory"),
        (["--text", "."], 2, "--text: .: Is a directory"),
        (["--text", "latin1.txt"], 2, "--text: latin1.txt is not UTF-8: invalid start byte at byte 3"),
        (["--text", "empty.txt"], 2, "--text: it has 0 tokens; at least 2 are needed"),
        (["--context", "2000"], 2, "--context: 2000 is beyond the 1024 tokens that the model takes"),
        (["--context", "64", "--stride", "65"], 2, "--stride: 65 would skip tokens; at most the context, 64"),
        (["--model", "absent"], 1, "--model: no model 'absent'"),
        (["--model", "."], 1, "--model: . is no model folder: it has no config.json"),
        (["--context", "1"], 2, "--context: 1 is less than 2"),
        (["--context", "x"], 2, "--context: invalid"),
        (["--kv", "cold"], 2, "--kv: invalid choice: 'cold'"),
        (["--kv-hot-tokens", "0"], 2, "--kv-hot-tokens: 0 is less than 1"),
        (["--kv", "hot+warm+cold", "--kv-warm-tokens", "600"], 2, "--kv-warm-tokens: "),
        (["--kv", "hot+warm", "--kv-hot-tokens", "9999999999"], 2, "--kv-hot-tokens: "),
        (["--stride", "0"], 2, "--stride: 0 is less than 1"),
        (["--tokens", "0"], 2, "--tokens: 0 is less than 1"),
        (["--threads", "-1"], 2, "--threads: -1 is less than 0"),
        (["--backend", "abacus"], 2, "--backend: invalid choice: 'abacus'"),
        (["--dtype", "fp13"], 2, "--dtype: invalid choice: 'fp13'"),
        (["--kv-format", "fp13"], 2, "--kv-format: invalid choice: 'fp13'"),
        (["--dtype", "bf16", "--kv-format", "fp32"], 1, "--model: kv_format: the torch backend"),
        (["--instruction-set", "avx2"], 1, "--model: instruction_set: the torch backend has none to choose from"),
        (["--tempo", "3"], 2, "no such flag: --tempo"),
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
    Path("good.txt").write_text("good text")
    Path("latin1.txt").write_bytes(b"abc\xffde")
    Path("empty.txt").write_text("")
    found, line = refusal("perplexity", "--model", "./model", "--text", "good.txt", *flags)
    assert found == status
    assert f"quire eval perplexity: {said}" in line


def test_the_text_is_required(refusal: Callable[..., tuple[int, str]]) -> None:
    status, line = refusal("perplexity")
    assert (status, "required: --text" in line) == (2, True)


def test_not_finite_logits_end_it(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., tuple[int, str]]
) -> None:
    whole = TorchModel.logits
    monkeypatch.setattr(TorchModel, "logits", lambda self, hidden: whole(self, hidden) / (hidden.shape[0] - 6))
    path = make_rand_model(tmp_path / "model")
    # 70 tokens make a piece of 64 rows, then one of 6.
    status, line = refusal("perplexity", "--model", path, "--text", text, "--tokens", "70", "--dtype", "fp32")
    assert (status, line) == (1, "quire eval perplexity: model: the model's logits are not finite")
