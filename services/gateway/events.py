"""What a generation yields: the one vocabulary between the engine client and the gRPC and HTTP surfaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.v1.types_pb2 import FinishReason


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its log probability; `logprob` is None for the first prompt token only."""

    token_id: int
    token: bytes  # may be part of a character
    logprob: float | None
    rank: int
    top: tuple[ScoredToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """First event: the prompt was placed."""

    request_id: str
    model: str
    created: int  # Unix seconds
    prompt_token_ids: tuple[int, ...]
    cached_tokens: int
    seed: int  # the client's, or the one drawn
    headers: Mapping[str, str] = field(default_factory=dict)  # what the answer tells of the caller's rates


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of the whole prompt, before the first delta, where asked for."""

    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice. `text` is empty while bytes or a possible stop string are held back."""

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ScoredToken, ...] | None = None
    finish_reason: FinishReason.ValueType | None = None  # set in the choice's last delta
    matched_stop: str | None = None
    matched_token_id: int | None = None
    cumulative_logprob: float | None = None  # of all tokens: in the last delta of a path of beam search


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event: every choice ended."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


Event = Started | PromptScores | Delta | Finished
