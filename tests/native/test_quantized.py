"""Logits of quantized checkpoints, their columns in any order: against float64, and of files against torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.hf import canonical_name
from services.executor.models.weights import Checkpoint
from tests.fixtures.models import make_rand_model, reference_logits
from tests.fixtures.quantized import SCHEMES, quantize_folder
from tests.fixtures.vocabularies import byte_level
from tests.native import budgets
from tests.native.packed_models import ROUNDS_TO_BF16, SETS, PackedModel, as_multiplied, pack_checkpoint
from tests.native.runs import Runs, ids_of, relative_error
from tests.unit.executor.packing_fakes import MadeCheckpoint
from tests.unit.executor.quantized_fakes import Fp8, Grouped, Make, quantize_layers
from tests.unit.executor.torch_runs import Runs as TorchRuns

VOCABULARY = byte_level(["more"] * 5)
TOKENS, PREFILL = 70, 47
ROUNDED_INPUTS = 6e-2
"""Relative L2 error of logits where matrices multiply int8, against inputs that are not rounded."""

WHOLE: dict[str, Any] = {"hidden": 128, "heads": 4, "kv_heads": 2, "head_size": 64, "intermediate": 256}
ODD: dict[str, Any] = {"hidden": 72, "heads": 3, "kv_heads": 1, "head_size": 80, "intermediate": 100}


@dataclass(frozen=True)
class Case:
    sizes: dict[str, Any]
    make: Make
    others: dict[str, Make]
    formats: set[str]  # of the matrices of layers


CASES: dict[str, Case] = {
    "zero points": Case(WHOLE, Grouped(4, 64), {}, {"q4zg64"}),
    "symmetric": Case(WHOLE, Grouped(4, 128, symmetric=True), {}, {"q4g128"}),
    "three bits": Case(WHOLE, Grouped(3, 32), {}, {"q4g32"}),
    "act-order": Case(WHOLE, Grouped(4, 64, order=1), {}, {"q4zg64"}),
    "two bits in any order": Case(WHOLE, Grouped(2, 32, order=1), {}, {"q4g32"}),
    "eight bits in any order": Case(WHOLE, Grouped(8, 64, symmetric=True, order=2), {}, {"q8"}),
    "short groups in any order, odd sizes": Case(ODD, Grouped(4, 64, order=1), {}, {"q4zg32", "q4zg64"}),
    "groups over padding": Case(ODD, Grouped(4, 64), {}, {"q4zg32", "q4zg64"}),
    "a scale a row": Case(WHOLE, Grouped(8, 1 << 20, symmetric=True), {}, {"q8c"}),
    "orders of their own": Case(
        WHOLE,
        Grouped(4, 64, order=1),
        {"k": Grouped(4, 64, order=2), "up": Grouped(4, 64, order=3), "o": Fp8((1, None))},
        {"q4zg64", "q8", "f8"},
    ),
    "fp8 blocks": Case(WHOLE, Fp8((128, 128)), {}, {"f8"}),
    "fp8": Case(ODD, Fp8((None, None)), {"down": Grouped(4, 32, order=1)}, {"f8", "q4zg32"}),
    "a head in any order": Case(WHOLE, Grouped(4, 32), {"head": Grouped(4, 32, order=5)}, {"q4zg32"}),
}

MakeModel = Callable[[Case], tuple[MadeCheckpoint, Path]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A case's checkpoint, and a plain folder of the same values."""

    def make_one(case: Case) -> tuple[MadeCheckpoint, Path]:
        path = make_rand_model(tmp_path_factory.mktemp("model"), 5, vocabulary=VOCABULARY, **case.sizes)
        plain: Checkpoint = open_checkpoint(path)
        made = MadeCheckpoint(plain.spec, {name: plain.tensor(name) for name in plain.shapes()})
        matrices = quantize_layers(made, case.make, **case.others)
        stored = load_file(path / "model.safetensors")
        for name in stored:
            canonical = canonical_name(name)
            if canonical in matrices:
                stored[name] = matrices[canonical].dequantize()
        save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
        return made, path

    return make_one


def formats_of_layers(model: PackedModel) -> set[str]:
    return {model.format_of(name) for name in model.weights.matrices if name.startswith("layers.")}


@pytest.mark.parametrize("name", CASES)
def test_logits_of_quantized_checkpoints(make: MakeModel, name: str) -> None:
    """A prompt and some decodes on every instruction set, the reference rounding inputs in the same groups."""
    case = CASES[name]
    checkpoint, path = make(case)
    packed, ids = pack_checkpoint(checkpoint), ids_of(1, TOKENS, VOCABULARY.size)
    assert formats_of_layers(packed) == case.formats
    for instruction_set in SETS:
        expected = reference_logits(path, ids, as_multiplied(packed, instruction_set)).numpy()
        runs = Runs(packed, instruction_set=instruction_set)
        found = np.concatenate([runs.feed({0: ids[:PREFILL]})[0], runs.whole(0, ids[PREFILL:], 1)])
        names = {
            "bf16 products" if instruction_set == ROUNDS_TO_BF16 and used == "bf16" else used for used in packed.formats
        }
        assert relative_error(found, expected) < max(budgets.of(budgets.LOGITS, used) for used in names)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_files_of_every_scheme(tmp_path: Path, scheme: str) -> None:
    """Where no format holds the codes themselves, q8 comes within what int8 inputs cost anyway."""
    quantized, same = quantize_folder(make_rand_model(tmp_path / "plain", 5), scheme)
    packed, ids = pack_checkpoint(open_checkpoint(quantized)), ids_of(1, 50)
    found = Runs(packed).feed({0: ids})[0]
    assert relative_error(found[-1], TorchRuns(quantized).step({0: ids})[0].numpy()) < ROUNDED_INPUTS
    if not packed.weights.conversions:
        expected = reference_logits(same, ids, as_multiplied(packed, SETS[-1])).numpy()
        assert relative_error(found, expected) < max(budgets.of(budgets.LOGITS, name) for name in packed.formats)


@pytest.mark.parametrize("instruction_set", SETS)
@pytest.mark.parametrize("name", ["act-order", "short groups in any order, odd sizes", "fp8 blocks",
                                  "orders of their own", "a head in any order"])  # fmt: skip
def test_same_bits_alone_batched_and_chunked(make: MakeModel, name: str, instruction_set: str) -> None:
    packed = pack_checkpoint(make(CASES[name])[0])
    ids, others = ids_of(1, 70), {i: ids_of(i, 3 + 21 * i) for i in range(2, 5)}
    whole = Runs(packed, instruction_set=instruction_set).feed({0: ids})[0]
    runs = Runs(packed, instruction_set=instruction_set, threads=3, seed=1)
    parts = [
        runs.feed({2: others[2], 0: ids[:1]})[0],
        runs.feed({0: ids[1:7], 3: others[3][:50]})[0],
        runs.feed({3: others[3][50:], 0: ids[7:12], 4: others[4]})[0],
        runs.whole(0, ids[12:20], 1),
        runs.feed({0: ids[20:68], 2: [9]})[0],
        runs.feed({2: [4], 0: ids[68:]})[0],
    ]
    assert np.array_equal(np.concatenate(parts).view(np.uint32), whole.view(np.uint32))
