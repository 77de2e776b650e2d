"""Drives a torch backend without a worker: sequences over shuffled blocks, raw logits out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from services.executor.backends import torch_backend
from services.executor.backends.base import KvShape, PromptScoreRows, Sampled, SampleRow, SamplingRule, StepInputs
from services.executor.backends.torch_backend import TorchBackend
from services.executor.models.checkpoint import open_checkpoint

BLOCK_SIZE = 16
BLOCKS_EACH = 24
MOST_SEQUENCES = 40


class Runs:
    """A loaded backend whose KV starts out as NaN, and the sequences that were fed to it."""

    def __init__(self, path: Path, dtype: str = "fp32", threads: int = 1) -> None:
        self.backend = TorchBackend.load(
            open_checkpoint(path), dtype=dtype, threads=threads, context_length=None, device="cpu"
        )
        count = BLOCKS_EACH * MOST_SEQUENCES
        self.backend.allocate_kv(KvShape(BLOCK_SIZE, self.backend.kv_block_bytes(BLOCK_SIZE), count))
        assert self.backend._kv is not None
        self.backend._kv.hot.fill_(float("nan"))
        self.tables = np.random.default_rng(0).permutation(count).astype(np.int32).reshape(-1, BLOCKS_EACH)
        self.computed = [0] * MOST_SEQUENCES

    def step(
        self, chunks: dict[int, Sequence[int]], prompt_scores: Sequence[PromptScoreRows] = ()
    ) -> dict[int, torch.Tensor]:
        """Feeds each sequence its tokens; returns the logits [V] after each one's last."""
        ids: list[int] = []
        positions: list[int] = []
        starts, contexts = [0], []
        for sequence, tokens in chunks.items():
            ids += tokens
            positions += range(self.computed[sequence], self.computed[sequence] + len(tokens))
            self.computed[sequence] += len(tokens)
            starts.append(len(ids))
            contexts.append(self.computed[sequence])
        samples = [SampleRow(end - 1, SamplingRule(temperature=0.0), [], []) for end in starts[1:]]
        arrays = (np.array(values, np.int32) for values in (ids, positions, starts, contexts))
        inputs = StepInputs(*arrays, self.tables[list(chunks)], samples, list(prompt_scores))
        seen: list[torch.Tensor] = []

        def record(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[Sampled | None]:
            seen.append(logits.clone())
            return [None] * len(rows)

        original, torch_backend.sample = torch_backend.sample, record
        try:
            self.scores = self.backend.step(inputs).prompt_scores
        finally:
            torch_backend.sample = original
        return dict(zip(chunks, seen[0], strict=True))

    def prefill(self, sequence: int, tokens: Sequence[int], chunk: int) -> torch.Tensor:
        """Feeds one sequence alone in chunks; returns the logits after its last token."""
        for start in range(0, len(tokens), chunk):
            logits = self.step({sequence: tokens[start : start + chunk]})
        return logits[sequence]


def token_ids(seed: int, count: int, vocab_size: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab_size, count)]
