"""What does structured output cost? Tokens a second with a schema against without, and what compiling takes.

    python -m benchmarks.structured --batch 32 --rounds 5

The engine runs in this process; nothing else should run meanwhile. Each round decodes the same prompts freely and under
a schema that lets them go on, greedily and drawn, in turn. CPU time of masks and of compiling is this process's own, so
it is true on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from quire.v1 import executor_pb2
from quire.v1.types_pb2 import Constraint
from services.executor.backends.base import SamplingRule
from services.executor.batch import StepLimits
from services.executor.bench_loop import BenchLoop, greedy_sequence
from services.executor.grammar.grammars import Grammars
from services.executor.grammar.guide import Guide
from services.executor.loader import LoadedModel, make_loader
from services.executor.sequences import Ending
from services.executor.sequences import Sequence as Guided
from services.executor.settings import ExecutorSettings
from services.executor.warmup import warm_up
from services.gateway.tokenizer import ModelTokenizer

BAR_RATE, BAR_COMPILE = 0.95, 0.2  # of the free rate; seconds of a 10 kB schema
BLOCK, STEP_TOKENS = 32, 512
TEXT = "Write a JSON list of {} people, each with a name, an age, a city and tags.\n"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
SHORT = PERSON | {"properties": PERSON["properties"] | {"name": {"type": "string", "maxLength": 24}}}  # type: ignore[operator]
SCHEMAS = {
    name: json.dumps({"type": "array", "items": of, "minItems": 1000})
    for name, of in (("plain", PERSON), ("bounded", SHORT))
}
"""Arrays too long to end; short bounds of strings are what costs masks most."""


def large_schema(title: str, size: int = 10_000) -> Constraint:
    """Of about so many bytes, with all that schemas are made of."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 40, "description": "free text"},
        {"type": "integer", "minimum": 0, "maximum": 1000},
        {"type": "array", "items": PERSON, "maxItems": 5},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
        {"anyOf": [{"type": "null"}, {"type": "string", "format": "date-time"}]},
    ]
    properties: dict[str, Any] = {}
    schema = {"type": "object", "title": title, "properties": properties, "additionalProperties": False}
    while len(text := json.dumps(schema)) < size:
        properties[f"field_{len(properties)}"] = kinds[len(properties) % len(kinds)]
    return Constraint(json_schema=text)


def settled(grammars: Grammars, rule: Constraint) -> Guide:
    done = threading.Event()
    grammars.start(done.set)
    guide = grammars.guide(rule, frozenset(), [])
    done.wait()
    if guide.error is not None:
        raise guide.error
    return guide


def load(model: str, batch: int, length: int) -> LoadedModel:
    settings = {"block_size": BLOCK, "kv_blocks": batch * -(-length // BLOCK), "max_sequences": batch}
    loaded = make_loader(ExecutorSettings.model_validate(settings))(model, model)
    warm_up(loaded.backend, loaded.shape, STEP_TOKENS, length)
    return loaded


def decode(
    model: LoadedModel, prompts: list[list[int]], tokens: int, temperature: float, rule: Constraint | None
) -> tuple[float, list[list[int]]]:
    """Output tokens a second, and the output; the first token and the prompt are not timed."""
    loop = BenchLoop(model, StepLimits(len(prompts), STEP_TOKENS))
    entering = []
    for number, prompt in enumerate(prompts, 1):
        one = greedy_sequence(number, prompt, max(map(len, prompts)) + tokens, tokens, BLOCK)
        one.sampling.temperature, one.sampling.top_p = temperature, 0.95
        if rule is not None:
            one.constraint.CopyFrom(rule)
        entering.append(one)
    ids = [one.sequence_id for one in entering]
    counts = {"token_limits": [max(map(len, prompts))] * len(ids), "step_counts": [1] * len(ids)}
    loop.take(executor_pb2.StepPlan(enter=entering, sequence_ids=ids, **counts))
    loop.settle()
    while loop.turn():
        pass
    steps = {"token_limits": [1] * len(ids), "step_counts": [tokens] * len(ids)}
    loop.take(executor_pb2.StepPlan(sequence_ids=ids, **steps))
    started = time.perf_counter()
    while loop.turn():
        pass
    seconds = time.perf_counter() - started
    loop.check()
    output: dict[int, list[int]] = {number: [] for number in ids}
    for event in loop.events:
        if isinstance(event, executor_pb2.StepResults):
            at = 0
            for number, count in zip(event.sequence_ids, event.token_counts, strict=True):
                output[number] += event.token_ids[at : at + count]
                at += count
    if any(len(found) != tokens for found in output.values()):
        sys.exit("an output ended early")
    return (tokens - 1) * len(ids) / seconds, list(output.values())


def mask_seconds(model: LoadedModel, rule: Constraint, outputs: list[list[int]]) -> float:
    """CPU seconds that one token's mask takes, the token before it taken in."""
    assert model.grammars is not None
    guides = [settled(model.grammars, rule) for _ in outputs]
    rows = [Guided(1, [1], 1, 0, SamplingRule(), Ending(frozenset(), 1 << 20), guide) for guide in guides]
    used = 0.0
    for at in range(len(outputs[0])):
        started = time.process_time()
        masks = model.grammars.masks.begin(rows)
        assert masks is not None
        masks.wait()
        used += time.process_time() - started
        for row, output in zip(rows, outputs, strict=True):
            row.output.append(output[at])
    return used / sum(map(len, outputs))


def compile_seconds(model: LoadedModel, rounds: int) -> dict[str, float]:
    """Of the vocabulary, and of a 10 kB schema, new and known: CPU seconds of this process, medians."""
    assert model.grammars is not None
    started = time.process_time()
    settled(model.grammars, Constraint(regex="a"))
    found = {"vocabulary": time.process_time() - started}
    for name, title in (("new", "schema {}"), ("known", "schema 0")):
        times = []
        for number in range(rounds):
            rule = large_schema(title.format(number))
            started = time.process_time()
            settled(model.grammars, rule)
            times.append(time.process_time() - started)
        found[name] = statistics.median(times)
    return found


def main(argv: Sequence[str]) -> int:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--model", default="smollm2")
    top.add_argument("--batch", type=int, default=32)
    top.add_argument("--tokens", type=int, default=128, help="of each output")
    top.add_argument("--rounds", type=int, default=5)
    top.add_argument("--schema", choices=SCHEMAS, default="plain")
    args = top.parse_args(argv)
    schema = Constraint(json_schema=SCHEMAS[args.schema])
    model = load(args.model, args.batch, 64 + args.tokens)
    tokenizer = ModelTokenizer.from_bundle(model.tokenizer_bundle)
    prompts = [tokenizer.encode(TEXT.format(number)) for number in range(2, args.batch + 2)]
    compiling = compile_seconds(model, max(3, args.rounds))
    for name, seconds in compiling.items():
        print(f"compile {name:<10} {seconds * 1e3:8.2f} ms of CPU", flush=True)
    ratios: dict[str, float] = {}
    outputs: list[list[int]] = []
    for temperature in (0.0, 0.7):
        found = []
        for number in range(args.rounds):
            rates = {}
            for rule in (None, schema) if number % 2 else (schema, None):
                rates[rule is None], texts = decode(model, prompts, args.tokens, temperature, rule)
                outputs = texts if rule is not None else outputs
            found.append(rates[False] / rates[True])
            print(f"temperature {temperature} free {rates[True]:7.1f} guided {rates[False]:7.1f} tok/s", flush=True)
        ratios[str(temperature)] = statistics.median(found)
        print(f"temperature {temperature} guided / free {ratios[str(temperature)]:.3f} (bar {BAR_RATE})", flush=True)
    mask = mask_seconds(model, schema, outputs)
    print(f"mask {mask * 1e6:.1f} us of CPU a token", flush=True)
    print(json.dumps({"model": args.model, "batch": args.batch, "guided": ratios, "mask": mask, "compile": compiling}))
    return 0 if min(ratios.values()) >= BAR_RATE and compiling["new"] <= BAR_COMPILE else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
