"""What a generation yields: the one vocabulary between the engine client and the gRPC and HTTP surfaces."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.v1.types_pb2 import FinishReason
from services.gateway.output.parts import Part, Text


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
    kept: bool = False  # whether a client that is cut off may come back for the rest


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Log probabilities of the whole prompt, before the first delta, where asked for."""

    tokens: tuple[ScoredToken, ...]


@dataclass(frozen=True, slots=True)
class Embedded:
    """The vector of the prompt, where that was asked for instead of output."""

    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one choice. `text` is empty while bytes or a possible stop string are held back.

    Where thinking and calls are told apart, `parts` has all of the output, and `text` what is neither.
    """

    choice: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[ScoredToken, ...] | None = None
    finish_reason: FinishReason.ValueType | None = None  # set in the choice's last delta
    matched_stop: str | None = None
    matched_token_id: int | None = None
    cumulative_logprob: float | None = None  # of all tokens: in the last delta of a path of beam search
    parts: tuple[Part, ...] | None = None
    called: bool = False  # whether there are calls of tools so far
    length: int = 0  # tokens of the choice, these included
    seen: bool = False  # the client has it: it only says where the rest begins


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event: every choice ended."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int | None = None  # of all choices, where thinking is told apart


Event = Started | PromptScores | Embedded | Delta | Finished


def parts_of(delta: Delta) -> tuple[Part, ...]:
    """What is new, in order."""
    if delta.parts is not None:
        return delta.parts
    return (Text(delta.text),) if delta.text else ()
