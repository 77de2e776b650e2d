"""From a VllmEngine request to the engine's input, and from the input's fields back. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Final

from quire.v1.foreign.vllm_engine_pb2 import GenerateRequest, SamplingParams, TokenizedInput
from quire.v1.gateway_pb2 import GenerationInput, TokenIds
from quire.v1.types_pb2 import ChoiceList, Constraint, LogprobOptions, StopCriteria
from quire.v1.types_pb2 import SamplingParams as Sampling
from services.common.errors import invalid

_PARAMS: Final = "sampling_params"
_MAX_INT32: Final = 2**31 - 1
_REFUSED: Final = ("kv_transfer_params", "kv_transfer_params_json", "mm_inputs", "media_refs")

NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "token_ids": "tokenized.input_ids",
        "token_ids.ids": "tokenized.input_ids",
        "prompt": "input",
        "sampling": _PARAMS,
        "stop": _PARAMS,
        "stop.include_stop": f"{_PARAMS}.include_stop_str_in_output",
        "logprobs.output_count": f"{_PARAMS}.logprobs",
        "logprobs.prompt_count": f"{_PARAMS}.prompt_logprobs",
        "choice_count": f"{_PARAMS}.n",
        "constraint": _PARAMS,
    }
)
"""Where a field of the input comes from."""


def to_input(request: GenerateRequest) -> GenerationInput:
    """The request as our own API has it. INVALID_FIELD for what is not served, by the client's name of the field."""
    for name in _REFUSED:
        if request.HasField(name):
            raise invalid(name, "is not supported")
    if request.extra_mm_inputs:
        raise invalid("extra_mm_inputs", "is not supported")
    if request.data_parallel_rank:
        raise invalid("data_parallel_rank", f"there is rank 0 alone, not {request.data_parallel_rank}")
    params = request.sampling_params
    if params.HasField("truncate_prompt_tokens"):
        raise invalid(f"{_PARAMS}.truncate_prompt_tokens", "is not supported")
    result = GenerationInput(
        request_id=request.request_id,
        sampling=_sampling(params),
        stop=_stop(params),
        logprobs=LogprobOptions(
            output_count=params.logprobs if params.HasField("logprobs") else None,
            prompt_count=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        ),
        choice_count=_int32(f"{_PARAMS}.n", params.n) or 1,
        constraint=_constraint(params),
        keep_special_tokens=not params.skip_special_tokens,
    )
    kind = request.WhichOneof("input")
    if kind == "text":
        result.text = request.text
    elif kind == "tokenized":
        result.token_ids.CopyFrom(prompt_ids(request.tokenized))
    return result


def prompt_ids(tokenized: TokenizedInput) -> TokenIds:
    """Token ids of a prompt; the text beside them is for people."""
    return TokenIds(ids=_ids("tokenized.input_ids", tokenized.input_ids))


def _sampling(params: SamplingParams) -> Sampling:
    return Sampling(
        temperature=params.temperature if params.HasField("temperature") else None,
        top_p=params.top_p or None,
        top_k=_int32(f"{_PARAMS}.top_k", params.top_k),
        min_p=params.min_p,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty or None,
        logit_bias=dict(params.logit_bias),
        seed=params.seed if params.HasField("seed") else None,
    )


def _stop(params: SamplingParams) -> StopCriteria:
    return StopCriteria(
        max_tokens=_int32(f"{_PARAMS}.max_tokens", params.max_tokens) if params.HasField("max_tokens") else None,
        min_tokens=_int32(f"{_PARAMS}.min_tokens", params.min_tokens),
        stop=params.stop,
        stop_token_ids=_ids(f"{_PARAMS}.stop_token_ids", params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        include_stop=params.include_stop_str_in_output,
    )


def _constraint(params: SamplingParams) -> Constraint | None:
    kind = params.WhichOneof("constraint")
    if kind is None:
        return None
    if kind == "choice":
        return Constraint(choice=ChoiceList(values=params.choice.choices))
    return Constraint(**{kind: getattr(params, kind)})


def _ids(field: str, ids: Iterable[int]) -> list[int]:
    found = list(ids)
    _int32(field, max(found, default=0))
    return found


def _int32(field: str, value: int) -> int:
    """The wire has no sign here, ours has."""
    if value > _MAX_INT32:
        raise invalid(field, f"{value} is above {_MAX_INT32}")
    return value
