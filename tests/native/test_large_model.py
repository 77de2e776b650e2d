"""A model of 1.1 billion random weights: it loads within its packed size, runs, and starts again from the cache."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

VOCABULARY, HIDDEN, INNER, LAYERS, HEADS, KV_HEADS = 32000, 2048, 5632, 22, 32, 4
_BLOCK = 18  # bytes of 32 weights as Q4_0

_LOAD_AND_STEP = """
import json, sys
from pathlib import Path
import numpy as np

def anonymous():
    return int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0]) << 10

from services.executor.backends.base import KvShape, SampleRow, SamplingRule, StepInputs
from services.executor.backends.cpu.backend import CpuBackend
from services.executor.models.checkpoint import open_checkpoint
before = anonymous()
backend = CpuBackend.load(open_checkpoint(Path(sys.argv[1])), threads=2)
loaded = anonymous()
backend.allocate_kv(KvShape(32, backend.kv_block_bytes(32), 8))
ids = np.arange(1, 41, dtype=np.int32)
inputs = StepInputs(ids, np.arange(40, dtype=np.int32), np.array([0, 40], np.int32), np.array([40], np.int32),
                    np.array([[3, 5]], np.int32), [SampleRow(39, SamplingRule(temperature=0.0), (), ())])
outputs = backend.step(inputs)
print(json.dumps({"token": outputs.sampled[0].token_id, "added": loaded - before,
                  "modules": [name for name in ("torch", "transformers") if name in sys.modules]}))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    random = np.random.default_rng(0)

    def matrix(name: str, rows: int, columns: int) -> None:
        blocks = random.integers(0, 256, (rows, columns // 32, _BLOCK), np.uint8)
        blocks[..., :2] = np.full(1, 0.02 / np.sqrt(columns / 2048), np.float16).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def vector(name: str) -> None:
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))

    matrix("token_embd.weight", VOCABULARY, HIDDEN)
    matrix("output.weight", VOCABULARY, HIDDEN)
    vector("output_norm.weight")
    for layer in range(LAYERS):
        at = f"blk.{layer}."
        vector(at + "attn_norm.weight")
        vector(at + "ffn_norm.weight")
        matrix(at + "attn_q.weight", HIDDEN, HIDDEN)
        matrix(at + "attn_k.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        matrix(at + "attn_v.weight", HIDDEN * KV_HEADS // HEADS, HIDDEN)
        matrix(at + "attn_output.weight", HIDDEN, HIDDEN)
        matrix(at + "ffn_gate.weight", INNER, HIDDEN)
        matrix(at + "ffn_up.weight", INNER, HIDDEN)
        matrix(at + "ffn_down.weight", HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _load_and_step(model: Path, derived: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD_AND_STEP, str(model)],
        env={**os.environ, "QUIRE_DERIVED": str(derived)},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_model_of_a_billion_weights(model: Path, tmp_path: Path) -> None:
    first = _load_and_step(model, tmp_path)
    packed = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    again = _load_and_step(model, tmp_path)
    assert packed > 600e6  # 1.1e9 weights at 4.5 bits
    assert 0 <= first["token"] < VOCABULARY
    assert again["token"] == first["token"]
    assert first["modules"] == again["modules"] == []
    # The weights lie in the cache file; what is left is the interpreter's and the packing's own.
    assert first["added"] <= 0.15 * packed
    assert again["added"] <= 0.05 * packed
