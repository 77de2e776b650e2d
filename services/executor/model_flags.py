"""Flags of the commands that load a model into their own process: which model, and how it is computed."""

from __future__ import annotations

import argparse
from typing import get_args

from services.executor.settings import BackendName, Dtype, InstructionSet, KvFormatName

BACKENDS, DTYPES, KV_FORMATS = get_args(BackendName), get_args(Dtype), get_args(KvFormatName)
INSTRUCTION_SETS = get_args(InstructionSet)
SOURCE_HELP = "folder, .gguf file, hub id or catalogue entry"


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --model and what `add_compute_flags` adds."""
    parser.add_argument("--model", default="smollm2", help=SOURCE_HELP)
    add_compute_flags(parser)


def add_compute_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --backend, --dtype, --kv-format and --instruction-set."""
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="what computes")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="number format of weights")
    parser.add_argument("--kv-format", choices=KV_FORMATS, default="auto", help="number format of keys and values")
    parser.add_argument(
        "--instruction-set", choices=INSTRUCTION_SETS, default="auto", help="what the cpu backend uses of this CPU"
    )
