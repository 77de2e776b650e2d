"""The torch backend against transformers' `generate`: the same weights, the same process, alternating rounds.

    python -m benchmarks.transformers_peer --model smollm2 --dtype bf16 --batch 1,32 --rounds 3

The model's weights are written once, dequantized, as a Hugging Face folder, which both sides load. Nothing else should
run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from services.executor.openmp import yield_soon


def dequantized_folder(source: str, out: Path, dtype: Any) -> Path:
    """The model as a Hugging Face folder without quantization."""
    import torch
    from safetensors.torch import save_file

    from services.executor.models.checkpoint import open_checkpoint
    from services.executor.models.dequantize import to_float32
    from services.executor.models.source import resolve
    from services.executor.models.weights import expected_shapes
    from services.executor.quantize.hf_files import model_files
    from services.executor.quantize.hf_names import plain_name

    path = resolve(source)
    if path.is_dir():
        return path
    checkpoint = open_checkpoint(path)
    out.mkdir(parents=True, exist_ok=True)
    for name, content in model_files(path, checkpoint.spec, "BF16", {}).items():
        (out / name).write_bytes(content)
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {
        plain_name(name): torch.from_numpy(to_float32(checkpoint.tensor(name))).to(dtype)
        for name in expected_shapes(checkpoint.spec)
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


class Peer:
    """transformers' own greedy generation of random prompts."""

    def __init__(self, folder: Path, dtype: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        config = self.model.generation_config
        config.eos_token_id, config.pad_token_id = None, 0

    def rates(self, batch: int, prompt: int, output: int) -> tuple[float, float]:
        """Prefill and decode tokens per second."""
        import torch

        ids = torch.randint(100, self.model.config.vocab_size - 1, (batch, prompt))

        def seconds(new: int) -> float:
            started = time.perf_counter()
            with torch.inference_mode():
                self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False)
            return time.perf_counter() - started

        prefill = seconds(1)
        return batch * prompt / prefill, batch * (output - 1) / (seconds(output) - prefill)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="what `quire up --model` takes")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"), help="number format of both sides")
    parser.add_argument("--batch", default="1,32", help="batch sizes, with commas")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens per sequence")
    parser.add_argument("--output", type=int, default=32, help="output tokens per sequence")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, each side once per round")
    parser.add_argument("--threads", type=int, default=2, help="threads of both sides")
    args = parser.parse_args()
    yield_soon()
    import torch

    from services.executor.batch import StepLimits
    from services.executor.bench import measure
    from services.executor.loader import make_loader
    from services.executor.settings import ExecutorSettings

    torch.set_num_threads(args.threads)
    batches = [int(part) for part in args.batch.split(",")]
    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    blocks = max(batches) * -(-(args.prompt + args.output) // 32)
    with tempfile.TemporaryDirectory() as scratch:
        folder = dequantized_folder(args.model, Path(scratch), dtype)
        wanted = {"model": str(folder), "backend": "torch", "dtype": args.dtype, "threads": args.threads}
        ours = make_loader(ExecutorSettings.model_validate(wanted | {"kv_blocks": blocks}))("", str(folder))
        peer = Peer(folder, dtype)
    limits = StepLimits(max(batches), 512)
    points = []
    print(f"{args.dtype}, {args.threads} threads, medians of {args.rounds} rounds, tokens per second", file=sys.stderr)
    for batch in batches:
        measure(ours, limits, batch, args.prompt, 4)
        peer.rates(batch, args.prompt, 3)
        rounds = []
        for _ in range(args.rounds):
            point = measure(ours, limits, batch, args.prompt, args.output)
            rounds.append((point.prefill_tok_s, point.decode_tok_s, *peer.rates(batch, args.prompt, args.output)))
        prefill, decode, their_prefill, their_decode = (
            statistics.median(column) for column in zip(*rounds, strict=True)
        )
        points.append(
            {
                "batch": batch,
                "prefill_tok_s": round(prefill, 1),
                "decode_tok_s": round(decode, 1),
                "peer_prefill_tok_s": round(their_prefill, 1),
                "peer_decode_tok_s": round(their_decode, 1),
                "decode_ratio": round(statistics.median(r[1] / r[3] for r in rounds), 3),
                "prefill_ratio": round(statistics.median(r[0] / r[2] for r in rounds), 3),
            }
        )
        print(points[-1], file=sys.stderr, flush=True)
    print(json.dumps({"model": args.model, "dtype": args.dtype, "points": points}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
