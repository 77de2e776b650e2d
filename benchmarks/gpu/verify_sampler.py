"""The sampling kernels, as the backend uses them, against the rules that every sampler is held to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.gpu.report import Row
from benchmarks.gpu.setting import Setting
from kernels.token_sampler import accept_drafts, count_tokens, score_tokens
from services.executor.backends.base import SampleRow, SamplingRule
from services.executor.backends.cuda.draws import plan_draws
from services.executor.backends.cuda.memory_layout import send
from services.executor.backends.cuda.sampler import Sampler, rule_arrays, sampling_state
from services.executor.sampling.draw import draw, single_rows
from services.executor.sampling.scores import score

RULES = (
    SamplingRule(temperature=0.0),
    SamplingRule(temperature=1.0, seed=5),
    SamplingRule(temperature=0.7, top_k=5, seed=-3, choice=2),
    SamplingRule(temperature=1.3, top_p=0.6, seed=1 << 40),
    SamplingRule(temperature=2.0, top_k=40, top_p=0.9, min_p=0.02, seed=9),
    SamplingRule(temperature=0.8, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3, seed=2),
    SamplingRule(temperature=0.5, logit_bias={4: 2.0}, min_tokens=9, banned_until_min_tokens=(0, 1, 2), seed=4),
)


def verify_sampler(setting: Setting) -> Iterator[Row]:
    """Tokens that differ from those of the rules, and how far scores are off."""
    vocabulary = setting.sized(128256, 700)
    samples = [SampleRow(3 * i, rule, [1, 2, 3], [4, 5, 4], draft_ids=[7, 9]) for i, rule in enumerate(RULES)]
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3 * len(RULES), vocabulary, generator=generator) * 3
    draws = plan_draws(samples, None)
    sampler = Sampler(vocabulary, setting.device)
    state = sampling_state(send(setting.device, rule_arrays(draws)), len(draws.rows))
    found = sampler.draw(logits.to(setting.place), state, sampler.extras(draws)).cpu()
    expected = np.array(draw(list(logits.numpy()), single_rows(samples)))
    yield Row("tokens drawn that are others", float((found.numpy() != expected).sum()), "tokens", 0, "at most")
    yield Row("of so many", float(len(expected)), "tokens")

    targets = torch.arange(len(logits), dtype=torch.int32)
    # Apart by more than rounding, or equal: both then agree about every rank.
    logits = (logits * 64).round() / 64
    scores = score_tokens(logits.to(setting.place), targets.to(setting.place), 5)
    wanted = score(list(logits.numpy()), targets.tolist(), 5)
    error = np.abs(scores.chosen.cpu().numpy() - np.array(wanted.chosen)).max()
    yield Row("log probabilities", float(error) / 1e-4, "of budget", 1.0, "at most")
    wrong = (scores.top_ids.cpu().numpy() != np.array(wanted.top_ids)).sum()
    wrong += (scores.ranks.cpu().numpy() != np.array(wanted.ranks)).sum()
    yield Row("ranks and alternatives that are others", float(wrong), "", 0, "at most")

    drafts = torch.tensor([[5, 6], [5, 9], [1, 1]], dtype=torch.int32, device=setting.place)
    drawn = torch.tensor([5, 6, 7, 5, 8, 3, 2], dtype=torch.int32, device=setting.place)
    starts = torch.tensor([0, 3, 6, 7], dtype=torch.int32, device=setting.place)
    accepted, following = accept_drafts(drawn, drafts, starts)
    is_right = accepted.tolist() == [2, 1, 0] and following.tolist() == [7, 8, 2]
    yield Row("drafts that hold", float(is_right), "", 1.0)

    counts = torch.zeros((3, vocabulary), dtype=torch.int32, device=setting.place)
    slots, lengths = (torch.tensor(part, dtype=torch.int32, device=setting.place) for part in ([2, -1, 0], [3, 2, 1]))
    tokens = torch.tensor([[5, 5, vocabulary - 1], [1, 1, 1], [7, 1, 1]], dtype=torch.int32, device=setting.place)
    count_tokens(counts, slots, tokens, lengths)
    places = [(row, token, int(counts[row, token])) for row, token in counts.nonzero().tolist()]
    is_right = places == [(0, 7, 2), (2, 5, 4), (2, vocabulary - 1, 2)]
    yield Row("tokens counted", float(is_right), "", 1.0)
