"""What config.json says of models that came without one."""

from __future__ import annotations

import numpy as np
import pytest

from services.common.errors import QuireError
from services.executor.models.hf import spec_from_config
from services.executor.models.rope import inverse_frequencies
from services.executor.models.spec import ModelSpec, RopeScaling
from services.executor.quantize.hf_files import config_of


def make_spec(scaling: RopeScaling | None, architecture: str = "llama") -> ModelSpec:
    return ModelSpec(architecture, 300, 64, 96, 2, 4, 2, 16, 512, 1e-5, 5e5, scaling, eos_token_ids=(2, 5))


def factors(scaling: RopeScaling) -> RopeScaling:
    """The same as GGUF files say it."""
    plain, scaled = (inverse_frequencies(16, 5e5, kind) for kind in (None, scaling))
    return RopeScaling("factors", factors=tuple((plain / scaled).tolist()))


@pytest.mark.parametrize("scaling", [None, RopeScaling("linear", 4.0)])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_says_the_same_as_the_spec(scaling: RopeScaling | None, architecture: str) -> None:
    spec = make_spec(scaling, architecture)
    assert spec_from_config(config_of(spec), {}) == spec


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_names_the_scaling_of_llama_3(factor: float) -> None:
    known = RopeScaling("llama3", factor)
    found = spec_from_config(config_of(make_spec(factors(known))), {}).rope_scaling
    assert found == known
    np.testing.assert_allclose(
        inverse_frequencies(16, 5e5, found), inverse_frequencies(16, 5e5, factors(known)), rtol=1e-6
    )


def test_refuses_a_scaling_without_a_name() -> None:
    with pytest.raises(QuireError, match="rope factors"):
        config_of(make_spec(RopeScaling("factors", factors=(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0))))
