"""Prefill and decode rates of OpenVINO GenAI's continuous batching. Usage: openvino_driver.py MODEL.gguf LOAD"""

import random
import time

import openvino
import openvino_genai
from rates import arguments, rates, report

WORDS = "river stone house light music garden window paper train ocean mountain letter".split()  # noqa: SIM905


def main() -> None:
    model, load = arguments()
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB of KV
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = False
    pipeline = openvino_genai.LLMPipeline(
        model, "CPU", scheduler_config=scheduler, INFERENCE_NUM_THREADS=load["threads"]
    )
    tokenizer = pipeline.get_tokenizer()
    draw = random.Random(0)

    def text(tokens: int) -> str:
        """A prompt of exactly so many tokens, or an error: each of the words is one."""
        words = " " + " ".join(draw.choice(WORDS) for _ in range(tokens))
        found = tokenizer.encode(words).input_ids.shape[1]
        if found != tokens:
            raise ValueError(f"{tokens} words became {found} tokens")
        return words

    def seconds(batch: int, prompt: int, new: int) -> float:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = new
        config.ignore_eos, config.do_sample, config.apply_chat_template = True, False, False
        prompts = [text(prompt) for _ in range(batch)]
        started = time.perf_counter()
        pipeline.generate(prompts, config)
        return time.perf_counter() - started

    capabilities = openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    report(rates(seconds, load), {"capabilities": " ".join(capabilities)})


if __name__ == "__main__":
    main()
