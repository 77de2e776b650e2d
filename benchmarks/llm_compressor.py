"""Quantizes a model with llm-compressor, on the samples that Quire takes of a text: to compare both.

The model's tokenizer is one that adds no first token. It runs in an environment of its own, where nothing of Quire is
installed:

    python -m venv peer && peer/bin/pip install llmcompressor
    peer/bin/python benchmarks/llm_compressor.py quantized/reference quantized/calibration.txt quantized/peer-gptq-4-sym
    python -m benchmarks.quantization --text TEXT --work quantized --only gptq-4-sym --also quantized/peer-gptq-4-sym
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.quantization import GPTQModifier
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> int:
    options = _parser().parse_args()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    samples = cut(tokenizer, options.text.read_text(encoding="utf-8"), options.samples, options.context)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    rows = [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in samples]
    started = time.monotonic()
    oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_list(rows),
        recipe=recipe(options),
        max_seq_length=options.context,
        num_calibration_samples=len(samples),
        shuffle_calibration_samples=False,
    )
    print(f"{options.method} in {time.monotonic() - started:.0f} s on {len(samples)} samples", file=sys.stderr)
    model.to(torch.bfloat16).save_pretrained(options.out, save_compressed=True)
    tokenizer.save_pretrained(options.out)
    return 0


def cut(tokenizer: Any, text: str, count: int, context: int) -> np.ndarray:
    """Samples [at most count, context]: those of `services.executor.quantize.calibration`."""
    ids = np.array(tokenizer(text[: count * context * 32], add_special_tokens=False)["input_ids"], np.int32)
    whole = len(ids) // context
    chosen = np.unique(np.linspace(0, whole - 1, min(count, whole)).round().astype(np.int64))
    return ids[: whole * context].reshape(whole, context)[chosen]


def recipe(options: argparse.Namespace) -> Any:
    """A modifier for all matrices but the head."""
    weights = QuantizationArgs(
        num_bits=options.bits, type="int", symmetric=options.symmetric, strategy="group", group_size=options.group_size
    )
    groups = {"matrices": QuantizationScheme(targets=["Linear"], weights=weights)}
    if options.method == "awq":
        return AWQModifier(config_groups=groups, ignore=["lm_head"])
    return GPTQModifier(config_groups=groups, ignore=["lm_head"], actorder="group" if options.act_order else None)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a folder in Hugging Face's layout")
    parser.add_argument("text", type=Path, help="calibrates; UTF-8")
    parser.add_argument("out", type=Path, help="folder of the checkpoint")
    parser.add_argument("--method", choices=("gptq", "awq"), default="gptq")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--asymmetric", dest="symmetric", action="store_false")
    parser.add_argument("--act-order", action="store_true")
    parser.add_argument("--samples", type=int, default=128, help="of the text (default: 128)")
    parser.add_argument("--context", type=int, default=512, help="tokens a sample (default: 512)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
