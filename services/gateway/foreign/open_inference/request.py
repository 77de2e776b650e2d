"""From an inference request to the engine's input. Pure.

Parameters have the names, types and defaults of a text completion over HTTP; see that body's schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError
from pydantic_core import from_json

from quire.v1.foreign.open_inference_pb2 import InferParameter, ModelInferRequest
from quire.v1.gateway_pb2 import GenerationInput
from services.common.errors import invalid
from services.gateway.foreign.open_inference.tensors import OUTPUTS, read_inputs
from services.gateway.http.errors import from_validation
from services.gateway.http.schemas import CompletionRequest
from services.gateway.http.to_input import completion_job

VERSION: Final = "1"
FINAL_RESPONSE: Final = "triton_final_response"
_OWN: Final = "triton_enable_empty_final_response"
_MAX_PARAMETERS: Final = 64
_MAX_CHARACTERS: Final = 1 << 18
_GIVEN_OTHERWISE: Final = frozenset(
    {"prompt", "model", "stream", "stream_options", "echo", "logprobs", "prompt_logprobs"}
)
_TEXTS: Final = frozenset({"stop", "guided_regex", "guided_grammar", "speculation", "user"})

_NAMES: Final[Mapping[str, str]] = {
    "prompt": "text_input",
    "text": "text_input",
    "request_id": "id",
    "model": "model_name",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What one request asks for."""

    input: GenerationInput
    names: Mapping[str, str]  # path in the input -> the client's field
    default_budget: bool  # max_tokens is the default, not the client's wish
    stream: bool
    prefix: str  # goes before each text
    outputs: frozenset[str]
    final_flag: bool  # whether each piece says if it is the last
    timeout: float | None  # seconds


def read_request(request: ModelInferRequest, model: str, *, may_stream: bool) -> Asked:
    """INVALID_FIELD or HttpError, each naming what is wrong."""
    check_version("model_version", request.model_version)
    texts, flags = read_inputs(request)
    if "text_input" not in texts:
        raise invalid("text_input", "is required")
    stream = flags.get("stream", False)
    if stream and not may_stream:
        raise invalid("stream", "needs ModelStreamInfer")
    without = flags.get("exclude_input_in_output", stream)  # as Triton has it
    if stream and not without:
        raise invalid("exclude_input_in_output", "must be true when streaming")
    parameters, timeout, final_flag = _own_parameters(request)
    if (sampling := texts.get("sampling_parameters")) is not None:
        if parameters:
            raise invalid(f"parameters.{next(iter(parameters))}", "goes into sampling_parameters, which is given too")
        parameters = _parse(sampling)
    for name in parameters:
        if name in _GIVEN_OTHERWISE:
            raise invalid(f"parameters.{name}", "is not a parameter here")
    try:
        body = CompletionRequest.model_validate({**parameters, "prompt": texts["text_input"], "model": model})
    except ValidationError as error:
        raise from_validation(error) from None
    job = completion_job(body)
    [asked] = job.inputs
    asked.request_id = request.id
    return Asked(
        input=asked,
        names={**job.names, **_NAMES},
        default_budget=job.default_budget,
        stream=stream,
        prefix="" if without else texts["text_input"],
        outputs=_outputs(request, flags),
        final_flag=final_flag,
        timeout=timeout,
    )


def check_version(field: str, version: str) -> None:
    """Each model has one version."""
    if version not in ("", VERSION):
        raise invalid(field, f"there is version {VERSION} alone, not {version[:40]!r}")


def _own_parameters(request: ModelInferRequest) -> tuple[dict[str, Any], float | None, bool]:
    """Those for sampling, the time limit in seconds, and whether the last piece is to be marked."""
    if len(request.parameters) > _MAX_PARAMETERS:
        raise invalid("parameters", f"at most {_MAX_PARAMETERS}, not {len(request.parameters)}")
    values = {name: _value(name, parameter) for name, parameter in request.parameters.items()}
    if "priority" in values:  # in this protocol smaller is more urgent
        raise invalid("parameters.priority", "goes into sampling_parameters, where larger is more urgent")
    final_flag = values.pop(_OWN, False)
    timeout = values.pop("timeout", None)
    if timeout is None:
        return values, None, bool(final_flag)
    if isinstance(timeout, bool) or not isinstance(timeout, int) or timeout < 1:
        raise invalid("parameters.timeout", "must be whole microseconds, at least 1")
    return values, timeout / 1e6, bool(final_flag)


def _value(name: str, parameter: InferParameter) -> Any:
    """The wire may have no type for what is meant: clients write fractions and lists as JSON in a text."""
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise invalid(f"parameters.{name[:40]}", "has no value")
    value = getattr(parameter, kind)
    if kind != "string_param" or (name in _TEXTS and not value.startswith("[")):
        return value
    if len(value) > _MAX_CHARACTERS:
        raise invalid(f"parameters.{name[:40]}", f"exceeds {_MAX_CHARACTERS} characters")
    try:
        return from_json(value)
    except ValueError:
        return value


def _parse(sampling: str) -> dict[str, Any]:
    """Unlike Triton's, values here have their JSON types, but numbers in texts are taken too."""
    if len(sampling) > _MAX_CHARACTERS:
        raise invalid("sampling_parameters", f"exceeds {_MAX_CHARACTERS} characters")
    try:
        found = from_json(sampling)
    except ValueError as error:
        raise invalid("sampling_parameters", f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise invalid("sampling_parameters", "must be a JSON object")
    return {
        name: _value(name, InferParameter(string_param=value)) if isinstance(value, str) else value
        for name, value in found.items()
    }


def _outputs(request: ModelInferRequest, flags: Mapping[str, bool]) -> frozenset[str]:
    """Those that are named or switched on; the text where none is named."""
    for index, wanted in enumerate(request.outputs):
        if wanted.name not in OUTPUTS:
            what = f"no output is named {wanted.name[:40]!r}; there are {', '.join(OUTPUTS)}"
            raise invalid(f"outputs[{index}].name", what)
    named = {wanted.name for wanted in request.outputs} or {"text_output"}
    return frozenset(named | {name for name in OUTPUTS if flags.get(f"return_{name}")})
