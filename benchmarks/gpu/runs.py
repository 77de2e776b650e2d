"""Sequences run through a backend step by step, as a worker would."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.executor.backends.base import Backend, SampleRow, SamplingRule, StepInputs

GREEDY = SamplingRule(temperature=0.0)


class Run:
    """Some sequences of equal right to blocks: each has `room` tokens."""

    def __init__(
        self,
        backend: Backend,
        block_size: int,
        prompts: Sequence[Sequence[int]],
        room: int,
        rule: SamplingRule = GREEDY,
    ) -> None:
        self._backend, self._rule = backend, rule
        self.tokens = [list(prompt) for prompt in prompts]
        self._samples = [SampleRow(0, rule, list(prompt), []) for prompt in prompts]
        each = -(-room // block_size)
        self._tables = np.arange(len(prompts) * each, dtype=np.int32).reshape(len(prompts), each)
        self._slots = np.full(len(prompts), each * block_size, np.int32)
        self._computed = [0] * len(prompts)

    def prefill(self, chunk: int) -> None:
        """Computes each prompt but for its last token, `chunk` tokens of one sequence a step."""
        for i, tokens in enumerate(self.tokens):
            while self._computed[i] < len(tokens) - 1:
                start = self._computed[i]
                end = min(start + chunk, len(tokens) - 1)
                self._backend.step(
                    StepInputs(
                        token_ids=np.array(tokens[start:end], np.int32),
                        positions=np.arange(start, end, dtype=np.int32),
                        query_starts=np.array([0, end - start], np.int32),
                        context_lengths=np.array([end], np.int32),
                        block_tables=self._tables[i : i + 1],
                        samples=[],
                    )
                )
                self._computed[i] = end

    def leave(self, index: int) -> None:
        """Goes on without a sequence; the others keep their blocks."""
        for part in (self.tokens, self._samples, self._computed):
            del part[index]
        self._tables, self._slots = np.delete(self._tables, index, 0), np.delete(self._slots, index)

    def decode(self, steps: int) -> None:
        """Draws so many tokens of each sequence, all at once."""
        for _ in range(steps):
            lengths = np.array([len(tokens) for tokens in self.tokens], np.int32)
            for row, sample in enumerate(self._samples):
                sample.row = row
            outputs = self._backend.step(
                StepInputs(
                    token_ids=np.array([tokens[-1] for tokens in self.tokens], np.int32),
                    positions=lengths - 1,
                    query_starts=np.arange(len(lengths) + 1, dtype=np.int32),
                    context_lengths=lengths,
                    block_tables=self._tables,
                    samples=list(self._samples),
                    room=lambda: self._slots,  # it is always likely that one goes on
                )
            )
            for tokens, sample, drawn in zip(self.tokens, self._samples, outputs.sampled, strict=True):
                if drawn is None:
                    raise RuntimeError("logits are not finite")
                tokens.append(drawn.token_id)
                assert isinstance(sample.output_ids, list)
                sample.output_ids.append(drawn.token_id)


def generate(
    backend: Backend, block_size: int, prompts: Sequence[Sequence[int]], count: int, chunk: int = 256,
    rule: SamplingRule = GREEDY,
) -> list[list[int]]:  # fmt: skip
    """What each prompt is answered with."""
    run = Run(backend, block_size, prompts, max(map(len, prompts)) + count, rule)
    run.prefill(chunk)
    run.decode(count)
    return [tokens[len(prompt) :] for tokens, prompt in zip(run.tokens, prompts, strict=True)]
