"""What a request may ask for, and what one message between services holds.

The gateway checks what clients write; scheduler and executor check their own wires.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from quire.v1 import types_pb2
from services.common.errors import invalid

MAX_CHOICES = 64
MAX_LOGPROBS = 20
MAX_OPTIONS = 1024
"""Likeliest tokens that an executor lists for one position: beam search looks at more than clients do."""
MAX_PRIORITY = 100
MAX_TARGET_MS = 10**9
MAX_KEEP_MS = 3_600_000

MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:-]{0,127}")

MESSAGE_TOKENS = 1 << 20
"""Token ids of prompts and outputs in one message between services, about 3 MB; the rest goes in the next."""


@dataclass(frozen=True, slots=True)
class _Range:
    """The closed range of a number."""

    name: str
    low: float
    high: float

    def check(self, path: str, value: float) -> None:
        if not self.low <= value <= self.high:  # nor is NaN in any range
            raise invalid(path, f"must be in [{self.low:g}, {self.high:g}], not {value:g}")


_SAMPLING = (
    _Range("temperature", 0, 100),
    _Range("top_p", 0, 1),
    _Range("min_p", 0, 1),
    _Range("repetition_penalty", 1e-9, 100),  # logits divided by less may be no fp32 any more
    _Range("presence_penalty", -2, 2),
    _Range("frequency_penalty", -2, 2),
)
_BIAS = _Range("logit_bias", -100, 100)


def check_sampling(sampling: types_pb2.SamplingParams, vocab_size: int) -> None:
    """Refuses values outside their ranges, and biases of tokens that the model does not have."""
    for allowed in _SAMPLING:
        if sampling.HasField(allowed.name):  # type: ignore[arg-type]
            allowed.check(f"sampling.{allowed.name}", getattr(sampling, allowed.name))
    if sampling.top_k < -1:
        raise invalid("sampling.top_k", f"must be -1 or more, not {sampling.top_k}")
    check_ids("sampling.logit_bias", sampling.logit_bias, vocab_size)
    for token, bias in sampling.logit_bias.items():
        _BIAS.check(f"sampling.logit_bias[{token}]", bias)


def check_logprobs(logprobs: types_pb2.LogprobOptions, most_output: int = MAX_LOGPROBS) -> None:
    """Refuses too many alternatives."""
    if logprobs.HasField("output_count"):
        check_integer("logprobs.output_count", logprobs.output_count, 0, most_output)
    if logprobs.HasField("prompt_count"):
        check_integer("logprobs.prompt_count", logprobs.prompt_count, 0, MAX_LOGPROBS)


def check_ids(path: str, ids: Collection[int], vocab_size: int) -> None:
    """Refuses ids outside the model's vocabulary, which is the output layer's and not the tokenizer's."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):  # millions of ids in no time
        return
    for token in ids:
        if not 0 <= token < vocab_size:
            raise invalid(path, f"token id {token} is outside the vocabulary of {vocab_size}")


def check_pooling(pooling: int) -> None:
    """Refuses what is no way to make a vector; none at all is one."""
    if pooling not in types_pb2.Pooling.values():
        raise invalid("pooling", f"{pooling} is none that there is")


def check_integer(path: str, value: int, low: int, high: int) -> None:
    """Refuses what is outside [low, high]."""
    if not low <= value <= high:
        raise invalid(path, f"must be in [{low}, {high}], not {value}")
