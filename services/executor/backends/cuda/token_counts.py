"""How often tokens occurred in prompts and outputs of sequences whose rules ask for it; kept on the device."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels.token_sampler import count_tokens
from services.executor.backends.base import Int32, SampleRow
from services.executor.backends.cuda.device import Device
from services.executor.backends.cuda.draws import prepared
from services.executor.backends.cuda.memory_layout import send


class Slot:
    """A sequence's row of the table; free again when the sequence is forgotten."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.observed = 0  # tokens of the output taken in


class TokenCounts:
    """The table [slots, V], as SamplingState.counts has it; it grows as more sequences need it."""

    def __init__(self, vocabulary: int, device: Device) -> None:
        self._device, self._vocabulary = device, vocabulary
        self._free: list[int] = []
        self.table = torch.zeros((0, vocabulary), dtype=torch.int32, device=device.torch_device)

    def slots(self, samples: Sequence[SampleRow], penalized: Sequence[bool]) -> Int32:
        """The row of each sample [samples], -1 without penalties; rows hold all output so far."""
        found = np.full(len(samples), -1, np.int32)
        late: list[tuple[int, Sequence[int]]] = []
        for i, (sample, is_penalized) in enumerate(zip(samples, penalized, strict=True)):
            if not is_penalized:
                continue
            slot = self._slot(sample)
            found[i] = slot.number
            if slot.observed < len(sample.output_ids):
                late.append((slot.number, sample.output_ids[slot.observed :]))
                slot.observed = len(sample.output_ids)
        if late:
            self._count(late)
        return found

    def drew(self, samples: Sequence[SampleRow], slots: Tensor, drawn: Tensor) -> None:
        """Takes in one more token of each sample: drawn [samples] int32, on the device as slots [samples] int32."""
        count_tokens(self.table, slots, drawn[:, None], torch.ones_like(slots))
        for sample in samples:
            if prepared(sample).penalizes:
                self._slot(sample).observed += 1

    def _slot(self, sample: SampleRow) -> Slot:
        kept = prepared(sample).kept
        slot = kept.get(self)
        if not isinstance(slot, Slot):
            slot = kept[self] = self._take(sample)
        return slot

    def _take(self, sample: SampleRow) -> Slot:
        if not self._free:
            rows = max(8, len(self.table))
            self._free += range(len(self.table), len(self.table) + rows)
            self.table = torch.cat((self.table, self.table.new_zeros((rows, self._vocabulary))))
        slot = Slot(self._free.pop())
        weakref.finalize(slot, self._free.append, slot.number)
        counts = 2 * np.bincount(np.array(sample.output_ids, np.int64), minlength=self._vocabulary)
        counts[np.array(sample.prompt_ids, np.int64)] += 1
        self.table[slot.number].copy_(send(self._device, {"counts": counts.astype(np.int32)})["counts"])
        slot.observed = len(sample.output_ids)
        return slot

    def _count(self, late: Sequence[tuple[int, Sequence[int]]]) -> None:
        tokens = np.full((len(late), max(len(ids) for _, ids in late)), -1, np.int32)
        for row, (_, ids) in enumerate(late):
            tokens[row, : len(ids)] = ids
        numbers = np.array([number for number, _ in late], np.int32)
        lengths = np.array([len(ids) for _, ids in late], np.int32)
        sent = send(self._device, {"slots": numbers, "tokens": tokens, "lengths": lengths})
        count_tokens(self.table, sent["slots"], sent["tokens"], sent["lengths"])
