"""Fills a buffer with a checkpoint's packed weights, a few panels at a time on several threads."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from services.executor.backends.cpu.formats import PANEL_ROWS
from services.executor.backends.cpu.gather import Gather
from services.executor.backends.cpu.layout import Int32, Strip
from services.executor.backends.cpu.packing_plan import PackingPlan, PlacedMatrix, PlacedVector
from services.executor.backends.cpu.panels import EncodedRows, UnfitWeights, write_rows
from services.executor.backends.cpu.quantize import encode, encode_bf16
from services.executor.backends.cpu.repack import REPACKERS
from services.executor.backends.cpu.repack_nibbles import NibbleEncoder
from services.executor.backends.cpu.repack_quantized import QuantizedEncoder, take_rows
from services.executor.models.dequantize import to_float32
from services.executor.models.weights import Bytes, Checkpoint, StoredTensor, Tensor, load_failed

log = logging.getLogger("quire.executor")

_MOST_THREADS = 8  # each holds a few MiB
_TASK_VALUES = 1 << 25
_BAND_VALUES = 1 << 18  # what a thread works on stays in its cache
_NIBBLE_BAND_VALUES = 1 << 22  # native code sees to that by itself

Writer = Callable[[Bytes, slice, Int32], int]
"""Packs rows by number into lanes of panels; how many of their scales were rounded. Raises UnfitWeights."""


@dataclass(frozen=True, slots=True)
class _Task:
    """Some panels of one strip of a matrix."""

    matrix: PlacedMatrix
    strip: Strip
    first: int
    last: int


def pack(checkpoint: Checkpoint, plan: PackingPlan, out: Bytes, threads: int) -> None:
    """Writes all matrices and vectors of the plan into `out`, plan.size bytes.

    Raises MODEL_LOAD_FAILED naming the first tensor that holds NaN, infinity, or what its format cannot hold.
    """
    for order in plan.orders:
        out[order.offset : order.offset + order.inputs.nbytes] = order.inputs.view(np.uint8)
    for vector in plan.vectors:
        _pack_vector(checkpoint, vector, out)

    def run(task: _Task) -> int:
        return _pack_panels(checkpoint, task, out)

    with ThreadPoolExecutor(max(1, min(threads, _MOST_THREADS)), "pack") as pool:
        rounded = sum(pool.map(run, _tasks(plan)))
    if rounded:
        log.warning("scales of weights were rounded to fp16", extra={"count": rounded})


def _tasks(plan: PackingPlan) -> Iterator[_Task]:
    for matrix in plan.matrices:
        step = max(1, _TASK_VALUES // (matrix.layout.columns.k * PANEL_ROWS))
        for strip in matrix.layout.strips:
            for first in range(0, strip.panels, step):
                yield _Task(matrix, strip, first, min(first + step, strip.panels))


def _pack_panels(checkpoint: Checkpoint, task: _Task, out: Bytes) -> int:
    """How many scales were rounded."""
    matrix, strip = task.matrix, task.strip
    size, rounded = matrix.panel_bytes, 0
    source = matrix.layout.columns.source if matrix.order is None else matrix.order
    write, band = _writer(checkpoint.tensor(strip.tensor), matrix.format, source)
    step = max(1, band // (len(source) * strip.width))
    for first in range(task.first, task.last, step):
        last = min(first + step, task.last)
        rows = strip.rows[first * strip.width : last * strip.width]
        panels = out[matrix.offset + first * size : matrix.offset + last * size].reshape(last - first, size)
        try:
            rounded += write(panels, strip.lanes, rows)
        except UnfitWeights as error:
            raise load_failed(f"tensor {strip.tensor} {error}") from error
    return rounded


def _take(tensor: StoredTensor, rows: Int32) -> StoredTensor:
    """These rows of a matrix; -1 is a row of zero bytes, which is zeros in every format."""
    if rows[0] >= 0 and (np.diff(rows) == 1).all():
        data = tensor.data[rows[0] : rows[0] + len(rows)]
    else:
        data = tensor.data[rows]
        data[rows < 0] = 0
    return StoredTensor(tensor.name, (len(rows), tensor.shape[-1]), tensor.format, np.ascontiguousarray(data))


def _writer(tensor: Tensor, format_: str, source: Int32) -> tuple[Writer, int]:
    """What packs rows of the tensor, and how many values it does best at a time."""
    if isinstance(tensor, StoredTensor):
        columns = Gather.of(source, tensor.shape[-1])
        return _interleaving(format_, lambda rows: _encode_stored(_take(tensor, rows), format_, columns)), _BAND_VALUES
    nibbles = NibbleEncoder.of(format_, tensor, source)
    if nibbles is not None:
        return nibbles.write, _NIBBLE_BAND_VALUES
    encoder = QuantizedEncoder.of(format_, tensor, source)
    return _interleaving(format_, lambda rows: encoder.encode(take_rows(tensor, rows))), _BAND_VALUES


def _interleaving(format_: str, encode_rows: Callable[[Int32], EncodedRows]) -> Writer:
    def write(panels: Bytes, lanes: slice, rows: Int32) -> int:
        encoded = encode_rows(rows)
        write_rows(format_, panels, lanes, encoded)
        return encoded.rounded

    return write


def _encode_stored(rows: StoredTensor, format_: str, columns: Gather) -> EncodedRows:
    repacker = REPACKERS.get((rows.format, format_))
    if repacker is not None:
        return repacker(rows.data)
    if (rows.format, format_) == ("BF16", "bf16"):
        return encode_bf16(columns.take(rows.data.view(np.uint16)))
    with np.errstate(all="ignore"):  # what is not finite is found by encode
        values = to_float32(rows)
    return encode(format_, columns.take(values))


def _pack_vector(checkpoint: Checkpoint, vector: PlacedVector, out: Bytes) -> None:
    start = vector.offset
    for part in vector.layout.parts:
        panels = out[start : start + part[0].panels * PANEL_ROWS * 4].view(np.float32).reshape(-1, PANEL_ROWS)
        for strip in part:
            values = to_float32(checkpoint.tensor(strip.tensor)).reshape(-1)
            if not np.isfinite(values).all():
                raise load_failed(f"tensor {strip.tensor} holds NaN or infinity")
            panels[:, strip.lanes] = np.where(strip.rows < 0, 0, values[strip.rows]).reshape(-1, strip.width)
        start += panels.nbytes
