"""How a model's publisher would have it sampled: what generation_config.json says, as vLLM reads it."""

from __future__ import annotations

import logging
from pathlib import Path

from quire.v1 import types_pb2
from services.common.errors import QuireError
from services.common.limits import check_sampling
from services.executor.models.fields import Fields, read_object

log = logging.getLogger("quire.executor")

FILE = "generation_config.json"
MOST_TOP_K = (1 << 31) - 1


def read_sampling(path: Path) -> types_pb2.SamplingParams | None:
    """Of a model's folder; None where it says nothing, as a .gguf file does. What cannot be followed is a warning."""
    file = path / FILE
    if not file.is_file():
        return None
    found = types_pb2.SamplingParams()
    try:
        fields = Fields(FILE, read_object(file))
        if "temperature" in fields:
            found.temperature = fields.real("temperature")
        if "top_p" in fields:
            found.top_p = fields.real("top_p")
        if "top_k" in fields:
            found.top_k = min(fields.whole("top_k"), MOST_TOP_K)
        if "min_p" in fields:
            found.min_p = fields.real("min_p")
        if "repetition_penalty" in fields:
            found.repetition_penalty = fields.real("repetition_penalty")
        check_sampling(found, 0)
    except QuireError as error:
        log.warning("the model's own sampling is not offered", extra={"why": str(error)})
        return None
    return found if found.ByteSize() else None
