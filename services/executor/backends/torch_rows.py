"""To how many rows a matrix product is padded, so that a row's result does not depend on how many others there are.

BLAS libraries pick kernels by the number of rows, and kernels round differently. The sizes that agree with each other
bit for bit are found by trial on the model's own matrices.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

log = logging.getLogger("quire.executor")

Product = Callable[[Tensor], Tensor]

_REFERENCE = 16
_CANDIDATES = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
_SHARE = 32  # outputs of a few rows that one thread computes at a time
_CONTEXTS = (64, 512)  # attention products to try
_PROBED_OUTPUTS = 1 << 12  # of each matrix; kernels are picked by rows and width
_DISTINCT = 13  # rows that fill a trial, so that equal ones meet different places in a kernel's tiles


@dataclass(frozen=True, slots=True)
class RowSizes:
    """The sizes in use, ascending. Larger products are cut into pieces of the largest."""

    sizes: tuple[int, ...]

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def pad(self, count: int) -> int:
        """Rows after padding: whole pieces of the largest size, then the smallest size that holds the rest."""
        whole, rest = divmod(count, self.largest)
        return whole * self.largest + (next(size for size in self.sizes if size >= rest) if rest else 0)

    def pieces(self, count: int) -> Iterator[slice]:
        """The pieces of a padded count."""
        for start in range(0, count, self.largest):
            yield slice(start, min(start + self.largest, count))


def find_row_sizes(weights: Iterable[Tensor], head_size: int) -> RowSizes:
    """Tries every candidate on each shape among `weights` [N, K] and on attention's products. fp32 on the CPU.

    Falls back to the reference size alone, where a product of that size agrees at least with itself.
    """
    generator = torch.Generator().manual_seed(0)
    by_shape = {weight.shape: weight[:_PROBED_OUTPUTS] for weight in weights}
    products = [(weight.shape[1], _linear(weight)) for weight in by_shape.values()]
    for context in _CONTEXTS:
        values = torch.randn(1, context, head_size, generator=generator)
        products += [(head_size, _batched(values.transpose(1, 2))), (context, _batched(values))]
    sizes = set(_CANDIDATES)
    for width, product in products:
        rows = torch.randn(_DISTINCT, width, generator=generator)
        expected = product(rows[_places(_REFERENCE, 0)])[:_DISTINCT]
        sizes = {size for size in sizes if size == _REFERENCE or _agrees(product, rows, expected, size)}
        if not _agrees(product, rows, expected, _REFERENCE):
            log.warning("matrix products round a row differently in different places; output may depend on the batch")
    return RowSizes(tuple(sorted(sizes)))


def multiply(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] by weight [N, K] to [T, N]: the fastest of three ways, which round alike."""
    (rows, width), outputs = x.shape, weight.shape[0]
    if rows <= 8 and outputs % _SHARE == 0:  # as one product, threads would share too few rows
        shares = weight.view(-1, _SHARE, width).transpose(1, 2)
        return torch.bmm(x.expand(shares.shape[0], rows, width), shares).transpose(0, 1).reshape(rows, outputs)
    if 16 <= rows <= 64:  # threads share the outputs evenly this way
        return torch.mm(weight, x.t()).t().contiguous()
    return F.linear(x, weight)


def _linear(weight: Tensor) -> Product:
    return lambda x: multiply(x, weight)


def _batched(matrix: Tensor) -> Product:
    return lambda x: torch.bmm(x[None], matrix)[0]


def _agrees(product: Product, rows: Tensor, expected: Tensor, size: int) -> bool:
    return all(torch.equal(product(rows[places]), expected[places]) for places in (_places(size, 0), _places(size, 5)))


def _places(size: int, shift: int) -> Tensor:
    return (torch.arange(size) + shift) % _DISTINCT
