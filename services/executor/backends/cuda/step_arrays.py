"""A step's tokens and block tables as arrays on the device: of any step, or in fixed places that captured ones read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.next_step import DecodeState
from kernels.paged_attention import MixedBatch
from kernels.token_sampler import SamplingState
from services.executor.backends.base import Int32, StepInputs
from services.executor.backends.cuda.buckets import Bucket
from services.executor.backends.cuda.device import Device
from services.executor.backends.cuda.draws import Draws
from services.executor.backends.cuda.memory_layout import Field, Shared, send
from services.executor.backends.cuda.model import DeviceStep
from services.executor.backends.cuda.sampler import POSITIONS, rule_arrays, rule_fields, sampling_state

_WIDTH = 16
"""Blocks: tables are filled up to a multiple, or kernels would be compiled for many widths."""


def slots_of(inputs: StepInputs, block_size: int) -> NDArray[np.int64]:
    """Where each token's keys and values go [T]."""
    owners = np.repeat(np.arange(len(inputs.context_lengths)), np.diff(inputs.query_starts))
    blocks = inputs.block_tables[owners, inputs.positions // block_size].astype(np.int64)
    return blocks * block_size + inputs.positions % block_size


def send_step(
    device: Device, inputs: StepInputs, draws: Draws, block_size: int
) -> tuple[DeviceStep, Tensor, SamplingState]:
    """A step of any size, the rows that draw [R] int64, and how."""
    tables = inputs.block_tables
    arrays: dict[str, NDArray[Any]] = {
        "tokens": inputs.token_ids.astype(np.int64),
        "positions": inputs.positions.astype(np.int64),
        "slots": slots_of(inputs, block_size),
        "query_starts": inputs.query_starts,
        "contexts": inputs.context_lengths,
        "tables": np.pad(tables, ((0, 0), (0, -tables.shape[1] % _WIDTH))),
        "rows": draws.rows,
    }
    sent = send(device, arrays | rule_arrays(draws))
    batch = MixedBatch(
        sent["query_starts"],
        sent["contexts"],
        sent["tables"],
        most_queries=int(np.diff(inputs.query_starts).max()),
        longest_context=int(inputs.context_lengths.max()),
    )
    step = DeviceStep(sent["tokens"], sent["positions"], sent["slots"], batch)
    return step, sent["rows"], sampling_state(sent, len(draws.rows))


class FixedStep:
    """Places for steps of up to `rows` tokens of up to `sequences` sequences, their logits and what they draw."""

    def __init__(
        self, device: Device, *, rows: int, sequences: int, context: int, block_size: int, vocabulary: int
    ) -> None:
        """`context`: the most tokens of a sequence."""
        wide, narrow = np.dtype(np.int64), np.dtype(np.int32)
        self._block_size = block_size
        self._inputs = Shared(
            device,
            {
                "tokens": Field((rows,), wide),
                "positions": Field((rows,), wide),
                "slots": Field((rows,), wide),
                "query_starts": Field((sequences + 1,), narrow),
                "contexts": Field((sequences,), narrow),
                **rule_fields(rows),
            },
        )
        self._inputs.edit()["slots"].fill(-1)
        self._inputs.send()
        width = -(-context // block_size)
        self._tables = Shared(device, {"tables": Field((sequences, width + -width % _WIDTH), narrow)})
        self._sent_tables: Int32 | None = None
        self.logits = torch.zeros((rows, vocabulary), dtype=torch.float32, device=device.torch_device)
        self.drawn = torch.zeros(rows, dtype=torch.int32, device=device.torch_device)

    def fill(self, inputs: StepInputs, draws: Draws) -> None:
        """Brings a step to the device. Rows beyond its own belong to no sequence."""
        host, tokens, sequences = self._inputs.edit(), len(inputs.token_ids), len(inputs.context_lengths)
        host["tokens"][:tokens], host["tokens"][tokens:] = inputs.token_ids, 0
        host["positions"][:tokens], host["positions"][tokens:] = inputs.positions, 0
        host["slots"][:tokens], host["slots"][tokens:] = slots_of(inputs, self._block_size), -1
        host["query_starts"][: sequences + 1], host["query_starts"][sequences + 1 :] = inputs.query_starts, tokens
        host["contexts"][:sequences], host["contexts"][sequences:] = inputs.context_lengths, 0
        for name, array in rule_arrays(draws).items():
            host[name][: len(array)] = array
        self._inputs.send()
        self.send_tables(inputs.block_tables)

    def send_tables(self, tables: Int32) -> None:
        """Brings block tables to the device where they are others than before."""
        if self._sent_tables is not None and np.array_equal(self._sent_tables, tables):
            return
        host = self._tables.edit()["tables"]
        width = min(host.shape[1], tables.shape[1])  # blocks beyond the context are read by nobody
        host[: len(tables), :width] = tables[:, :width]
        self._tables.send()
        self._sent_tables = tables.copy()

    def step(self, bucket: Bucket) -> DeviceStep:
        """What a step of a bucket reads."""
        arrays = self._inputs.device
        batch = MixedBatch(
            arrays["query_starts"][: bucket.sequences + 1],
            arrays["contexts"][: bucket.sequences],
            self._tables.device["tables"][: bucket.sequences],
            most_queries=bucket.queries,
            longest_context=bucket.context,
        )
        rows = bucket.rows
        return DeviceStep(arrays["tokens"][:rows], arrays["positions"][:rows], arrays["slots"][:rows], batch)

    def sampling(self, rows: int) -> SamplingState:
        """How its first rows draw."""
        return sampling_state(self._inputs.device, rows)

    def decode_state(self) -> DecodeState:
        """What goes on from one decode step to the next."""
        arrays = self._inputs.device
        return DecodeState(
            arrays["tokens"], arrays["positions"], arrays["slots"], arrays["contexts"], arrays[POSITIONS],
            self._tables.device["tables"],
        )  # fmt: skip
