"""The calibration text: what it is, and how it moves through layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.common.errors import QuireError
from services.executor.models.checkpoint import open_checkpoint
from services.executor.quantize import stream as streams
from services.executor.quantize.calibration import cut_text, draw_text
from services.executor.quantize.choice import CalibrationSize, Source
from services.executor.quantize.layer import GROUPS, read_layer
from services.executor.quantize.stream import CalibrationStream, embed
from tests.fixtures.models import make_rand_model, reference_logits
from tests.fixtures.vocabularies import BOS_ID, byte_level

MATRICES = {
    "qkv": "self_attn.q_proj",
    "o": "self_attn.o_proj",
    "gate_up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@pytest.mark.parametrize("length", [70, 128])
def test_shows_what_matrices_multiply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    """As the reference in float64 does; in pieces of two sequences, and of one in the end."""
    monkeypatch.setattr(streams, "_CHUNK_TOKENS", 2 * length)
    path = make_rand_model(tmp_path / "model", config={"attention_bias": True})
    tokens = np.random.default_rng(0).integers(0, 256, (3, length), np.int32)
    expected: dict[str, list[Tensor]] = {}

    def note(x: Tensor, name: str) -> Tensor:
        expected.setdefault(name, []).append(x)
        return x

    for sample in tokens.tolist():
        reference_logits(path, sample, note)
    checkpoint = open_checkpoint(path)
    stream = CalibrationStream(checkpoint.spec, embed(checkpoint, tokens))
    for index in range(2):
        layer = read_layer(checkpoint, index)
        kept = stream.hidden.clone()
        observed: dict[str, list[Tensor]] = {group: [] for group in GROUPS}
        stream.observe(layer, {group: lambda x, seen=seen: seen.append(x.clone()) for group, seen in observed.items()})
        assert torch.equal(stream.hidden, kept)
        for group in GROUPS:
            visited: list[Tensor] = []
            stream.visit(group, layer, lambda x, seen=visited: seen.append(x.clone()))
            assert torch.equal(torch.cat(visited), torch.cat(observed[group]))
            wanted = torch.cat(expected[f"model.layers.{index}.{MATRICES[group]}"])
            assert torch.allclose(torch.cat(visited).double(), wanted, rtol=1e-3, atol=1e-4)
        stream.finish(layer)
        at_once = CalibrationStream(checkpoint.spec, kept)
        at_once.pass_through(layer)
        assert torch.equal(at_once.hidden, stream.hidden)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_samples_lie_evenly_in_the_text(tmp_path: Path, adds_bos: bool) -> None:
    path = make_rand_model(tmp_path / "model", vocabulary=byte_level(add_bos=adds_bos))
    text = "".join(chr(ord("A") + place % 26) for place in range(1000))
    samples = cut_text(text, path, 260, CalibrationSize(4, 32))
    room = 31 if adds_bos else 32
    assert samples.shape == (4, 32)
    whole = 1000 // room
    places = [round(i * (whole - 1) / 3) * room for i in range(4)]
    for sample, place in zip(samples.tolist(), places, strict=True):
        assert sample == [BOS_ID] * adds_bos + [*text[place : place + room].encode()]
    assert len(cut_text(text, path, 260, CalibrationSize(500, 100))) == 1000 // (99 if adds_bos else 100)


@pytest.mark.parametrize(
    ("text", "vocab_size", "said"),
    [
        ("short", 260, "--calibration: it has 5 tokens; a sample takes 31"),
        ("z" * 40, 100, "--calibration: its tokenizer makes token 122, which the model does not have"),
    ],
)
def test_a_text_that_is_no_use(tmp_path: Path, text: str, vocab_size: int, said: str) -> None:
    path = make_rand_model(tmp_path / "model")
    with pytest.raises(QuireError, match=said):
        cut_text(text, path, vocab_size, CalibrationSize(1, 32))


def test_a_model_writes_its_own_text(tmp_path: Path) -> None:
    path = make_rand_model(tmp_path / "model")
    heard: list[int] = []

    @contextmanager
    def bar(what: str, done: int, total: int, unit: str) -> Iterator[Callable[[int], object]]:
        yield heard.append

    source = Source(str(path), path, None, CalibrationSize(3, 20), 1)
    samples = draw_text(source, bar)
    assert samples.shape == (3, 20)
    assert samples[:, 0].tolist() == [BOS_ID] * 3
    assert sum(heard) == 57
    assert len(np.unique(samples, axis=0)) == 3
    assert np.array_equal(draw_text(source, bar), samples)
