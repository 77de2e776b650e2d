"""What `quire chat` and `quire generate` sample with where nobody says."""

from __future__ import annotations

from quire.cli.sampling import TEMPERATURE, defaults
from quire.v1 import types_pb2

STATED = types_pb2.ModelDescription(
    name="stated", default_sampling=types_pb2.SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
)
SILENT = types_pb2.ModelDescription(name="silent")


def test_a_model_s_own_sampling_counts() -> None:
    own = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert defaults([STATED, SILENT], "stated") == own
    assert defaults([STATED], "") == own


def test_without_one_it_is_cooler_than_the_api() -> None:
    for models, name in (([STATED, SILENT], "silent"), ([SILENT], ""), ([STATED, SILENT], ""), ([STATED], "absent")):
        assert defaults(models, name) == {"temperature": TEMPERATURE}


def test_a_model_may_state_other_things_alone() -> None:
    model = types_pb2.ModelDescription(name="m", default_sampling=types_pb2.SamplingParams(min_p=0.1))
    assert defaults([model], "m") == {"temperature": TEMPERATURE, "min_p": 0.1}
