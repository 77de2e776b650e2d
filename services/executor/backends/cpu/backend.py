"""The cpu backend: one native call per step, without the GIL.

A token's logits depend on its own sequence alone, bit for bit: neither on neighbours nor on chunks, threads, cached
prefixes or preemption.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kernels import _native
from services.executor.backends.base import (
    Int32,
    KvShape,
    Sampled,
    SampleRow,
    StepInputs,
    StepOutputs,
    TokenMasks,
    TokenScores,
)
from services.executor.backends.cpu.formats import FORMATS
from services.executor.backends.cpu.load_packed import load_packed
from services.executor.backends.cpu.packed_file import VERSION as PACKING_VERSION
from services.executor.backends.cpu.packed_weights import PackedWeights
from services.executor.backends.cpu.pools import Pools
from services.executor.backends.cpu.program import build_program
from services.executor.backends.cpu.samplers import sampler_of
from services.executor.backends.cpu.support import BLOCK_SIZE
from services.executor.models.checkpoint import with_context_length
from services.executor.models.spec import ModelSpec
from services.executor.models.weights import Checkpoint, load_failed

_Scores = tuple[list[float], list[int], list[list[int]], list[list[float]]]
"""Of TokenScores' fields, as the native code gives them."""

_DTYPES = {"f32": "fp32", "bf16": "bf16", "q8": "q8_0", "q4g32": "q4_0", "q4mg32": "q4_1",
           "q4k": "q4_k", "q6k": "q6_k", "q8c": "int8", "f8": "fp8",
           **{f"q4{kind}{size}": f"int4 g{size}" for kind in ("g", "zg") for size in (64, 128)},
           "q4zg32": "int4 g32"}  # fmt: skip
"""Names of packed formats that people know otherwise."""


class CpuBackend:
    """A model in native code. Not thread-safe."""

    name = "cpu"
    computes_from_host_memory = True

    def __init__(
        self, spec: ModelSpec, weights: PackedWeights, *, kv_format: str, instruction_set: str, pool: _native.ThreadPool
    ) -> None:
        """`kv_format` is fp32 or bf16; `pool` may serve others as well, in turn.

        Raises MODEL_LOAD_FAILED where the kernels do not take the model.
        """
        self.spec, self.weights, self.kv_format = spec, weights, kv_format
        self.dtype = dtype_of(weights)
        self.device = f"cpu {instruction_set}, {pool.size} thread{'s' if pool.size > 1 else ''}"
        packed = f"{weights.formats} (packing {PACKING_VERSION})"
        self.numerics = f"cpu {_native.VERSION} {instruction_set} {packed} kv {kv_format}"
        self._pools = Pools((0, 0), [_native_name(kv_format)])
        self.pool = pool
        try:
            self._model = _native.Model(build_program(spec, weights), weights.buffer, pool, instruction_set)
        except ValueError as error:
            raise load_failed(f"the cpu backend does not take this model: {error}") from error

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        *,
        dtype: str = "auto",
        kv_format: str = "auto",
        instruction_set: str = "auto",
        context_length: int | None = None,
        threads: int = 1,
        own_memory_limit: int = 0,
        pool: _native.ThreadPool | None = None,
    ) -> CpuBackend:
        """Packs the weights, or maps them where that was done before.

        `dtype` is fp32, bf16 or auto (what the file holds, or the nearest to it), `kv_format` fp32, bf16 or auto (fp32
        beside fp32 weights, else bf16), `instruction_set` one that this CPU has or auto (the best). Mapped weights of
        at most `own_memory_limit` bytes are copied into memory of the process's own. `pool`: threads to share, instead
        of `threads` of its own. Raises MODEL_LOAD_FAILED, or INVALID_FIELD for a context length beyond the model's.
        """
        spec = with_context_length(checkpoint.spec, context_length)
        weights = load_packed(checkpoint, _native_name(dtype), threads)
        if 0 < weights.mapped_bytes <= own_memory_limit:
            weights = weights.in_own_memory()
        if kv_format == "auto":
            kv_format = "fp32" if dtype_of(weights) == "fp32" else "bf16"
        if instruction_set == "auto":
            instruction_set = _native.instruction_sets()[-1]
        pool = pool or _native.ThreadPool(threads)
        return cls(spec, weights, kv_format=kv_format, instruction_set=instruction_set, pool=pool)

    def device_memory(self) -> int | None:
        return None

    def kv_block_bytes(self, block_size: int, kv_format: str | None = None) -> int:
        if block_size != BLOCK_SIZE:
            raise ValueError(f"a block has {BLOCK_SIZE} slots, not {block_size}")
        return self._model.kv_block_bytes(_native_name(kv_format or self.kv_format))

    def allocate_kv(self, shape: KvShape) -> None:
        formats = [self.kv_format, *(pool.format for pool in shape.colder)]
        counts = [shape.block_count, *(pool.block_count for pool in shape.colder)]
        for kv_format, count in zip(formats, counts, strict=True):
            self._model.allocate_kv(count, _native_name(kv_format))
        self._starts = shape.pool_starts
        self._blocks = [self._model.kv_blocks(_native_name(kv_format)) for kv_format in formats]
        self._pools = Pools(shape.pool_starts, [_native_name(kv_format) for kv_format in formats])

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._model.copy_blocks(np.array(pairs, np.int32).reshape(-1, 2))

    def read_block(self, block_id: int) -> memoryview:
        return self._block(block_id).data

    def write_block(self, block_id: int, block: memoryview) -> None:
        target = self._block(block_id)
        if block.nbytes != target.nbytes:
            raise ValueError(f"a block has {target.nbytes} bytes, not {block.nbytes}")
        target[:] = np.frombuffer(block, np.uint8)

    def host_memory(self, byte_count: int) -> NDArray[np.uint8]:
        return np.zeros(byte_count, np.uint8)

    def _block(self, block_id: int) -> NDArray[np.uint8]:
        """A view of the block's bytes."""
        pool = bisect_right(self._starts, block_id) - 1
        found: NDArray[np.uint8] = self._blocks[pool][block_id - self._starts[pool]]
        return found

    def demote_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target, inside in self._pools.runs(pairs):
            self._model.narrow_blocks(inside, source, target)

    def step(self, inputs: StepInputs) -> StepOutputs:
        samples, masks = inputs.samples, inputs.masks
        arrays, formats = self._arrays(inputs)
        drafts, draft_counts, first_places = _drafts(samples)
        token_ids, row_scores, prompt_scores = self._model.step(
            *arrays,
            np.array([sample.row for sample in samples], np.int32),
            self._samplers(inputs),
            np.array([len(sample.output_ids) for sample in samples], np.int32),
            [(part.first_row, np.array(part.targets, np.int32), part.count) for part in inputs.prompt_scores],
            block_formats=formats,
            drafts=drafts,
            draft_counts=draft_counts,
            first_places=first_places,
            masks=None if masks is None else masks.bits,
            mask_rows=None if masks is None else masks.first_rows,
            masks_filled=None if masks is None else _gate(masks),
            layers=inputs.layers,
            pooled=[(part.first_row, part.count, part.total) for part in inputs.pooled],
        )
        if masks is not None:
            masks.wait()  # raises where they could not be filled
        sampled = [_sampled(token, scores) for token, scores in zip(token_ids.tolist(), row_scores, strict=True)]
        return StepOutputs(sampled, [TokenScores(*scores) for scores in prompt_scores])

    def logits(self, inputs: StepInputs, rows: Sequence[int]) -> NDArray[np.float32]:
        if inputs.layers:
            raise ValueError("logits are those of all layers")
        arrays, formats = self._arrays(inputs)
        return self._model.logits(*arrays, np.array(rows, np.int32), block_formats=formats)

    def _samplers(self, inputs: StepInputs) -> list[_native.Sampler | None]:
        samples, size = inputs.samples, self.spec.vocab_size
        if inputs.masks is None:
            return [sampler_of(sample, size) for sample in samples]
        masked = (inputs.masks.first_rows >= 0).tolist()
        return [sampler_of(sample, size, is_masked) for sample, is_masked in zip(samples, masked, strict=True)]

    def _arrays(self, inputs: StepInputs) -> tuple[tuple[Int32, Int32, Int32, Int32, Int32], NDArray[np.uint8] | None]:
        """What describes a step to native code: the arrays, and the formats of blocks where these differ."""
        tables, formats = self._pools.split(inputs.block_tables)
        return (inputs.token_ids, inputs.positions, inputs.query_starts, inputs.context_lengths, tables), formats


def dtype_of(weights: PackedWeights) -> str:
    """The formats of the matrices, for people: the one with the most weights first."""
    names = {number: name for name, number in FORMATS.items()}
    sizes: Counter[str] = Counter()
    for matrix in set(weights.matrices.values()):
        sizes[names[matrix.format]] += matrix.rows * matrix.k
    return "+".join(_DTYPES.get(name, name) for name, _ in sizes.most_common())


def _drafts(samples: Sequence[SampleRow]) -> tuple[Int32, Int32, Int32] | tuple[None, None, None]:
    """What describes drafts to native code: ids, counts, first places; nothing where there are none."""
    if not any(sample.draft_ids for sample in samples):
        return None, None, None
    return (
        np.array([token_id for sample in samples for token_id in sample.draft_ids], np.int32),
        np.array([len(sample.draft_ids) for sample in samples], np.int32),
        np.array([sample.first_place for sample in samples], np.int32),
    )


def _gate(masks: TokenMasks) -> _native.Gate:
    """What native code waits for before it reads the masks."""
    gate = _native.Gate()
    masks.when_filled(gate.open)
    return gate


def _native_name(format_: str) -> str:
    """What the native code calls a number format."""
    return "f32" if format_ == "fp32" else format_


def _sampled(token_id: int, scores: _Scores | None) -> Sampled | None:
    if token_id < 0:
        return None
    return Sampled(token_id, None if scores is None else TokenScores(*scores))
