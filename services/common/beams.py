"""What a request for beam search may ask for. Pure: the gateway and the scheduler check alike."""

from __future__ import annotations

import math

from quire.v1 import gateway_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason, invalid
from services.common.limits import check_integer

MAX_BEAM_WIDTH = 32
MAX_LENGTH_PENALTY = 10.0

_NEUTRAL = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""Values of sampling parameters that change nothing where nothing is drawn."""


def check_beams(request: gateway_pb2.GenerationInput | scheduler_pb2.Submit, model: types_pb2.ModelDescription) -> None:
    """Raises INVALID_FIELD or UNSUPPORTED, naming the field, for what contradicts beam search or goes with it alone."""
    width = request.beam_width
    check_integer("beam_width", width, 0, MAX_BEAM_WIDTH)
    if not width:
        if request.HasField("length_penalty"):
            raise invalid("length_penalty", "goes with beam search: set beam_width")
        return
    penalty = request.length_penalty
    if not (math.isfinite(penalty) and abs(penalty) <= MAX_LENGTH_PENALTY):
        raise invalid(
            "length_penalty", f"must be in [-{MAX_LENGTH_PENALTY:g}, {MAX_LENGTH_PENALTY:g}], not {penalty:g}"
        )
    if request.choice_count > width:
        raise invalid("choice_count", f"{request.choice_count} answers are more than the {width} beams")
    _check_sampling(request.sampling)
    if request.stop.stop:
        raise QuireError(
            Reason.UNSUPPORTED, "stop.stop: beam search ends by tokens only: use stop_token_ids", field="stop.stop"
        )
    if request.HasField("constraint"):
        raise QuireError(
            Reason.UNSUPPORTED, "constraint: structured output is not available with beam search", field="constraint"
        )
    if request.logprobs.HasField("prompt_count"):
        raise QuireError(
            Reason.UNSUPPORTED,
            "logprobs.prompt_count: is not available with beam search",
            field="logprobs.prompt_count",
        )
    if width > model.vocab_size - len(end_tokens(request.stop, model)):
        raise invalid("beam_width", f"the vocabulary has fewer than {width} tokens that do not end an answer")


def end_tokens(stop: types_pb2.StopCriteria, model: types_pb2.ModelDescription) -> frozenset[int]:
    """Tokens of the vocabulary that end an answer."""
    own = () if stop.ignore_eos else model.eos_token_ids
    return frozenset(token for token in (*stop.stop_token_ids, *own) if token < model.vocab_size)


def _check_sampling(sampling: types_pb2.SamplingParams) -> None:
    for name, neutral in _NEUTRAL.items():
        if sampling.HasField(name) and getattr(sampling, name) != neutral:  # type: ignore[arg-type]
            raise invalid(f"sampling.{name}", "beam search looks at the model's own probabilities and draws nothing")
    if sampling.top_k > 0:
        raise invalid("sampling.top_k", "beam search looks at all tokens and draws nothing")
    if sampling.logit_bias:
        raise invalid("sampling.logit_bias", "beam search looks at the model's own probabilities")
