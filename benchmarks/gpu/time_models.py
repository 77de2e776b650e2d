"""Whole models: decoding alone and in batches, beside the weights' bandwidth and beside transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.measure import wall_seconds
from benchmarks.gpu.models import on_cuda, random_weights, weight_bytes
from benchmarks.gpu.report import Row
from benchmarks.gpu.runs import Run
from benchmarks.gpu.setting import Setting
from services.executor.backends.base import Backend
from services.executor.backends.cuda.backend import StepSizes
from services.executor.models.spec import ModelSpec

BITS = {"plain": 16.0, "int4": 4.125, "fp8": 8.0}
"""Of a number of the layers, scales included."""
WARM_UP = 2


def time_large_alone(setting: Setting, ceilings: Ceilings) -> Iterator[Row]:
    """One sequence of the large model in each format, and how much of a step the card is idle."""
    spec = setting.large
    weights = random_weights(spec, setting.torch_dtype, setting.place)
    context = min(setting.sized(512, 6), spec.context_length // 2)
    for format_, bits in BITS.items():
        sizes = StepSizes(sequences=1, tokens=256)
        backend = on_cuda(spec, weights, setting.device, dtype=setting.dtype, format_=format_, sizes=sizes)
        step = _decode_seconds(setting, backend, 1, context)
        bits = max(bits, 8.0 * setting.torch_dtype.itemsize) if format_ == "plain" else bits
        least = weight_bytes(spec, setting.torch_dtype, bits) / ceilings.bytes_per_second
        yield Row(f"one sequence, {format_}", 1 / step, "tok/s")
        yield Row(f"one sequence, {format_}: weights' time", least / step, "of step", 0.70)
        if format_ == "plain":
            captured = setting.clock.seconds(backend.captured_step(1, 1, context))
            yield Row("idle between steps", max(0.0, 1 - captured / step), "of step", 0.03, "at most")
        del backend


def time_large_batch(setting: Setting) -> Iterator[Row]:
    """The batch that a busy server has, beside transformers' continuous batching."""
    spec, batch = setting.large, setting.batch
    weights = random_weights(spec, setting.torch_dtype, setting.place)
    room = setting.context + setting.steps + WARM_UP
    blocks = batch * (-(-room // 16))
    sizes = StepSizes(sequences=batch, tokens=512)
    backend = on_cuda(spec, weights, setting.device, dtype=setting.dtype, sizes=sizes, blocks=blocks)
    ours = batch / _decode_seconds(setting, backend, batch, setting.context)
    yield Row(f"{batch} sequences of {setting.context}", ours, "tok/s")
    del backend, weights
    theirs = _continuous_batching(setting, spec, batch)
    yield Row("transformers' continuous batching", theirs, "tok/s")
    yield Row("beside it", ours / theirs, "x", 5.0)


def time_small(setting: Setting) -> Iterator[Row]:
    """The small model alone, beside transformers' generate."""
    spec = setting.small
    weights = random_weights(spec, setting.torch_dtype, setting.place)
    sizes = StepSizes(sequences=1, tokens=256)
    backend = on_cuda(spec, weights, setting.device, dtype=setting.dtype, sizes=sizes)
    ours = 1 / _decode_seconds(setting, backend, 1, setting.sized(128, 6))
    yield Row("one sequence", ours, "tok/s")
    model = _transformers_model(setting, spec)
    ids = torch.randint(0, spec.vocab_size, (1, 16), device=setting.place)

    def generate(count: int) -> Callable[[], object]:
        options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        return lambda: model.generate(ids, attention_mask=torch.ones_like(ids), **options)

    generate(2)()
    count = setting.sized(64, 2)
    theirs = count / wall_seconds(generate(count), lambda: _wait(setting))
    yield Row("transformers, eager", theirs, "tok/s")
    yield Row("beside it", ours / theirs, "x", 15.0)


def _decode_seconds(setting: Setting, backend: Backend, sequences: int, context: int) -> float:
    """Of one step, in a row of them."""
    steps = setting.steps
    prompts = [[(7 * i + j) % backend.spec.vocab_size for j in range(context)] for i in range(sequences)]
    run = Run(backend, 16, prompts, context + steps + WARM_UP)
    run.prefill(256)
    run.decode(setting.sized(WARM_UP))
    return wall_seconds(lambda: run.decode(steps), lambda: _wait(setting)) / steps


def _transformers_model(setting: Setting, spec: ModelSpec) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.layer_count, num_attention_heads=spec.head_count,
        num_key_value_heads=spec.kv_head_count, head_dim=spec.head_size,
        max_position_embeddings=spec.context_length, tie_word_embeddings=spec.tied_embeddings,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(setting.torch_dtype)
    try:
        with setting.place:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _continuous_batching(setting: Setting, spec: ModelSpec, batch: int) -> float:
    """Output tokens per second of transformers' paged continuous batching, of plain batches on a CPU.

    What one token takes, and with it prompts and preparations, is taken off. RuntimeError where it fails.
    """
    from transformers import GenerationConfig

    model = _transformers_model(setting, spec)
    prompts = [[(7 * i + j) % spec.vocab_size for j in range(setting.context)] for i in range(batch)]
    ids = torch.tensor(prompts, device=setting.place)

    def generate(count: int) -> None:
        options = {"max_new_tokens": count, "do_sample": False, "pad_token_id": 0}
        if setting.place.type == "cpu":
            model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, **options)
            return
        found = model.generate_batch(inputs=prompts, generation_config=GenerationConfig(eos_token_id=-1, **options))
        # It tells of its own faults in a log alone.
        if [len(one.generated_tokens) for one in found.values()] != [count] * batch:
            raise RuntimeError("transformers' continuous batching failed; its log says why")

    generate(1)
    first, all_ = (wall_seconds(lambda: generate(count), lambda: _wait(setting)) for count in (1, setting.steps + 1))  # noqa: B023
    if setting.place.type == "cuda" and all_ <= first:
        raise RuntimeError(f"transformers' continuous batching takes {all_} s, and {first} s for one token")
    return batch * setting.steps / max(all_ - first, 1e-9)


def _wait(setting: Setting) -> None:
    if setting.place.type == "cuda":
        torch.cuda.synchronize()
