"""GGUF files that were made to harm, or that contradict themselves: refused naming tensor and type."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.gguf_metadata import read_header
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.models import make_rand_model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("whole") / "m", layers=1, hidden=32, heads=2, kv_heads=1,
                           intermediate=64)  # fmt: skip


def refused(path: Path, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        open_checkpoint(path)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def gguf_file(fields: list[bytes], tensors: list[bytes], data: int = 0) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join((*fields, *tensors))
    return head + bytes(-len(head) % 32 + data)


F32, Q4_0, Q4_K = 0, 2, 12
ARRAY, STRINGS = 9, struct.pack("<I", 8)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gguf_file([], [tensor("a", (2, 33), Q4_0, 0)], 99), "a: 33 columns are no multiple of the Q4_0 block of 32"),
        (gguf_file([], [tensor("a", (2, 32), Q4_K, 0)], 99), "a: 32 columns are no multiple of the Q4_K block of 256"),
        (gguf_file([], [tensor("a", (2, 32), 99, 0)], 99), r"tensor a \[2, 32\]: ggml type 99 is not known"),
        (gguf_file([], [tensor("a", (2, 32), 4, 0)], 99), r"tensor a \[2, 32\]: ggml type 4 is not known"),
        (gguf_file([], [tensor("a", (2, 32), Q4_0, 0)], 35), r"a \[2, 32\] Q4_0 of 36 bytes lies beyond the end"),
        (gguf_file([], [tensor("a", (4, 32), Q4_0, 0), tensor("b", (32,), F32, 64)], 192),
         r"tensor b \[32\] F32 of 128 bytes begins at \d+, before tensor a ends"),
        (gguf_file([], [tensor("a", (32,), F32, 0), tensor("b", (32,), F32, 0)], 192), "before tensor a ends"),
        (gguf_file([], [tensor("a", (2, 32), Q4_0, 7)], 99), r"tensor a \[2, 32\] Q4_0 begins at 7, no multiple of 32"),
        (gguf_file([], [tensor("a", (1 << 63, 1 << 63), F32, 0)], 99), "lies beyond the end"),
        (gguf_file([], [tensor("a", (1,) * 5, F32, 0)], 99), "5 dimensions of tensor a; at most 4"),
        (gguf_file([], [text("a") + struct.pack("<I", 0xFFFFFFFF)], 99), "4294967295 dimensions of tensor a"),
        (gguf_file([], [tensor("a", (8,), F32, 0), tensor("a", (8,), F32, 32)], 99), "tensor a occurs twice"),
        (gguf_file([field("a", 0, b"1"), field("a", 0, b"2")], []), "field a occurs twice"),
        (gguf_file([field("general.alignment", 4, struct.pack("<I", 0))], []), "general.alignment is 0"),
        (gguf_file([field("general.alignment", 4, struct.pack("<I", 48))], []), "general.alignment is 48"),
        (gguf_file([field("general.alignment", 6, struct.pack("<f", 32.0))], []), "general.alignment has value type 6"),
        (gguf_file([field("a", ARRAY, STRINGS + struct.pack("<QQ", 1, (1 << 64) - 1))], []), "cut short"),
        (gguf_file([field("a", ARRAY, STRINGS + struct.pack("<QQQ", 2, (1 << 63) - 64, 1))], []), "cut short"),
        (gguf_file([field("a", ARRAY, STRINGS + struct.pack("<Q", 1 << 60))], []), "elements of an array; at most"),
        (gguf_file([field("a", ARRAY, struct.pack("<IQ", 0, 1 << 60))], []), "elements of an array; at most"),
        (gguf_file([field("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 4000)], []), "arrays of value type 9"),
        (gguf_file([field("a", 77, b"")], []), "value type 77 is not known"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 63, 0) + bytes(64), "tensors; at most"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63) + bytes(64), "fields; at most"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
@pytest.mark.parametrize("arrays", ["all", "none"])
def test_gguf_headers_that_lie(tmp_path: Path, data: bytes, message: str, arrays: Any) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(QuireError, match=message) as error:
        read_header(path, arrays=arrays)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"general.architecture": (4, struct.pack("<I", 5))}, "general.architecture is 5, expected text"),
        ({"split.count": (8, text("x"))}, "split.count is 'x', expected a whole number"),
        ({"llama.block_count": (4, struct.pack("<I", 1 << 31))}, "layer_count is 2147483648, expected at most"),
        ({"llama.block_count": (6, struct.pack("<f", 1.0))}, r"block_count is 1\.0, expected a whole number"),
        ({"llama.context_length": (10, struct.pack("<Q", 1 << 40))}, "context_length is .*, expected at most"),
        ({"llama.rope.freq_base": (6, struct.pack("<f", float("inf")))}, r"rope\.freq_base is inf, expected a number"),
        ({"llama.rope.scaling.type": (8, text("linear"))}, r"rope\.scaling\.factor is missing"),
        ({"llama.attention.layer_norm_rms_epsilon": (6, bytes(4))}, "norm_epsilon is 0.0, expected a number above 0"),
        ({"tokenizer.ggml.eos_token_id": (8, text("2"))}, "eos_token_id is '2', expected token ids"),
        ({"tokenizer.ggml.bos_token_id": (5, struct.pack("<i", -1))}, "bos_token_id is -1, expected token ids"),
    ],
    ids=str,
)
def test_gguf_metadata_of_other_types(whole: Path, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    data = write_gguf(tmp_path / "m.gguf", whole).read_bytes()
    added = b""
    for name, (kind, value) in fields.items():
        data = data.replace(text(name), text(name[:-1] + "_"))  # a field that nobody asks for
        added += field(name, kind, value)
    room = -(len(added) + len(field("filler", 8, text("")))) % 32  # tensors lie at multiples of 32
    added += field("filler", 8, text("x" * room))
    count = struct.unpack_from("<Q", data, 16)[0]
    (tmp_path / "m.gguf").write_bytes(data[:16] + struct.pack("<Q", count + len(fields) + 1) + added + data[24:])
    refused(tmp_path / "m.gguf", message)


@pytest.mark.parametrize("factors", [(0.0,) * 8, (float("nan"),) * 8])
def test_rope_factors_that_are_no_numbers(whole: Path, tmp_path: Path, factors: tuple[float, ...]) -> None:
    refused(
        write_gguf(tmp_path / "m.gguf", whole, rope_factors=np.array(factors, np.float32)), "must be numbers above 0"
    )


def test_one_tensor_under_two_names(whole: Path, tmp_path: Path) -> None:
    data = write_gguf(tmp_path / "m.gguf", whole).read_bytes()
    (tmp_path / "m.gguf").write_bytes(data.replace(text("blk.0.attn_k.weight"), text("blk.00.attn_q.weight")))
    refused(tmp_path / "m.gguf", r"cannot be read|occurs twice")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (9, r"tensor layers\.0\.up has format Q8_1, which cannot be dequantized"),
        (24, r"tensor layers\.0\.up has format I8, which cannot be dequantized"),
        (12, r"tensor blk\.0\.ffn_up\.weight: 32 columns are no multiple of the Q4_K block of 256"),
        (99, r"tensor blk\.0\.ffn_up\.weight \[64, 32\]: ggml type 99 is not known"),
    ],
)
def test_types_that_are_no_weights(whole: Path, tmp_path: Path, kind: int, message: str) -> None:
    """Known types that cannot be read are named with the tensor, and so are rows that hold no whole block."""
    data = write_gguf(tmp_path / "m.gguf", whole).read_bytes()
    info = tensor("blk.0.ffn_up.weight", (64, 32), F32, 0)[:-8]  # but for the offset
    assert data.count(info) == 1
    (tmp_path / "m.gguf").write_bytes(data.replace(info, info[:-4] + struct.pack("<I", kind)))
    refused(tmp_path / "m.gguf", message)
