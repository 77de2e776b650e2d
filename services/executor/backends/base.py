"""What a backend computes: one step over a flattened batch, sampling included.

The worker builds `StepInputs`, the backend answers with a `Sampled` for every row of `samples`. No torch here: the cpu
backend runs without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.executor.models.spec import ModelSpec

Int32 = NDArray[np.int32]
UInt32 = NDArray[np.uint32]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class SamplingRule:
    """How one sequence samples; built once when it enters. Ranges are checked by the gateway and again at entry."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0  # 0 is greedy
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    choice: int = 0
    min_tokens: int = 0
    banned_until_min_tokens: tuple[int, ...] = ()  # end and stop tokens
    logprob_count: int = -1  # alternatives per output token; -1 returns none
    prompt_logprob_count: int = -1  # alternatives per prompt token; -1 returns none


@dataclass(slots=True)
class SampleRow:
    """Tokens to draw for one sequence, one at each place from `first_place` to the number of its drafts: at place i
    as if the first i drafts were output already. They come from the logits after flattened row `row` and later ones.
    """

    row: int
    rule: SamplingRule
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # so far; its length is the output position that keys the random numbers
    prepared: object = None  # what the backend keeps with the sequence; nobody else touches it
    draft_ids: Sequence[int] = ()  # of this step
    first_place: int = 0
    allowed: UInt32 | None = None  # of a row without drafts: a bit per token [ceil(V / 32)], as in TokenMasks

    @property
    def count(self) -> int:
        """Tokens to draw."""
        return 1 + len(self.draft_ids) - self.first_place


@dataclass(slots=True)
class PromptScoreRows:
    """Prompt tokens to score: the logits after row first_row + i give the log probability of targets[i]."""

    first_row: int
    targets: Sequence[int]
    count: int  # alternatives per token


@dataclass(slots=True)
class PooledRows:
    """Rows whose states, behind the last norm, are added to `total` one after the other."""

    first_row: int
    count: int
    total: Float64  # [H]; changed by the step


@dataclass(slots=True)
class TokenScores:
    """Log probabilities of consecutive tokens; natural logs, alternatives most likely first."""

    chosen: list[float]
    ranks: list[int]  # 1-based
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


class TokenMasks(Protocol):
    """Which tokens may be drawn in a step; filled by another thread while the model computes."""

    bits: UInt32  # [M, ceil(V / 32)] a bit per token, the first in the lowest one; 1 allows it
    first_rows: Int32  # [samples] of bits: of each sample's first place, later ones follow; -1 where all are allowed

    def wait(self) -> None:
        """Returns once bits are filled. Raises where they could not be."""
        ...

    def when_filled(self, told: Callable[[], None]) -> None:
        """Calls `told` once bits are filled, or could not be: at once, or from another thread."""
        ...


@dataclass(slots=True)
class StepInputs:
    """One step: S sequences with T tokens in all, sequence after sequence."""

    token_ids: Int32  # [T]
    positions: Int32  # [T] absolute
    query_starts: Int32  # [S + 1] offsets into T
    context_lengths: Int32  # [S] tokens with KV after this step
    block_tables: Int32  # [S, most blocks of any of them] ids of any pool; unused entries are 0
    samples: list[SampleRow]  # at most one per sequence
    prompt_scores: list[PromptScoreRows] = field(default_factory=list)
    layers: int = 0  # the head follows the first so many layers, 0 for all: later ones get no KV then
    masks: TokenMasks | None = None  # of samples; None allows all tokens
    room: Callable[[], Int32 | None] | None = None
    """[S] tokens that each sequence's blocks hold, or None: asked before the step's tokens are known, it is given where
    the next step is likely to go on with these alone, so that it may be begun ahead."""
    pooled: list[PooledRows] = field(default_factory=list)


@dataclass(slots=True)
class Sampled:
    token_id: int
    scores: TokenScores | None  # of exactly this token, where logprob_count >= 0


@dataclass(slots=True)
class StepOutputs:
    sampled: list[Sampled | None]  # of each row of each of samples; None where that row's logits were not finite
    prompt_scores: list[TokenScores]  # parallel to prompt_scores


@dataclass(frozen=True, slots=True)
class ColderPool:
    """Blocks in a smaller format than those of the pool before."""

    format: str  # "int8" or "int4"
    block_bytes: int
    block_count: int


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a block costs and how many there are: hot ones, which steps write, and colder copies.

    Ids count through all pools, hot blocks from 0 on: an id names its pool and so its format.
    """

    block_size: int  # token slots
    block_bytes: int
    block_count: int
    colder: tuple[ColderPool, ...] = ()

    @property
    def pool_starts(self) -> tuple[int, ...]:
        """The first id of each pool, then the end of the last one."""
        ends = itertools.accumulate((pool.block_count for pool in self.colder), initial=self.block_count)
        return (0, *ends)

    @property
    def byte_count(self) -> int:
        """Of all pools."""
        hot = self.block_bytes * self.block_count
        return hot + sum(pool.block_bytes * pool.block_count for pool in self.colder)


class Backend(Protocol):
    """A loaded model that computes steps. Not thread-safe: one thread steps it."""

    name: str
    dtype: str  # of weights: "fp32", "bf16", "fp16", or quantized ones, several joined: "q4_1+q8_0"
    kv_format: str  # of keys and values: "fp32", "bf16" or "fp16"
    device: str  # for people: instruction set or card
    spec: ModelSpec
    numerics: str  # everything beside weights that may change a logit; goes into the fingerprint

    @property
    def computes_from_host_memory(self) -> bool:
        """Whether blocks lie in host memory anyway."""
        ...

    def device_memory(self) -> int | None:
        """Bytes of the device's own memory that blocks may take, steps having what they need; None where blocks lie in
        host memory. Asked for before `allocate_kv`, and may compute to find out.
        """
        ...

    def kv_block_bytes(self, block_size: int, kv_format: str | None = None) -> int:
        """Bytes of one block of `block_size` slots over all layers, hot (None) or in int8 or int4."""
        ...

    def allocate_kv(self, shape: KvShape) -> None:
        """Makes the paged KV. Called once, before the first step."""
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole hot blocks (source, destination), in order."""
        ...

    def demote_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Writes full blocks (source, destination) in the destination's colder format, in order."""
        ...

    def read_block(self, block_id: int) -> memoryview:
        """The block's bytes, scales included; valid until it is written. From any thread, while no step writes it."""
        ...

    def write_block(self, block_id: int, block: memoryview) -> None:
        """Gives it bytes that `read_block` returned; done when it returns. From any thread, as `read_block`."""
        ...

    def host_memory(self, byte_count: int) -> NDArray[np.uint8]:
        """Memory of the host that blocks reach fastest."""
        ...

    def step(self, inputs: StepInputs) -> StepOutputs:
        """Writes KV for all T tokens, then samples and scores the rows asked for."""
        ...

    def logits(self, inputs: StepInputs, rows: Sequence[int]) -> NDArray[np.float32]:
        """Writes KV as `step` does and returns the raw logits [R, V] after these R flattened rows; samples nothing."""
        ...
