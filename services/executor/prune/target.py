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
        layers = _checked("--layers", self.layers, spec.layer_count)
        width = _checked("--mlp-width", self.mlp_width, spec.intermediate_size)
        heads = _checked("--heads", self.heads, spec.head_count)
        fitting = _head_counts(spec)
        if heads not in fitting:
            raise invalid("--heads", f"{heads} cannot be left of this model, but {', '.join(map(str, fitting))} can")
        keys = heads * spec.kv_head_count // spec.head_count
        return replace(spec, layer_count=layers, intermediate_size=width, head_count=heads, kv_head_count=keys)


def _head_counts(spec: ModelSpec) -> list[int]:
    """How many heads may be left: all of those that share keys and values, and what transformers allows.

    Its Llama wants the hidden size to be a multiple of the heads, also where their size is given.
    """
    whole = spec.head_count
    counts = range(whole // spec.kv_head_count, whole, whole // spec.kv_head_count)
    return [count for count in counts if spec.architecture != "llama" or spec.hidden_size % count == 0] + [whole]


def _checked(field: str, asked: int | None, most: int) -> int:
    if asked is None:
        return most
    if not 1 <= asked <= most:
        raise invalid(field, f"{asked} is not in 1..{most}, the model's own")
    return asked
