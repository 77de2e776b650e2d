"""How long an executor's steps take, learned from what it reports, and how much prefill a step has room for. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from quire.v1 import types_pb2

GAIN = 0.1
"""Part of an error that the figures take over at once."""
UNKNOWN_STEP_SECONDS, UNKNOWN_TOKEN_SECONDS = 0.020, 0.001
"""Of an executor that does not say."""
LEAST_CHUNK = 16
"""Tokens of prefill that a step has room for at least: with fewer, reading the weights outweighs the rest."""
NARROW_CHUNK = 8
"""The same where a client's own target for its gaps asks for less: it slows prompts down, but holds none up."""


@dataclass(slots=True)
class StepTime:
    """What a step takes: `base`, and more for each sequence that decodes, token of prefill and draft. In seconds.

    Learned by normalized least mean squares (Nagumo and Noda, 1967), each figure in units of itself: a report moves
    each in proportion to its part of what was expected. So noise moves them little, they stay above zero, and one that
    no report speaks of stays as it is. No report counts for more than twice or less than half of what was expected.
    """

    base: float = UNKNOWN_STEP_SECONDS
    row: float = UNKNOWN_TOKEN_SECONDS
    token: float = UNKNOWN_TOKEN_SECONDS
    draft: float = UNKNOWN_TOKEN_SECONDS

    @classmethod
    def stated(cls, description: types_pb2.ExecutorDescription) -> StepTime:
        """What an executor says of itself, before it is measured: rows and drafts are taken to cost what tokens do."""
        rate, step = description.prefill_tokens_per_second, description.decode_step_seconds or UNKNOWN_STEP_SECONDS
        token = 1.0 / rate if rate > 0 else UNKNOWN_TOKEN_SECONDS
        row = min(token, step / 2)
        return cls(step - row, row, token, row)

    def observe(self, steps: int, rows: int, tokens: int, seconds: float, drafts: int = 0) -> None:
        """Takes in that `steps` steps took `seconds`, with so many decoding rows, prefill tokens and drafts in all."""
        base, row, token, draft = self.base * steps, self.row * rows, self.token * tokens, self.draft * drafts
        expected = base + row + token + draft
        if expected <= 0.0 or seconds <= 0.0:
            return
        error = min(max(seconds, expected / 2), 2 * expected) - expected
        move = GAIN * error / (base * base + row * row + token * token + draft * draft)
        self.base += self.base * move * base
        self.row += self.row * move * row
        self.token += self.token * move * token
        self.draft += self.draft * move * draft

    @property
    def prompt_speed(self) -> float:
        """Tokens of prefill per second."""
        return 1.0 / self.token

    def step(self, rows: int, drafts: float = 0.0) -> float:
        """Seconds of a step in which so many sequences decode, with so many drafts in all."""
        return self.base + self.row * rows + self.draft * drafts

    def prefill(self, tokens: int) -> float:
        """Seconds that so many tokens of prefill take."""
        return self.token * tokens

    def chunk(
        self, rows: int, stretch: float, most_seconds: float, target: float | None = None, drafts: float = 0.0
    ) -> int:
        """Tokens of prefill beside so many decoding rows and their drafts, at least one.

        The step may take `stretch` times what it takes without them, but no more than `most_seconds`; a client's
        `target` for the gap between its tokens, in seconds, narrows that.
        """
        step = self.step(rows, drafts)
        tokens = max(LEAST_CHUNK, int((min(stretch * step, most_seconds) - step) / self.token))
        if target is None:
            return tokens
        return min(tokens, max(NARROW_CHUNK, int((target - step) / self.token)))


@dataclass(slots=True)
class TierRate:
    """How fast KV moves between the device and lower tiers: old moves count ever less."""

    byte_count: float = 0.0
    seconds: float = 0.0

    def observe(self, byte_count: int, seconds: float) -> None:
        """Takes in moves that ended."""
        self.byte_count = self.byte_count * (1 - GAIN) + byte_count
        self.seconds = self.seconds * (1 - GAIN) + seconds

    def move(self, byte_count: int) -> float:
        """Seconds that so many bytes take; 0 before any was measured: it is tried then."""
        return byte_count * self.seconds / self.byte_count if self.byte_count > 0 else 0.0
