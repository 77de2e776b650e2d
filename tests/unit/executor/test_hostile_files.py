"""Files that were damaged or made to harm: refused with a message that says what and where, and never run."""

import json
import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import QuireError, Reason
from services.executor.models.checkpoint import open_checkpoint
from services.executor.models.dequantize import to_float32
from services.executor.models.outline import read_outline
from services.executor.models.safetensors_file import SafetensorsFile
from services.executor.models.weights import load_failed
from tests.fixtures.damage import MarkerPickle, damage, marker_of
from tests.fixtures.gguf_files import write_gguf
from tests.fixtures.models import make_rand_model
from tests.fixtures.quantized import edit_config
from tests.fixtures.shards import split_in_shards

SERVICES = Path(__file__).resolve().parents[3] / "services"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_rand_model(tmp_path_factory.mktemp("whole") / "m", layers=1, hidden=32, heads=2, kv_heads=1,
                           intermediate=64)  # fmt: skip


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "m"))


def refused(path: Path, message: str) -> None:
    with pytest.raises(QuireError, match=message) as error:
        open_checkpoint(path)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


# Pickles


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth"])
def test_a_pickle_is_refused_by_name(folder: Path, name: str) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(pickle.dumps(MarkerPickle(marker_of(folder))))
    refused(folder, f"neither model.safetensors nor its index; {name} may run code when it is opened")
    assert not marker_of(folder).exists()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_pickle_under_another_name_is_not_loaded(folder: Path, name: str) -> None:
    (folder / name).write_bytes(pickle.dumps(MarkerPickle(marker_of(folder))))
    refused(folder, rf"{re.escape(name)}(:| cannot be read)")
    assert not marker_of(folder).exists()


def test_the_pickle_of_these_tests_would_be_seen(folder: Path) -> None:
    pickle.loads(pickle.dumps(MarkerPickle(marker_of(folder))))
    assert marker_of(folder).is_dir()


def test_no_service_can_unpickle() -> None:
    loads = re.compile(
        r"(import|from) +(_?c?pickle|dill|joblib|shelve|marshal|cloudpickle)\b"
        r"|(torch|np|numpy|pickle|marshal)\.loads?\b|allow_pickle|weights_only|read_pickle"
    )
    files = sorted(SERVICES.rglob("*.py"))
    assert len(files) > 100
    assert [str(path) for path in files if loads.search(path.read_text(encoding="utf-8"))] == []


# safetensors headers


def header_of(*tensors: tuple[Any, Any, Any]) -> bytes:
    """Of tensors a, b, ...: dtype, shape, offsets."""
    entries = {chr(97 + at): {"dtype": d, "shape": s, "data_offsets": o} for at, (d, s, o) in enumerate(tensors)}
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("header", "size", "message"),
    [
        (header_of(("F32", [2], [0, 8]), ("F32", [2], [4, 12])), 12, r"tensor b \[2\] F32 begins at 4, expected 8"),
        (header_of(("F32", [2], [0, 8]), ("F32", [2], [0, 8])), 8, "begins at 0, expected 8, where tensor a ends"),
        (header_of(("F32", [2], [0, 8]), ("F32", [2], [12, 20])), 20, "begins at 12, expected 8"),
        (header_of(("F32", [2], [4, 12])), 12, "begins at 4, expected 0, where the header ends"),
        (header_of(("F32", [2], [0, 8])), 9, "1 bytes behind the last tensor belong to none"),
        (header_of(("F32", [2], [0, 8])), 7, r"tensor a \[2\] F32 lies beyond the end"),
        (header_of(("F32", [3], [0, 8])), 8, r"tensor a \[3\] F32 does not fill its 8 bytes"),
        (header_of(("F32", [1 << 47, 1 << 47], [0, 8])), 8, "does not fill"),
        (header_of(("F32", [2], [8, 0])), 8, "tensor a is not described"),
        (header_of(("F32", [-2], [0, 8])), 8, "tensor a is not described"),
        (header_of(("F32", [2.0], [0, 8])), 8, "tensor a is not described"),
        (header_of(("F32", ["2"], [0, 8])), 8, "tensor a is not described"),
        (header_of(("F32", "2", [0, 8])), 8, "tensor a is not described"),
        (header_of(("F32", [True, 2], [0, 8])), 8, "tensor a is not described"),
        (header_of(("F32", [10**4000, 0], [0, 0])), 0, "tensor a is not described"),
        (header_of(("F32", [1] * 9, [0, 4])), 4, "tensor a is not described"),
        (header_of((7, [2], [0, 8])), 8, "tensor a is not described"),
        (header_of(("F32", [2], [0, 4, 8])), 8, "tensor a is not described"),
        (header_of(("F32", [2], {"0": 0, "8": 8})), 8, "tensor a is not described"),
        (b'{"a": 1, "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}', 8, "'a' occurs twice"),
        (b'{"a": {"dtype": "F32", "dtype": "F16", "shape": [2], "data_offsets": [0, 8]}}', 8, "'dtype' occurs twice"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, 0, "the header cannot be read"),
        (b"\xff\xfe{}", 0, "the header cannot be read"),
    ],
    ids=str,
)  # fmt: skip
def test_safetensors_headers_that_lie(tmp_path: Path, header: bytes, size: int, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(size))
    with pytest.raises(QuireError, match=message) as error:
        SafetensorsFile(path)
    assert error.value.reason is Reason.MODEL_LOAD_FAILED


def test_empty_tensors_lie_between_others(tmp_path: Path) -> None:
    header = header_of(("F32", [2], [0, 8]), ("F32", [0, 3], [8, 8]), ("F32", [1], [8, 12]))
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    assert SafetensorsFile(path).entries["b"] == ("F32", (0, 3), 8, 8)


# Configs and indices


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 10**9}, "layer_count is 1000000000, expected at most"),
        ({"max_position_embeddings": 1 << 40}, "context_length is .*, expected at most"),
        ({"head_dim": 1 << 20}, "head_size is .*, expected at most"),
        ({"hidden_size": 10**400}, "hidden_size is 1000.*, expected a whole number"),
        ({"hidden_size": 32.0}, r"hidden_size is 32\.0, expected a whole number"),
        ({"vocab_size": True}, "vocab_size is True, expected a whole number"),
        ({"num_key_value_heads": "x"}, "num_key_value_heads is 'x', expected a whole number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*, expected a number"),
        ({"rms_norm_eps": -1.0}, "norm_epsilon is -1.0, expected a number above 0"),
        ({"rope_theta": 0}, "rope_theta is 0.0, expected a number above 0"),
        ({"rope_scaling": ["linear"]}, "rope_scaling is .'linear'., expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing, expected a number"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "rope scaling linear: factors and lengths must be"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4,
                           "original_max_position_embeddings": 64}}, r"frequency factors 4\.0 and 4\.0"),
        ({"eos_token_id": ["x"]}, "eos_token_id is .'x'., expected token ids"),
        ({"eos_token_id": -1}, "eos_token_id is -1, expected token ids"),
        ({"bos_token_id": [[1]]}, "bos_token_id is .*, expected token ids"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false', expected true or false"),
        ({"hidden_act": ["silu"]}, "hidden_act is .*, expected text"),
        ({"sliding_window": "all"}, "sliding_window is 'all', expected a whole number"),
        ({"partial_rotary_factor": {}}, "partial_rotary_factor is {}, expected a number"),
        ({"architectures": {"0": "LlamaForCausalLM"}}, "architecture none"),
        ({"model_type": 3}, "model_type is 3, expected text"),
        ({"quantization_config": [4]}, r"quantization_config is \[4\], expected an object"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_configs_of_other_types(folder: Path, values: dict[str, Any], message: str) -> None:
    edit_config(folder, **values)
    refused(folder, message)


@pytest.mark.parametrize("depth", [40, 900, 100_000])
def test_configs_without_a_ground(folder: Path, depth: int) -> None:
    (folder / "config.json").write_text('{"quantization_config":' * depth + "1" + "}" * depth)
    refused(folder, r"config\.json cannot be read: ")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX, "model.safetensors"])
def test_pipes_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    refused(folder, "no plain file|holds neither")


def test_a_pipe_is_no_gguf_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    refused(tmp_path / "m.gguf", "neither a model folder nor a .gguf file")
    with pytest.raises(QuireError, match="neither a folder nor a file"):
        read_outline(str(tmp_path / "m.gguf"))


def test_texts_beyond_all_measure_are_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 40)
    refused(folder, "has more than 64 MiB")


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ([["a", "b"]], "no index of weights"),
        ({"a": 3}, "no index of weights"),
        ({"a": ["model.safetensors"]}, "no index of weights"),
        (None, "no index of weights"),
        ({"a": "../m/model.safetensors"}, "lies outside the folder"),
        ({"a": "/etc/passwd"}, "lies outside the folder"),
        ({"a": "x/../model.safetensors"}, "lies outside the folder"),
        ({"a": "..\\model.safetensors"}, "lies outside the folder"),
        ({"a": "model.safetensors\0"}, "is no name of a file"),
        ({"a": ".."}, "is no name of a file"),
        ({"a": "."}, "is no name of a file"),
        ({"a": ""}, "is no name of a file"),
        ({"a": "\ud800"}, "which is missing"),
        ({"a": "x" * 5000}, "is no name of a file"),
    ],
    ids=lambda value: ascii(value)[:60],
)
def test_indices_that_lead_elsewhere(folder: Path, places: Any, message: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    refused(folder, message)
    if "missing" not in message:  # where shards are missing, a plan goes by the index
        with pytest.raises(QuireError, match=message):
            read_outline(str(folder))


def test_layer_numbers_of_many_digits_are_names_like_others(folder: Path) -> None:
    header, data = parts_of(folder / "model.safetensors")
    for number in ("0" * 5000, "9" * 5000, "\N{ARABIC-INDIC DIGIT ZERO}"):
        edited = header.replace("layers.0.mlp.up_proj", f"layers.{number}.mlp.up_proj")
        write_safetensors(folder / "model.safetensors", edited, data)
        refused(folder, r"tensor layers\.0\.up \[64, 32\] is missing")


def parts_of(path: Path) -> tuple[str, bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end].decode(), data[end:]


def write_safetensors(path: Path, header: str, data: bytes) -> None:
    text = header.encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_messages_stay_short_and_printable() -> None:
    message = load_failed("tensor \ud800\x1b[2J\n" + "a" * 10**6).message
    assert message.startswith("tensor \\ud800\\x1b[2J\\naaa")
    assert len(message.encode()) < 2000


# Anything


@pytest.mark.parametrize("case", range(120))
def test_damaged_files_load_or_are_refused(whole: Path, tmp_path: Path, case: int) -> None:
    """A few of the cases that tools/fuzz_models.py goes through by the hundred thousand."""
    draw = random.Random(f"unit {case}")
    folder = tmp_path / "m"
    match case % 3:
        case 0:
            shutil.copytree(whole, folder)
        case 1:
            split_in_shards(Path(shutil.copytree(whole, folder)), 2)
        case _:
            folder.mkdir()
            write_gguf(folder / "model.gguf", whole)
    damage(folder, draw)
    path = folder / "model.gguf" if case % 3 == 2 else folder
    found: QuireError | None = None
    try:
        checkpoint = open_checkpoint(path)
        for name in checkpoint.shapes():
            to_float32(checkpoint.tensor(name))
    except QuireError as error:
        found = error
    assert found is None or (found.reason is Reason.MODEL_LOAD_FAILED and len(found.message.encode()) < 4000)
    assert not marker_of(folder).exists()
