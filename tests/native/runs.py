"""Drives a native model without a backend: sequences over shuffled blocks, logits of all rows out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kernels import _native
from tests.native.packed_models import SETS, PackedModel

Logits = NDArray[np.float32]
Arrays = dict[str, NDArray[Any]]

BLOCK = 32
KV_FORMATS = ("f32", "bf16", "int8", "int4")
"""Of blocks; a format's number is its place."""


class Runs:
    """Sequences by number, each with the blocks that it needs. Blocks are handed out in a shuffled order."""

    def __init__(
        self,
        packed: PackedModel,
        *,
        kv_format: str = "f32",
        instruction_set: str = SETS[-1],
        threads: int | _native.ThreadPool = 1,
        block_count: int = 128,
        seed: int = 0,
    ) -> None:
        pool = _native.ThreadPool(threads) if isinstance(threads, int) else threads
        self.model = packed.native(pool, instruction_set)
        self.hot = KV_FORMATS.index(kv_format)
        self.computed: dict[int, int] = {}
        self._blocks: dict[int, list[tuple[int, int]]] = {}  # of a sequence: format, id
        self._free: dict[int, list[int]] = {}
        self._random = np.random.default_rng(seed)
        self._allocate(kv_format, block_count)
        self._block_count = block_count

    def feed(self, chunks: Mapping[int, Sequence[int]]) -> dict[int, Logits]:
        """Each sequence's next tokens; logits [tokens, V] of each."""
        inputs = self.inputs(chunks)
        found = self.model.logits(**inputs, rows=np.arange(len(inputs["token_ids"]), dtype=np.int32))
        return dict(zip(chunks, np.split(found, inputs["query_starts"][1:-1]), strict=True))

    def whole(self, sequence: int, tokens: Sequence[int], chunk: int) -> Logits:
        """One sequence alone, `chunk` tokens a step."""
        parts = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
        return np.concatenate([self.feed({sequence: part})[sequence] for part in parts])

    def inputs(self, chunks: Mapping[int, Sequence[int]]) -> Arrays:
        """The arrays of a step over these tokens, which count as computed; formats only where some block is not hot."""
        counts = [len(tokens) for tokens in chunks.values()]
        starts = [self.computed.get(sequence, 0) for sequence in chunks]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        for sequence, end in zip(chunks, ends, strict=True):
            self.computed[sequence] = end
            blocks = self._blocks.setdefault(sequence, [])
            blocks += [(self.hot, self._free[self.hot].pop()) for _ in range(-(-end // BLOCK) - len(blocks))]
        tables = [self._blocks[sequence] for sequence in chunks]
        # Wider than needed, and what is not needed is no block of any pool.
        padded = np.full((len(tables), max(map(len, tables)) + 1, 2), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        arrays = {
            "token_ids": np.concatenate([np.array(tokens, np.int32) for tokens in chunks.values()]),
            "positions": np.concatenate([np.arange(*ends, dtype=np.int32) for ends in zip(starts, ends, strict=True)]),
            "query_starts": np.cumsum([0, *counts], dtype=np.int32),
            "context_lengths": np.array(ends, np.int32),
            "block_tables": np.ascontiguousarray(padded[..., 1]),
        }
        if any(format_ != self.hot for table in tables for format_, _ in table):
            arrays["block_formats"] = np.ascontiguousarray(padded[..., 0]).astype(np.uint8)
        return arrays

    def narrow(self, sequence: int, places: Iterable[int], kv_format: str) -> None:
        """Rewrites these full blocks of a sequence in a narrower format."""
        number, table = KV_FORMATS.index(kv_format), self._blocks[sequence]
        if number not in self._free:
            self._allocate(kv_format, self._block_count)
        for place in places:
            target = self._free[number].pop()
            source = KV_FORMATS[table[place][0]]
            self.model.narrow_blocks(np.array([[table[place][1], target]], np.int32), source, kv_format)
            self._release([table[place]])
            table[place] = (number, target)

    def copy(self, source: int, target: int) -> None:
        """Makes `target` a new sequence with copies of the source's blocks."""
        blocks = self._blocks[source]
        self._blocks[target] = [(self.hot, self._free[self.hot].pop()) for _ in blocks]
        pairs = [(old, new) for (_, old), (_, new) in zip(blocks, self._blocks[target], strict=True)]
        self.model.copy_blocks(np.array(pairs, np.int32))
        self.computed[target] = self.computed[source]

    def forget(self, sequence: int) -> None:
        """Its blocks keep what they hold and go back among the free ones."""
        del self.computed[sequence]
        self._release(self._blocks.pop(sequence))

    def fill(self, token: int, context: int) -> None:
        """Computes `token` into every free slot of the hot pool, sequences of at most `context` tokens, and forgets."""
        most = context // BLOCK
        sequence = 1 + max(self.computed, default=0)
        made = []
        while self._free[self.hot]:
            made.append(sequence)
            self.feed({sequence: [token] * (BLOCK * min(most, len(self._free[self.hot])))})
            sequence += 1
        for one in made:
            self.forget(one)

    def _allocate(self, kv_format: str, count: int) -> None:
        self.model.allocate_kv(count, kv_format)
        self._free[KV_FORMATS.index(kv_format)] = self._random.permutation(count).tolist()

    def _release(self, blocks: Iterable[tuple[int, int]]) -> None:
        for format_, block in blocks:
            self._free[format_].append(block)
            self._random.shuffle(self._free[format_])


def ids_of(seed: int, count: int, vocab: int = 256) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, vocab, count)]


def relative_error(found: Logits, expected: NDArray[Any]) -> float:
    """The L2 norm of the difference as a share of the expected one's."""
    wanted = np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
