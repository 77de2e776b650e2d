"""From a generation's events to answers made of tensors. Pure."""

from __future__ import annotations

from collections import defaultdict

from quire.v1.foreign.open_inference_pb2 import ModelInferResponse
from services.gateway.events import Delta
from services.gateway.foreign.open_inference.request import FINAL_RESPONSE, VERSION, Asked
from services.gateway.foreign.open_inference.tensors import add_counts, add_texts
from services.gateway.http.fanout import cut_short, finish_reason


class Answer:
    """What was generated since the last message, by choice."""

    def __init__(self, asked: Asked, model: str, request_id: str) -> None:
        self._asked, self._model, self._id = asked, model, request_id
        self._texts: defaultdict[int, list[str]] = defaultdict(list)
        self._counts: defaultdict[int, int] = defaultdict(int)
        self._reasons: dict[int, str] = {}
        self._prompt_tokens = 0

    def started(self, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens

    def add(self, delta: Delta) -> None:
        self._texts[delta.choice].append(delta.text)
        self._counts[delta.choice] += len(delta.token_ids)
        if (reason := finish_reason(delta)) is not None:
            self._reasons[delta.choice] = reason

    def piece(self) -> ModelInferResponse:
        """What is new of all choices, each in its place, for a stream."""
        return self._make()

    def whole(self) -> ModelInferResponse:
        """The answer. INTERNAL where a choice has not ended."""
        if not self._complete:
            raise cut_short()
        return self._make()

    @property
    def _complete(self) -> bool:
        return len(self._reasons) == self._asked.input.choice_count

    def _make(self) -> ModelInferResponse:
        choices = range(self._asked.input.choice_count)
        response = ModelInferResponse(model_name=self._model, model_version=VERSION, id=self._id)
        wanted = self._asked.outputs
        if "text_output" in wanted:
            texts = ["".join(self._texts[choice]) for choice in choices]
            add_texts(response, "text_output", [self._asked.prefix + text for text in texts])
        if "finish_reason" in wanted:
            add_texts(response, "finish_reason", [self._reasons.get(choice, "None") for choice in choices])
        if "num_input_tokens" in wanted:
            add_counts(response, "num_input_tokens", [self._prompt_tokens])
        if "num_output_tokens" in wanted:
            add_counts(response, "num_output_tokens", [self._counts[choice] for choice in choices])
        if self._asked.final_flag:
            response.parameters[FINAL_RESPONSE].bool_param = self._complete
        self._texts.clear()
        self._counts.clear()
        return response
