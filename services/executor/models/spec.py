"""A model is data: its shape and constants, read from a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Llama 3's frequency scaling, or a linear one."""

    kind: Literal["linear", "llama3"]
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_context_length: int = 8192


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything about a decoder-only model except its weights."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_size: int
    context_length: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False  # biases of q, k and v
    output_bias: bool = False  # bias of the attention output
    mlp_bias: bool = False
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())
    bos_token_id: int | None = None

    @property
    def kv_size(self) -> int:
        """Width of keys (and of values) of one token in one layer."""
        return self.kv_head_count * self.head_size
