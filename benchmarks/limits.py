"""What a check of limits costs, in memory and with a Redis on this machine, and that parallel callers never exceed one.

    python -m benchmarks.limits                   starts a redis-server of its own where there is one
    python -m benchmarks.limits --redis URL       uses a database that is there; it is left with a few keys that expire

Each check lets a request of a tenant and a key with all limits in, and settles it. The bars are 99th percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from services.common.store import Store
from services.gateway.caller import Caller
from services.gateway.quota.ledger import Ledger
from services.gateway.quota.limits import Rates, Subject
from services.gateway.quota.memory_ledger import MemoryLedger
from services.gateway.quota.quota import Quota
from services.gateway.quota.redis_ledger import RedisLedger
from services.gateway.quota.usage import MemoryUsage

BARS_MS = {"memory": 1.0, "redis": 3.0}
HOST = "127.0.0.1"


def caller(rates: Rates) -> Caller:
    tenant = f"bench-{uuid.uuid4().hex[:8]}"
    return Caller(tenant, "k", counted=(Subject(tenant, "", rates), Subject(tenant, "k", rates)))


async def measure(ledger: Ledger, checks: int, warm_up: int) -> dict[str, float]:
    """Milliseconds of a check, one after the other as a lightly loaded gateway makes them."""
    quota, who = Quota(ledger, MemoryUsage(), "closed"), caller(Rates(10**6, 10**9, 10**3))
    times = []
    for number in range(warm_up + checks):
        began = time.perf_counter()
        quota.check_pace(who)
        grant = await quota.enter(who, 100, 200)
        ended = time.perf_counter()
        quota.settle(grant, 150)
        await asyncio.sleep(0)  # the settlement runs meanwhile, as it would
        if number >= warm_up:
            times.append((ended - began) * 1000)
    await quota.stop()
    times.sort()
    found = {f"p{percent}_ms": times[min(len(times) - 1, len(times) * percent // 100)] for percent in (50, 99)}
    return {name: round(value, 4) for name, value in found.items()}


async def race(url: str, gateways: int, callers: int, limit: int) -> dict[str, int | float]:
    """How many of many callers of as many gateways come in at once."""
    stores = [Store(url, 30) for _ in range(gateways)]
    who = caller(Rates(requests_per_minute=limit))
    ledgers = [RedisLedger(store) for store in stores]
    began = time.perf_counter()
    verdicts = await asyncio.gather(
        *(ledgers[number % gateways].take(uuid.uuid4().hex, who.counted, 0) for number in range(callers))
    )
    seconds = time.perf_counter() - began
    for store in stores:
        await store.close()
    admitted = sum(verdict.refusal is None for verdict in verdicts)
    return {"callers": callers, "admitted": admitted, "allowed": limit + int(seconds * limit / 60)}


@contextmanager
def redis(url: str | None) -> Iterator[str | None]:
    """The URL of a database; None where there is no server."""
    command = shutil.which("redis-server")
    if url is not None or command is None:
        yield url
        return
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--port", str(port), "--bind", HOST, "--save", "", "--dir", folder]
        process = subprocess.Popen([command, *arguments], stdout=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 30
            while time.monotonic() < end:
                try:
                    socket.create_connection((HOST, port), 1).close()
                    break
                except OSError:
                    time.sleep(0.05)
            yield f"redis://{HOST}:{port}/0"
        finally:
            process.terminate()
            process.wait(10)


async def run(args: argparse.Namespace, url: str | None) -> dict[str, object]:
    found: dict[str, object] = {"memory": await measure(MemoryLedger(), args.checks, args.checks // 10)}
    if url is not None:
        store = Store(url)
        found["redis"] = await measure(RedisLedger(store), args.checks, args.checks // 10)
        await store.close()
        found["race"] = await race(url, 50, 2_000, 500)
    return found


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--redis", metavar="URL")
    parser.add_argument("--checks", type=int, default=5_000)
    args = parser.parse_args(argv)
    with redis(args.redis) as url:
        found = asyncio.run(run(args, url))
    print(json.dumps(found | {"bars_ms": BARS_MS}))
    met = all(found[name]["p99_ms"] <= bar for name, bar in BARS_MS.items() if name in found)  # type: ignore[index]
    raced = found.get("race")
    return 0 if met and (raced is None or raced["admitted"] <= raced["allowed"]) else 1  # type: ignore[index]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
