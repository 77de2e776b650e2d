"""From a generation's events to VllmEngine's messages. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from quire.v1.foreign.vllm_engine_pb2 import (
    GenerateComplete,
    GenerateRequest,
    GenerateResponse,
    GenerateStreamChunk,
    InputLogProbs,
    InputTokenLogProb,
    OutputLogProbs,
    TopLogProbs,
)
from quire.v1.types_pb2 import FinishReason
from services.common.errors import QuireError, Reason
from services.gateway.events import Delta, Event, PromptScores, ScoredToken, Started

_REASONS: Final = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class _Choice:
    ids: list[int] = field(default_factory=list)
    scores: list[ScoredToken] = field(default_factory=list)  # where they are told at the end
    begun: bool = False  # a chunk of it was sent
    ended: bool = False


class Answer:
    """One request's answer as it grows."""

    def __init__(self, request: GenerateRequest, choices: int) -> None:
        self._stream, self._stop_ids = request.stream, frozenset(request.sampling_params.stop_token_ids)
        self._scored = request.sampling_params.HasField("logprobs")
        self._choices = [_Choice() for _ in range(choices)]
        self._prompt_tokens = self._cached_tokens = 0
        self._prompt_scores: InputLogProbs | None = None

    def take(self, event: Event) -> Iterator[GenerateResponse]:
        """What is to be sent now."""
        if isinstance(event, Started):
            self._prompt_tokens, self._cached_tokens = len(event.prompt_token_ids), event.cached_tokens
        elif isinstance(event, PromptScores):
            self._prompt_scores = _input_logprobs(event.tokens)
        elif isinstance(event, Delta):
            yield from self._delta(event)

    def abort(self) -> Iterator[GenerateResponse]:
        """The ends of the choices that go on, where somebody asked for it."""
        for index, choice in enumerate(self._choices):
            if not choice.ended:
                yield self._complete(index, choice, "abort")

    def _delta(self, delta: Delta) -> Iterator[GenerateResponse]:
        choice = self._choices[delta.choice]
        choice.ids += delta.token_ids
        if self._stream and delta.token_ids:
            yield GenerateResponse(chunk=self._chunk(delta, choice))
        elif delta.logprobs:
            choice.scores += delta.logprobs
        if delta.finish_reason is None:
            return
        if (reason := _REASONS.get(delta.finish_reason)) is None:
            raise QuireError(Reason.INTERNAL, "the choice ended with a failure")
        response = self._complete(delta.choice, choice, reason)
        if delta.matched_stop:
            response.complete.matched_stop_str = delta.matched_stop
        elif delta.matched_token_id in self._stop_ids:  # the model's own end tokens are not told
            response.complete.matched_token_id = delta.matched_token_id
        yield response

    def _chunk(self, delta: Delta, choice: _Choice) -> GenerateStreamChunk:
        first, choice.begun = not choice.begun, True
        return GenerateStreamChunk(
            token_ids=delta.token_ids,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=len(choice.ids),
            cached_tokens=self._cached_tokens,
            output_logprobs=None if delta.logprobs is None else _output_logprobs(delta.logprobs),
            input_logprobs=self._prompt_scores if first else None,
            index=delta.choice,
        )

    def _complete(self, index: int, choice: _Choice, reason: str) -> GenerateResponse:
        choice.ended = True
        return GenerateResponse(
            complete=GenerateComplete(
                output_ids=choice.ids,
                finish_reason=reason,
                prompt_tokens=self._prompt_tokens,
                completion_tokens=len(choice.ids),
                cached_tokens=self._cached_tokens,
                output_logprobs=_output_logprobs(choice.scores) if self._scored and not self._stream else None,
                input_logprobs=None if choice.begun else self._prompt_scores,
                index=index,
            )
        )


def _output_logprobs(tokens: Iterable[ScoredToken]) -> OutputLogProbs:
    result = OutputLogProbs()
    for token in tokens:
        result.token_logprobs.append(token.logprob or 0.0)
        result.token_ids.append(token.token_id)
        result.top_logprobs.append(_top(token))
    return result


def _input_logprobs(tokens: Iterable[ScoredToken]) -> InputLogProbs:
    result = InputLogProbs()
    for token in tokens:
        result.token_logprobs.append(InputTokenLogProb(value=token.logprob))
        result.token_ids.append(token.token_id)
        result.top_logprobs.append(_top(token))
    return result


def _top(token: ScoredToken) -> TopLogProbs:
    return TopLogProbs(values=[one.logprob or 0.0 for one in token.top], token_ids=[one.token_id for one in token.top])
