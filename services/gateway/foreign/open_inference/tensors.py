"""Tensors of one element as inputs, tensors of texts and numbers as outputs. Pure."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Final

from quire.v1.foreign.open_inference_pb2 import ModelInferRequest, ModelInferResponse
from services.common.errors import invalid

INPUTS: Final[Mapping[str, str]] = {
    "text_input": "BYTES",
    "stream": "BOOL",
    "sampling_parameters": "BYTES",
    "exclude_input_in_output": "BOOL",
    "return_finish_reason": "BOOL",
    "return_num_input_tokens": "BOOL",
    "return_num_output_tokens": "BOOL",
}
"""What each holds, by name."""

OUTPUTS: Final[Mapping[str, str]] = {
    "text_output": "BYTES",
    "finish_reason": "BYTES",
    "num_input_tokens": "UINT32",
    "num_output_tokens": "UINT32",
}

_LENGTH: Final = struct.Struct("<I")


def read_inputs(request: ModelInferRequest) -> tuple[dict[str, str], dict[str, bool]]:
    """Texts and flags by name. INVALID_FIELD naming the input that is unknown, twice there, or not one element."""
    raw = request.raw_input_contents
    if raw and len(raw) != len(request.inputs):
        raise invalid("raw_input_contents", f"{len(raw)} contents are given for {len(request.inputs)} inputs")
    texts: dict[str, str] = {}
    flags: dict[str, bool] = {}
    for index, tensor in enumerate(request.inputs):
        name = tensor.name
        if name not in INPUTS:
            raise invalid(f"inputs[{index}].name", f"no input is named {name[:40]!r}; there are {', '.join(INPUTS)}")
        if name in texts or name in flags:
            raise invalid(name, "is given twice")
        if tensor.datatype != INPUTS[name]:
            raise invalid(name, f"must be of type {INPUTS[name]}, not {tensor.datatype[:40]!r}")
        if any(size != 1 for size in tensor.shape) or len(tensor.shape) > 2:
            raise invalid(name, f"must hold one element, not be of shape {list(tensor.shape[:8])}")
        if INPUTS[name] == "BYTES":
            texts[name] = _text(name, tensor, raw[index] if raw else None)
        else:
            flags[name] = _flag(name, tensor, raw[index] if raw else None)
    return texts, flags


def _text(name: str, tensor: ModelInferRequest.InferInputTensor, raw: bytes | None) -> str:
    if raw is None:
        if len(tensor.contents.bytes_contents) != 1:
            raise invalid(name, "must hold one element in bytes_contents")
        data = tensor.contents.bytes_contents[0]
    else:
        if len(raw) < _LENGTH.size or _LENGTH.unpack_from(raw)[0] != len(raw) - _LENGTH.size:
            raise invalid(name, "must hold one element behind its length of four bytes")
        data = raw[_LENGTH.size :]
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, f"is not UTF-8 at byte {error.start}") from None


def _flag(name: str, tensor: ModelInferRequest.InferInputTensor, raw: bytes | None) -> bool:
    values = tensor.contents.bool_contents if raw is None else raw
    if len(values) != 1 or values[0] not in (0, 1):
        raise invalid(name, "must hold one element, true or false")
    return bool(values[0])


def add_texts(response: ModelInferResponse, name: str, texts: Sequence[str]) -> None:
    """One more output: BYTES [len(texts)]."""
    encoded = [text.encode() for text in texts]
    _add(response, name, len(texts), b"".join(_LENGTH.pack(len(data)) + data for data in encoded))


def add_counts(response: ModelInferResponse, name: str, counts: Sequence[int]) -> None:
    """One more output: UINT32 [len(counts)]."""
    _add(response, name, len(counts), struct.pack(f"<{len(counts)}I", *counts))


def _add(response: ModelInferResponse, name: str, size: int, data: bytes) -> None:
    response.outputs.add(name=name, datatype=OUTPUTS[name], shape=[size])
    response.raw_output_contents.append(data)
