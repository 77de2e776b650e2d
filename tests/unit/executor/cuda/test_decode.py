"""Steps begun ahead: the same tokens as without, under rules, with neighbours that leave, and where memory ran out."""

from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.gpu.models import TINY, on_cuda, on_torch, random_weights
from benchmarks.gpu.runs import Run, generate
from services.executor.backends.base import SamplingRule
from services.executor.backends.cuda.backend import CudaBackend, StepSizes
from services.executor.backends.cuda.decode import DecodeSteps
from services.executor.backends.cuda.device import Device, InterpretedDevice, find_device
from services.executor.backends.cuda.sampler import Sampler
from tests.triton_device import DEVICE

PROMPTS = [[7, 8, 9], [100, 3]]
SIZES = StepSizes(sequences=2, tokens=32)
RULES = [
    SamplingRule(temperature=0.0),
    SamplingRule(temperature=1.0, seed=5, frequency_penalty=0.7, repetition_penalty=1.2),
    SamplingRule(temperature=0.9, top_k=20, seed=3, min_tokens=2, banned_until_min_tokens=(4, 5), logprob_count=1),
]


@pytest.fixture(scope="module")
def device() -> Device:
    found = find_device()
    assert found is not None
    return found


@pytest.fixture(scope="module")
def weights():
    return random_weights(TINY, torch.float32, DEVICE)


@pytest.fixture(scope="module")
def backend(weights, device) -> CudaBackend:
    return on_cuda(TINY, weights, device, dtype="fp32", sizes=SIZES, blocks=24)


@pytest.fixture
def begun(monkeypatch) -> list[int]:
    """Sequences of each step that was begun when it was asked for, not ahead."""
    found: list[int] = []
    plain = DecodeSteps.begin

    def begin(self, inputs, draws):
        found.append(len(inputs.context_lengths))
        return plain(self, inputs, draws)

    monkeypatch.setattr(DecodeSteps, "begin", begin)
    return found


@pytest.mark.parametrize("rule", RULES, ids=["greedy", "penalties", "bans"])
def test_steps_are_begun_ahead_and_draw_what_torch_draws(backend, weights, device, begun, rule) -> None:
    run = Run(backend, 16, PROMPTS, 12, rule)
    run.prefill(8)
    before = len(begun)
    run.decode(4)
    # The first one; and where a ban ends, the next one had to wait.
    assert len(begun) - before == (2 if rule.min_tokens else 1)
    expected = generate(on_torch(TINY, weights, device, dtype="fp32"), 16, PROMPTS, 4, rule=rule)
    assert [tokens[len(prompt) :] for tokens, prompt in zip(run.tokens, PROMPTS, strict=True)] == expected


def test_a_sequence_that_leaves_costs_one_step_and_no_token(backend, begun) -> None:
    rule = SamplingRule(temperature=0.8, seed=1, presence_penalty=0.5)
    expected = generate(backend, 16, PROMPTS, 4, rule=rule)
    run = Run(backend, 16, PROMPTS, 12, rule)
    run.prefill(8)
    before = len(begun)
    run.decode(2)
    first = run.tokens[0]
    run.leave(0)
    run.decode(2)
    assert len(begun) - before == 2
    assert first == PROMPTS[0] + expected[0][:2]
    assert run.tokens == [PROMPTS[1] + expected[1]]


def test_what_finds_no_memory_is_not_captured(weights, caplog) -> None:
    class Small(InterpretedDevice):
        """Has no room for the first sizes."""

        left = 2

        def capture(self, run):
            if self.left:
                self.left -= 1
                raise torch.OutOfMemoryError("none left")
            return run

    if DEVICE.type != "cpu":
        pytest.skip("imitates a card on the CPU")
    with caplog.at_level(logging.INFO, "quire.executor"):
        sizes = StepSizes(sequences=3, tokens=32)
        backend = on_cuda(TINY, weights, Small(), dtype="fp32", sizes=sizes, blocks=24)
    warned = [record.__dict__["sequences"] for record in caplog.records if record.levelname == "WARNING"]
    assert warned == [3, 2]
    assert "captured decode steps" in caplog.text
    full = on_cuda(TINY, weights, InterpretedDevice(), dtype="fp32", sizes=sizes, blocks=24)
    assert generate(backend, 16, PROMPTS, 1) == generate(full, 16, PROMPTS, 1)


def test_memory_is_what_is_left_once_steps_have_theirs(weights, monkeypatch) -> None:
    class Card(InterpretedDevice):
        """Has a thousand bytes; what is captured takes a tenth."""

        free = 1000

        def free_memory(self):
            return self.free

        def most_taken(self, run):
            drawn.clear()
            run()
            assert drawn == [2 * 3]  # all that a step may draw: a token and two drafts of each sequence
            return 200

        def capture(self, run):
            self.free = 900
            return run

    drawn: list[int] = []
    plain = Sampler.draw
    monkeypatch.setattr(Sampler, "draw", lambda self, logits, *a: drawn.append(len(logits)) or plain(self, logits, *a))
    backend = on_cuda(TINY, weights, Card(), dtype="fp32", sizes=replace(SIZES, queries=3), blocks=24)
    backend._device.free = 1000
    assert backend.device_memory() == 700


def test_logits_are_those_of_torch(backend, weights, device) -> None:
    from services.executor.backends.base import StepInputs

    inputs = StepInputs(
        token_ids=np.array([7, 8, 9, 4, 2], np.int32),
        positions=np.array([0, 1, 2, 0, 1], np.int32),
        query_starts=np.array([0, 3, 5], np.int32),
        context_lengths=np.array([3, 2], np.int32),
        block_tables=np.array([[3], [1]], np.int32),
        samples=[],
    )
    expected = on_torch(TINY, weights, device, dtype="fp32").logits(inputs, [0, 2, 4])
    np.testing.assert_allclose(backend.logits(inputs, [0, 2, 4]), expected, rtol=1e-4, atol=1e-4)
