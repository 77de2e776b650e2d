"""Prefill and decode rates of vLLM's CPU engine, in one process. Usage: vllm_driver.py HF_FOLDER LOAD"""

import random
import time

import torch
from rates import arguments, rates, report
from vllm import LLM, SamplingParams


def main() -> None:
    model, load = arguments()
    engine = LLM(model=model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False)
    draw = random.Random(0)

    def seconds(batch: int, prompt: int, new: int) -> float:
        prompts = [{"prompt_token_ids": [draw.randint(100, 40000) for _ in range(prompt)]} for _ in range(batch)]
        sampling = SamplingParams(temperature=0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - started

    figures = rates(seconds, load)
    report(figures, {"torch": torch.__version__, "instruction set": torch.backends.cpu.get_cpu_capability()})


if __name__ == "__main__":
    main()
