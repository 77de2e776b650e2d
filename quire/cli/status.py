"""`quire status`: the local run and what its gateway says of models, queue and memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import grpc

from quire.cli.common import add_address, api_key, gateway_address, in_words, parser
from quire.cli.executors import state, unserved, waits
from quire.cli.plain import plain
from quire.cli.status_drafts import draft_text
from quire.cli.status_kv import kv_report, kv_text
from quire.cli.status_queue import queue_report, queue_text
from quire.client import bearer
from quire.supervisor import health
from quire.supervisor.rundir import RunDirectory, RunState
from quire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc


def run(argv: Sequence[str]) -> int:
    args = parser(
        "status",
        "Shows services, models, queue and KV memory. The exit status is 0 where everything is healthy.",
        "quire status\n"
        "quire status --json\n"
        "quire status --kv                         pools, tiers, formats, reuse of prefixes\n"
        "quire status --queue                      who waits and why, what each tenant was served\n"
        "quire status --address gpu-box:50051      a gateway elsewhere",
    )
    add_address(args)
    args.add_argument("--kv", action="store_true", help="show the KV memory in full, and nothing else")
    args.add_argument("--queue", action="store_true", help="show the queues in full, and nothing else")
    args.add_argument("--json", action="store_true", help="print a JSON object")
    given = args.parse_args(argv)
    live = None if given.address else RunDirectory().live()
    if given.kv:
        answer = _kv(gateway_address(given), api_key(given.api_key))
        print(json.dumps(answer, indent=2) if given.json else answer["error"] or kv_text(answer["kv"]))
        return 0 if answer["kv"] and not answer["kv"]["violations"] else 1
    if given.queue:
        answer = _queues(gateway_address(given), api_key(given.api_key))
        print(json.dumps(answer, indent=2) if given.json else answer["error"] or queue_text(answer["queues"]))
        return 0 if answer["queues"] else 1
    report = _report(live, gateway_address(given), api_key(given.api_key))
    print(json.dumps(report, indent=2) if given.json else _text(report))
    return 0 if report["healthy"] else 1


def _kv(address: str, key: str) -> dict[str, Any]:
    """What the kvmanager behind the gateway states of its memory; `kv` is None where it does not."""
    answer = _gateway(address, key)
    kv = kv_report(answer["kv"], answer["executors"]) if answer["error"] is None else None
    return {"address": address, "error": answer["error"], "kv": kv}


def _queues(address: str, key: str) -> dict[str, Any]:
    """What the scheduler behind the gateway states of its queues; `queues` is None where it does not."""
    answer = _gateway(address, key)
    error = answer["error"] if answer["queues"] is None else None  # without a kvmanager they are all the more of use
    return {"address": address, "error": error, "queues": answer["queues"]}


def _report(live: RunState | None, address: str, key: str) -> dict[str, Any]:
    """All that can be known. `services` is empty where the run is not this machine's."""
    report: dict[str, Any] = {"running": live is not None, "address": address, "services": []}
    if live is not None:
        report |= {"pid": live.pid, "phase": live.phase, "http": live.http, "log": live.log}
        report["uptime_seconds"] = round(time.time() - live.started_at, 1)
        report["services"] = asyncio.run(_services(live))
    report |= _gateway(address, key)
    report["running"] = report["running"] or bool(report["version"])
    healthy = (service["healthy"] for service in report["services"])
    report["healthy"] = report["error"] is None and all(healthy)
    return report


async def _services(live: RunState) -> list[dict[str, Any]]:
    async def one(service: dict[str, Any]) -> dict[str, Any]:
        # What the supervisor waited for is what counts: a spare executor holds no model and is not "ready".
        asked = service.pop("health_service")
        answer = await health.ask(service["target"], asked) if service["pid"] else "UNREACHABLE"
        return service | {"healthy": answer == "SERVING", "health": answer}

    return list(await asyncio.gather(*(one(asdict(service)) for service in live.services)))


def _gateway(address: str, key: str) -> dict[str, Any]:
    """Models, queue and KV as the gateway at `address` states them; `error` says why where it does not."""
    empty: dict[str, Any] = {"models": [], "queue": {}, "queues": None, "kv": {}, "executors": []}
    empty |= {"unserved": [], "version": ""}
    with grpc.insecure_channel(address) as channel:
        try:
            status = admin_pb2_grpc.AdminServiceStub(channel).GetStatus(
                admin_pb2.GetStatusRequest(), timeout=5, metadata=bearer(key)
            )
            models = gateway_pb2_grpc.InferenceServiceStub(channel).ListModels(
                gateway_pb2.ListModelsRequest(), timeout=5, metadata=bearer(key)
            )
        except grpc.RpcError as error:
            return empty | {"error": _why(error, address)}
    scheduler, absent = status.scheduler, None
    if not scheduler.HasField("kv"):
        absent = "kvmanager" if status.HasField("scheduler") else "scheduler"
    return {
        "error": f"the {absent} does not answer" if absent else None,
        "version": status.version,
        "models": [plain(model) for model in models.models],
        "executors": [plain(executor) | {"state": state(executor)} for executor in scheduler.executors],
        "unserved": unserved(models.models, scheduler.executors) if status.HasField("scheduler") else [],
        "queue": {
            "open_requests": status.open_request_count,
            "running": scheduler.running_count,
            "waiting": scheduler.waiting_count,
            "preemptions": scheduler.preemption_count,
        },
        "queues": queue_report(plain(scheduler)) if status.HasField("scheduler") else None,
        "kv": plain(scheduler.kv),
    }


def _why(error: Any, address: str) -> str:
    if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"the gateway on {address} does not answer"
    return in_words(error.code(), error.details() or "", address)


def _text(report: dict[str, Any]) -> str:
    lines = []
    if report["services"]:
        lines.append(f"up for {report['uptime_seconds']:.0f} s ({report['phase']}), log {report['log']}")
        for service in report["services"]:
            health_word = "healthy" if service["healthy"] else _trouble(service["state"], service["health"])
            died = f", restarted {service['restarts']} times ({service['last_exit']})" if service["restarts"] else ""
            lines.append(f"  {service['name']:<12} {service['target']:<18} pid {service['pid']}  {health_word}{died}")
    if report["error"] is not None:
        lines.append(report["error"])
    for model in report["models"]:
        lines.append(f"model {model['name']}: {model['architecture']}, context {model['context_length']} tokens")
    if queue := report["queue"]:
        sequences = f"{queue['running']} running, {queue['waiting']} waiting"
        lines.append(f"requests: {queue['open_requests']} open; sequences: {sequences}")
    holds = {}
    for executor in report.get("executors", ()):
        description = executor["description"] or {}
        if model := description.get("model"):
            holds[description["executor_id"]] = f" of {model['name']} on {executor['target']}"
            how = f"{description['backend']} backend, {description['device']}, {description['dtype']}"
            lines.append(f"executor {executor['target']}: {model['name']}, {executor['state']}, {how}")
            if drafts := draft_text(executor):
                lines.append(drafts)
        elif executor["connected"]:
            lines.append(f"executor {executor['target']}: no model")
    lines += [waits(model) for model in report.get("unserved", ())]
    for pool in report["kv"].get("pools", ()):
        counts = f"{pool['free_count']} free, {pool['cached_count']} cached, {pool['leased_count']} in use"
        kind = f"{_word(pool['pool']['tier'])} {_word(pool['pool']['format'])}"
        lines.append(f"kv blocks{holds.get(pool['executor_id'], '')}, {kind}: {counts}")
    return "\n".join(lines)


def _word(enum: str) -> str:
    """The last word of an enum value's name, as people write it: "disk" of TIER_DISK."""
    return enum.rpartition("_")[2].lower()


def _trouble(state: str, health_answer: str) -> str:
    """Why a service is not healthy: the supervisor's word, unless it has not noticed yet; then the service's own."""
    return state if state != "healthy" else {"NOT_SERVING": "not ready"}.get(health_answer, "does not answer")
