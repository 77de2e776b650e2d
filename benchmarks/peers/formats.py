"""One model in the formats that peers read, all made from the catalogue's own file, once."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from benchmarks.peers.places import models_folder
from benchmarks.peers.processes import run
from services.executor.models.source import resolve

MODEL = "smollm2"
OWN_FORMAT = "Q4_1"  # of the catalogue's file
CONVERT_SECONDS = 600.0


def gguf(weights: str, quantizer: Path, threads: int) -> Path:
    """The model as a GGUF file with these weights; `quantizer` is llama.cpp's llama-quantize."""
    own = resolve(MODEL)
    if weights == OWN_FORMAT:
        return own
    target = models_folder() / f"{MODEL}.{weights}.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_suffix(".partial")
        command: list[str | Path] = [quantizer, "--allow-requantize", own, fresh, weights, str(threads)]
        run(command, target.with_suffix(".log"), CONVERT_SECONDS)
        os.replace(fresh, target)
    return target


def bf16_folder() -> Path:
    """The model's weights, dequantized to bf16, as a Hugging Face folder. Raises PeerError where that fails."""
    target = models_folder() / f"{MODEL}-bf16"
    if not target.exists():
        models_folder().mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(f"{target.name}.partial")
        shutil.rmtree(fresh, ignore_errors=True)
        # In a process of its own: this one needs neither torch nor transformers.
        code = (
            "import pathlib, sys, torch; from benchmarks.transformers_peer import dequantized_folder; "
            "dequantized_folder(sys.argv[1], pathlib.Path(sys.argv[2]), torch.bfloat16)"
        )
        run([sys.executable, "-c", code, MODEL, fresh], target.with_suffix(".log"), CONVERT_SECONDS)
        os.replace(fresh, target)
    return target
