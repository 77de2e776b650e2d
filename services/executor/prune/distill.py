"""A short distillation: what is left learns to say what the whole model says.

The loss is the divergence of the next tokens' distributions (Hinton et al. 2015; alone, as Muralidharan et al. 2024,
Minitron, found best). Embedding and head stay as they are. The whole model is not in memory: what left its last layer
was kept when it was measured.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from services.executor.models.spec import ModelSpec
from services.executor.quantize.differentiable import Angles, logits, run_layer
from services.executor.quantize.finite import check_computed
from services.executor.quantize.layer import Layer

MOST_HELD_BACK = 8
_LEARNING_RATE = 5e-4
_WARM_UP = 0.05  # of the time
_BETAS = (0.9, 0.95)
_LARGEST_GRADIENT = 1.0
_SEED = 0


@dataclass(frozen=True, slots=True)
class Model:
    """Weights in fp32. Learning changes `layers` and `final_norm` in place."""

    spec: ModelSpec
    layers: list[Layer]
    final_norm: Tensor
    head: Tensor

    def scores(self, x: Tensor) -> Tensor:
        """Logits [S, T, V] of what enters the first layer [S, T, H]."""
        angles = Angles.of(self.spec, x.shape[1])
        for layer in self.layers:
            x = run_layer(layer, self.spec, angles, x)
        return logits(x, self.final_norm, self.head, self.spec)


@dataclass(frozen=True, slots=True)
class Lesson:
    """The text: what enters the first layer, and what the whole model says to it."""

    entering: Tensor  # [S, T, H]
    leaving: Tensor  # [S, T, H]: behind the whole model's last layer
    final_norm: Tensor  # the whole model's

    def part(self, rows: slice) -> Lesson:
        return Lesson(self.entering[rows], self.leaving[rows], self.final_norm)


@dataclass(frozen=True, slots=True)
class Learned:
    """Divergence from the whole model in nats per token, on samples held back from the learning."""

    before: float
    after: float
    steps: int


def distill(
    model: Model, lesson: Lesson, seconds: float, done: Callable[[int], object], clock: Callable[[], float]
) -> Learned:
    """Learns for so long. `lesson` has two samples at least; `done` hears of every second that is over.

    Raises NOT_FINITE as soon as the divergence is no number.
    """
    count = len(lesson.entering)
    held = min(MOST_HELD_BACK, max(1, count // 10))
    learned, held_back = lesson.part(slice(count - held)), lesson.part(slice(count - held, count))
    before = _mean_divergence(model, held_back)
    steps = _learn(model, learned, seconds, done, clock)
    return Learned(before, _mean_divergence(model, held_back), steps)


def learning_rate(share: float) -> float:
    """After this share of the time: a short rise, then half a cosine down to zero."""
    if share < _WARM_UP:
        return _LEARNING_RATE * share / _WARM_UP
    return _LEARNING_RATE * 0.5 * (1 + math.cos(math.pi * (share - _WARM_UP) / (1 - _WARM_UP)))


def _learn(
    model: Model, lesson: Lesson, seconds: float, done: Callable[[int], object], clock: Callable[[], float]
) -> int:
    """Steps made, one sample each."""
    parameters = [weights.requires_grad_() for layer in model.layers for weights in layer.values()]
    parameters.append(model.final_norm.requires_grad_())
    optimizer = torch.optim.AdamW(parameters, betas=_BETAS, weight_decay=0.0)
    started, told, steps = clock(), 0, 0
    elapsed = 0.0
    for row in _order(len(lesson.entering)):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(elapsed / seconds)
        optimizer.zero_grad(set_to_none=True)
        _divergence(model, lesson, row).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, _LARGEST_GRADIENT)
        optimizer.step()
        steps += 1
        elapsed = clock() - started
        passed = min(int(elapsed), int(seconds)) - told
        done(passed)
        told += passed
        if elapsed >= seconds:
            break
    for weights in parameters:
        weights.requires_grad_(False)
    return steps


def _order(count: int) -> Iterator[int]:
    """Samples without end, all of them in every round, each round in another order."""
    random = torch.Generator().manual_seed(_SEED)
    return itertools.chain.from_iterable(torch.randperm(count, generator=random).tolist() for _ in itertools.count())


def _mean_divergence(model: Model, lesson: Lesson) -> float:
    count = len(lesson.entering)
    with torch.no_grad():
        return sum(float(_divergence(model, lesson, row)) for row in range(count)) / count


def _divergence(model: Model, lesson: Lesson, row: int) -> Tensor:
    """Of one sample: KL from what the whole model says, mean over tokens. Raises NOT_FINITE."""
    with torch.no_grad():
        wanted = logits(lesson.leaving[row], lesson.final_norm, model.head, model.spec).log_softmax(-1)
    found = model.scores(lesson.entering[row : row + 1])[0].log_softmax(-1)
    divergence = F.kl_div(found, wanted, log_target=True, reduction="batchmean")
    check_computed("the divergence from the whole model", divergence.detach())
    return divergence
