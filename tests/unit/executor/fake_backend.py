"""A backend without a model: the next token is a hash of every token that it finds in its paged KV.

The state of a token is itself, its position and 1.
"""

from __future__ import annotations

import hashlib
import threading
import time
from bisect import bisect_right

import numpy as np

from services.common.kv_policy import KvPolicy
from services.executor.backends.base import ColderPool, KvShape, Sampled, StepInputs, StepOutputs, TokenScores
from services.executor.loader import LoadedModel
from services.executor.models.spec import ModelSpec
from services.executor.sampling.draw import single_rows

VOCAB = 100
EOS = 99
FREE = -1  # what the KV holds where nothing was written
HOT = KvPolicy()
SPEC = ModelSpec(
    architecture="fake",
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=8,
    layer_count=1,
    head_count=1,
    kv_head_count=1,
    head_size=8,
    context_length=256,
    norm_epsilon=1e-5,
    rope_theta=1e4,
    eos_token_ids=(EOS,),
)


def next_token(context: list[int]) -> int:
    """Depends on every token and its position; never EOS."""
    digest = hashlib.blake2b(np.array(context, np.int32).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "little") % EOS


def generate(prompt: list[int], count: int) -> list[int]:
    """What an undisturbed sequence must answer."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeBackend:
    """Knobs: `script` maps a context length to the token drawn there; `bad_lengths` draw None; `fails` counts down."""

    name = "fake"
    dtype = kv_format = "fp32"
    device = "none"
    numerics = "exact"
    computes_from_host_memory = True

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        self.spec = spec
        self.script: dict[int, int] = {}
        self.bad_lengths: set[int] = set()
        self.fails = 0
        self.step_seconds = 0.0
        self.gate: threading.Event | None = None  # each step waits for it
        self.batches: list[list[int]] = []  # tokens per sequence, per step
        self.copies: list[tuple[int, int]] = []
        self.demotions: list[tuple[int, int]] = []

    def device_memory(self) -> int | None:
        return None

    def kv_block_bytes(self, block_size: int, kv_format: str | None = None) -> int:
        return block_size * {None: 64, "int8": 16, "int4": 8}[kv_format]

    def allocate_kv(self, shape: KvShape) -> None:
        self.shape = shape
        self.kv = np.full((shape.pool_starts[-1], shape.block_size), FREE, np.int32)

    def copy_blocks(self, pairs) -> None:
        for source, destination in pairs:
            self.kv[destination] = self.kv[source]
        self.copies += pairs

    def demote_blocks(self, pairs) -> None:
        for source, destination in pairs:
            self.kv[destination] = self.kv[source]
        self.demotions += pairs

    def read_block(self, block_id):
        shape = self.shape
        sizes = [shape.block_bytes, *(pool.block_bytes for pool in shape.colder)]
        size = sizes[bisect_right(shape.pool_starts, block_id) - 1]
        return memoryview(self.kv[block_id].tobytes().ljust(size, b"."))

    def write_block(self, block_id, block) -> None:
        self.kv[block_id] = np.frombuffer(block, np.int32)[: self.kv.shape[1]]

    def host_memory(self, byte_count):
        return np.zeros(byte_count, np.uint8)

    def step(self, inputs: StepInputs) -> StepOutputs:
        if self.gate is not None:
            assert self.gate.wait(20)
        time.sleep(self.step_seconds)
        counts = np.diff(inputs.query_starts)
        assert counts.sum() == len(inputs.token_ids) == len(inputs.positions)
        self.batches.append(counts.tolist())
        if self.fails > 0:
            self.fails -= 1
            raise RuntimeError("staged failure")
        size = self.kv.shape[1]
        for s, table in enumerate(inputs.block_tables):
            span = slice(inputs.query_starts[s], inputs.query_starts[s + 1])
            positions = inputs.positions[span]
            self.kv[table[positions // size], positions % size] = inputs.token_ids[span]
        sampled: list[Sampled | None] = []
        for row in single_rows(inputs.samples):
            s = int(np.searchsorted(inputs.query_starts, row.row, side="right")) - 1
            context = self._context(inputs, s)[: int(inputs.positions[row.row]) + 1]
            assert context == [*row.prompt_ids, *row.output_ids]
            token = self.script.get(len(context), next_token(context))
            scores = TokenScores([-0.5], [1], [[token] * row.rule.logprob_count], [[-0.5] * row.rule.logprob_count])
            drawn = Sampled(token, scores if row.rule.logprob_count >= 0 else None)
            sampled.append(None if len(context) in self.bad_lengths else drawn)
        scored = [
            TokenScores(
                [-float(target) for target in part.targets],
                [1] * len(part.targets),
                [[0] * part.count] * len(part.targets),
                [[-0.25] * part.count] * len(part.targets),
            )
            for part in inputs.prompt_scores
        ]
        for part in inputs.pooled:
            for row in range(part.first_row, part.first_row + part.count):
                part.total[:3] += inputs.token_ids[row], inputs.positions[row], 1
        return StepOutputs(sampled, scored)

    def _context(self, inputs: StepInputs, s: int) -> list[int]:
        size, length = self.kv.shape[1], int(inputs.context_lengths[s])
        return [int(self.kv[inputs.block_tables[s, i // size], i % size]) for i in range(length)]


def loaded(
    backend: FakeBackend,
    name: str = "fake",
    source: str = "none",
    blocks: int = 64,
    policy: KvPolicy = HOT,
) -> LoadedModel:
    """`blocks` in each format."""
    colder = tuple(ColderPool(age.format, backend.kv_block_bytes(4, age.format), blocks) for age in policy.colder)
    shape = KvShape(4, backend.kv_block_bytes(4), blocks, colder)
    backend.allocate_kv(shape)
    bundle = bytes(range(256)) * 5000
    return LoadedModel(
        name=name,
        source=source,
        backend=backend,
        shape=shape,
        policy=policy,
        fingerprint=hashlib.sha256(source.encode()).hexdigest(),
        tokenizer_bundle=bundle,
        tokenizer_fingerprint=hashlib.sha256(bundle).hexdigest(),
        parameter_count=1,
        loaded_at=1,
    )
