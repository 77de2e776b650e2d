"""A model as the native program that computes it: a flat list of operations over packed weights."""

from __future__ import annotations

import math

import numpy as np

from kernels import _native
from services.executor.backends.cpu.layout import PaddedSizes
from services.executor.backends.cpu.packed_weights import PackedWeights
from services.executor.models.rope import inverse_frequencies
from services.executor.models.spec import ModelSpec


def build_program(spec: ModelSpec, weights: PackedWeights) -> _native.Program:
    """The program. What the kernels do not take is refused with ValueError, here or where a model is made of it."""
    sizes = PaddedSizes.of(spec)
    frequencies = np.zeros(sizes.head // 2)
    frequencies[: spec.head_size // 2] = inverse_frequencies(spec.head_size, spec.rope_theta, spec.rope_scaling)
    program = _native.Program(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        head_count=spec.head_count,
        kv_head_count=spec.kv_head_count,
        head_size=sizes.head,
        intermediate_size=sizes.intermediate,
        context_length=spec.context_length,
        norm_epsilon=spec.norm_epsilon,
        attention_scale=1 / math.sqrt(spec.head_size),
        rotary_frequencies=frequencies,
    )
    matrix, vector = weights.matrix, weights.vector
    program.embed(matrix("embedding"))
    for layer in range(spec.layer_count):
        at = f"layers.{layer}."
        norm, bias, order = vector(at + "attention_norm"), vector(at + "qkv_bias"), vector(at + "qkv_order")
        program.qkv(norm, matrix(at + "q"), matrix(at + "k"), matrix(at + "v"), bias, order)
        program.attention()
        program.attention_output(matrix(at + "o"), vector(at + "o_bias"), vector(at + "o_order"))
        norm, bias, order = vector(at + "mlp_norm"), vector(at + "gate_up_bias"), vector(at + "gate_up_order")
        program.gate_up(norm, matrix(at + "gate_up"), bias, order)
        program.down(matrix(at + "down"), vector(at + "down_bias"), vector(at + "down_order"))
    program.head(vector("final_norm"), matrix("head"), vector("head_order"))
    return program
