"""Time to first token of a prompt whose beginning is cached, beside one that is cold, through the whole stack.

    python -m benchmarks.prefix_ttft [--prompt 1024] [--cached 0.9] [--rounds 10]

Each round sends a prompt of random tokens, then one that shares its beginning: the two see the same machine. The
stack is started and stopped here, unless --address names a running one. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence

from benchmarks.stack import add_stack_flags, stack
from quire.cli.common import gateway_address
from quire.client import Client

BAR = 6.0  # times shorter
FIRST_ID, END_ID = 1000, 40000  # ordinary tokens of every vocabulary in use


def first_token_ms(client: Client, prompt: Sequence[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and how many tokens of the prompt had KV."""
    start = time.perf_counter()
    pieces = client.stream(prompt, max_tokens=2, temperature=0.0, ignore_eos=True)
    next(pieces)
    milliseconds = (time.perf_counter() - start) * 1000
    usage = [piece.message.usage for piece in pieces if piece.message.HasField("usage")]
    return milliseconds, usage[-1].cached_tokens


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_stack_flags(parser)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens")
    parser.add_argument("--cached", type=float, default=0.9, help="share of the prompt that the other one shares")
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args(argv)
    draw, cold, warm, found = random.Random(1), [], [], []
    with tempfile.TemporaryDirectory() as run_folder:
        environment = os.environ | {"QUIRE_RUN_DIR": run_folder}
        with stack(args, environment):
            os.environ["QUIRE_RUN_DIR"] = run_folder
            with Client(gateway_address(args)) as client:
                for _ in range(args.rounds):
                    prompt = [draw.randrange(FIRST_ID, END_ID) for _ in range(args.prompt)]
                    cold.append(first_token_ms(client, prompt)[0])
                    shared = round(args.prompt * args.cached)
                    tail = [draw.randrange(FIRST_ID, END_ID) for _ in range(args.prompt - shared)]
                    milliseconds, cached = first_token_ms(client, prompt[:shared] + tail)
                    warm.append(milliseconds)
                    found.append(cached)
    ratios = [before / after for before, after in zip(cold, warm, strict=True)]
    print(f"cold {statistics.median(cold):.1f} ms, with {statistics.median(found):.0f} of {args.prompt} tokens cached")
    print(f"{statistics.median(warm):.1f} ms: {statistics.median(ratios):.2f} times shorter")
    print(json.dumps({"cold_ms": cold, "warm_ms": warm, "cached_tokens": found, "bar": BAR}))
    return 0 if statistics.median(ratios) >= BAR else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
