"""How small a model shall be."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.common.errors import invalid
from services.executor.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Target:
    """What is left; None leaves all of it. Raises INVALID_FIELD where that asks for nothing."""

    layers: int | None = None
    mlp_width: int | None = None
    heads: int | None = None  # that query

    def __post_init__(self) -> None:
        if self.layers is None and self.mlp_width is None and self.heads is None:
            raise invalid("--layers", "name what shall be left: --layers, --mlp-width or --heads")

    def smaller(self, spec: ModelSpec) -> ModelSpec:
        """The spec of what is left. Raises INVALID_FIELD for what the model does not have."""
        share = spec.head_count // spec.kv_head_count
        layers = _checked("--layers", self.layers, spec.layer_count)
        width = _checked("--mlp-width", self.mlp_width, spec.intermediate_size)
        heads = _checked("--heads", self.heads, spec.head_count)
        if heads % share:
            raise invalid("--heads", f"{share} heads share their keys and values, so {heads} cannot be left")
        return replace(
            spec, layer_count=layers, intermediate_size=width, head_count=heads, kv_head_count=heads // share
        )


def _checked(field: str, asked: int | None, most: int) -> int:
    if asked is None:
        return most
    if not 1 <= asked <= most:
        raise invalid(field, f"{asked} is not in 1..{most}, the model's own")
    return asked
