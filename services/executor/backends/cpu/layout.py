"""Which rows and columns of a checkpoint's tensors lie where in packed matrices and vectors.

A packed matrix consists of panels of 32 rows; `Strip`s say which tensor's rows fill which lanes of its panels, so that
what a kernel combines (gate and up, the two halves of a rotary pair) lies side by side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from services.executor.backends.cpu.formats import PANEL_ROWS
from services.executor.models.spec import ModelSpec

Int32 = NDArray[np.int32]

_ALL, _LOW, _HIGH = slice(0, 32), slice(0, 16), slice(16, 32)


def pad(count: int, step: int = PANEL_ROWS) -> int:
    """`count` rounded up to a multiple of `step`."""
    return -(-count // step) * step


@dataclass(frozen=True, slots=True)
class PaddedSizes:
    """A spec's sizes as the kernels see them."""

    hidden: int
    head: int
    intermediate: int

    @classmethod
    def of(cls, spec: ModelSpec) -> PaddedSizes:
        return cls(pad(spec.hidden_size), 2 * pad(spec.head_size // 2, 16), pad(spec.intermediate_size))


@dataclass(frozen=True, slots=True)
class Strip:
    """Rows of one tensor, in the same lanes of one panel after another."""

    tensor: str
    rows: Int32  # the tensor's rows, lanes' count for each panel; -1 is a row of zeros
    lanes: slice

    @property
    def width(self) -> int:
        return int(self.lanes.stop - self.lanes.start)

    @property
    def panels(self) -> int:
        return len(self.rows) // self.width


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of a tensor: `runs` runs of `size`, each padded with zeros to `padded`."""

    runs: int
    size: int
    padded: int

    @property
    def k(self) -> int:
        return self.runs * self.padded

    @property
    def run(self) -> int:
        """Columns that no padding interrupts."""
        return self.k if self.padded == self.size else self.size

    @property
    def source(self) -> Int32:
        """The tensor's column in each place [k], -1 for padding."""
        return _spread(self.runs, self.size, self.padded, self.size, 0)


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """One packed matrix. Its strips fill all lanes, and are equally long."""

    name: str
    strips: tuple[Strip, ...]
    columns: Columns

    @property
    def rows(self) -> int:
        return self.strips[0].panels * PANEL_ROWS

    @property
    def inputs(self) -> str:
        """What it multiplies, a name that q, k and v of a layer share."""
        prefix, dot, part = self.name.rpartition(".")
        return prefix + dot + ("qkv" if part in ("q", "k", "v") else part)


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """One packed vector: parts one after the other, each with the strips of a matrix."""

    name: str
    parts: tuple[tuple[Strip, ...], ...]

    @property
    def length(self) -> int:
        return sum(part[0].panels for part in self.parts) * PANEL_ROWS


def matrix_layouts(spec: ModelSpec) -> Iterator[MatrixLayout]:
    """Every matrix, in the order of use. The head of a tied model is its embedding."""
    sizes = PaddedSizes.of(spec)
    hidden = Columns(1, spec.hidden_size, sizes.hidden)
    attended = Columns(spec.head_count, spec.head_size, sizes.head)
    inner = Columns(1, spec.intermediate_size, sizes.intermediate)
    yield MatrixLayout("embedding", _plain("embedding", spec.vocab_size), hidden)
    for layer in range(spec.layer_count):
        at = f"layers.{layer}."
        yield MatrixLayout(at + "q", _rotary(at + "q", spec.head_count, spec.head_size), hidden)
        yield MatrixLayout(at + "k", _rotary(at + "k", spec.kv_head_count, spec.head_size), hidden)
        yield MatrixLayout(at + "v", _heads(at + "v", spec.kv_head_count, spec.head_size, sizes.head), hidden)
        yield MatrixLayout(at + "o", _plain(at + "o", spec.hidden_size), attended)
        yield MatrixLayout(at + "gate_up", _paired(at + "gate", at + "up", spec.intermediate_size), hidden)
        yield MatrixLayout(at + "down", _plain(at + "down", spec.hidden_size), inner)
    if not spec.tied_embeddings:
        yield MatrixLayout("head", _plain("head", spec.vocab_size), hidden)


def vector_layouts(spec: ModelSpec) -> Iterator[VectorLayout]:
    """Every norm and bias that the model has."""
    head = PaddedSizes.of(spec).head
    for layer in range(spec.layer_count):
        at = f"layers.{layer}."
        yield VectorLayout(at + "attention_norm", (_plain(at + "attention_norm", spec.hidden_size),))
        if spec.attention_bias:
            queries = _rotary(at + "q_bias", spec.head_count, spec.head_size)
            keys = _rotary(at + "k_bias", spec.kv_head_count, spec.head_size)
            values = _heads(at + "v_bias", spec.kv_head_count, spec.head_size, head)
            yield VectorLayout(at + "qkv_bias", (queries, keys, values))
        if spec.output_bias:
            yield VectorLayout(at + "o_bias", (_plain(at + "o_bias", spec.hidden_size),))
        yield VectorLayout(at + "mlp_norm", (_plain(at + "mlp_norm", spec.hidden_size),))
        if spec.mlp_bias:
            both = _paired(at + "gate_bias", at + "up_bias", spec.intermediate_size)
            yield VectorLayout(at + "gate_up_bias", (both,))
            yield VectorLayout(at + "down_bias", (_plain(at + "down_bias", spec.hidden_size),))
    yield VectorLayout("final_norm", (_plain("final_norm", spec.hidden_size),))


def tensors_of(strips: Sequence[Strip]) -> list[str]:
    """The tensors whose rows the strips hold, each once."""
    return list(dict.fromkeys(strip.tensor for strip in strips))


def _plain(tensor: str, count: int) -> tuple[Strip, ...]:
    return (Strip(tensor, _spread(1, count, pad(count), count, 0), _ALL),)


def _heads(tensor: str, heads: int, size: int, padded: int) -> tuple[Strip, ...]:
    return (Strip(tensor, _spread(heads, size, padded, size, 0), _ALL),)


def _rotary(tensor: str, heads: int, size: int) -> tuple[Strip, ...]:
    """The first half of each head beside the second: a rotary pair is (i, i + size / 2)."""
    half = size // 2
    return (
        Strip(tensor, _spread(heads, half, pad(half, 16), size, 0), _LOW),
        Strip(tensor, _spread(heads, half, pad(half, 16), size, half), _HIGH),
    )


def _paired(first: str, second: str, count: int) -> tuple[Strip, ...]:
    rows = _spread(1, count, pad(count), count, 0)
    return Strip(first, rows, _LOW), Strip(second, rows, _HIGH)


def _spread(runs: int, size: int, padded: int, stride: int, first: int) -> Int32:
    """Row indices [runs * padded]: of each run `size`, `stride` apart from the next run's, then -1."""
    rows = np.full((runs, padded), -1, np.int32)
    rows[:, :size] = first + np.arange(runs, dtype=np.int32)[:, None] * stride + np.arange(size, dtype=np.int32)
    return rows.reshape(-1)
