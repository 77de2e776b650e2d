"""`quire status --kv`: pools, reuse of prefixes and namespaces, as the kvmanager states them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from quire.cli.tables import align

_STATES = ("free", "cached", "leased")


def kv_report(kv: Mapping[str, Any], executors: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The status as data. `kv` is GetKvStatusResponse, `executors` the scheduler's, both as `plain` gives them.

    Shares are None where nothing was asked for; bytes where a pool does not state its block's.
    """
    described = {executor["description"]["executor_id"]: executor for executor in executors if executor["description"]}
    pools = [_pool(pool, described) for pool in kv["pools"]]
    return {
        "pools": pools,
        "totals": [_total(tier, pools) for tier in dict.fromkeys(pool["tier"] for pool in pools)],
        "sequences": kv["sequence_count"],
        "parked": kv["parked_count"],
        "prefix": _reuse(kv["prefix_query_tokens"], kv["prefix_hit_tokens"]),
        "evicted_blocks": kv["evicted_count"],
        "namespaces": [
            {"namespace": one["namespace"], "blocks": one["block_count"]}
            | _reuse(one["query_tokens"], one["hit_tokens"])
            for one in kv["namespaces"]
        ],
        "violations": list(kv["violations"]),
    }


def kv_text(report: Mapping[str, Any]) -> str:
    """`kv_report` as tables."""
    parts = [_pools(report["pools"], report["totals"])] if report["pools"] else ["no pools"]
    prefix = report["prefix"]
    parts.append(
        f"prefixes: {_share(prefix['hit_rate'])} of {prefix['query_tokens']:,} prompt tokens found, "
        f"{report['evicted_blocks']:,} blocks evicted\n"
        f"sequences: {report['sequences']:,} hold blocks, {report['parked']:,} reservations wait for a prefix"
    )
    if report["namespaces"]:
        rows = [("NAMESPACE", "BLOCKS", "PROMPT TOKENS", "FOUND")]
        for one in report["namespaces"]:
            name = one["namespace"] or "(default)"
            rows.append((name, f"{one['blocks']:,}", f"{one['query_tokens']:,}", _share(one["hit_rate"])))
        parts.append(align(rows, right=(1, 2, 3)))
    if report["violations"]:
        parts.append("\n".join(f"VIOLATION: {violation}" for violation in report["violations"]))
    return "\n\n".join(parts)


def _pool(status: Mapping[str, Any], executors: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    pool, executor_id = status["pool"] or {}, status["executor_id"]
    executor = executors.get(executor_id)
    size, count = pool.get("block_bytes", 0), pool.get("block_count", 0)
    return {
        "executor_id": executor_id,
        "executor": executor["target"] if executor else executor_id,
        "model": (executor["description"]["model"] or {}).get("name", "") if executor else "",
        "group": pool.get("group_id", 0),
        "nodes": [node for node in pool.get("rank_nodes", ()) if node >= 0],
        "tier": pool.get("tier", "").removeprefix("TIER_").lower(),
        "format": pool.get("format", "").removeprefix("KV_FORMAT_").lower(),
        "distance": pool.get("distance", 0) or None,
        "block_bytes": size or None,
        "bytes": size * count or None,
        "blocks": count,
        **{state: status[f"{state}_count"] for state in _STATES},
    }


def _total(tier: str, pools: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of all pools of a tier."""
    chosen = [pool for pool in pools if pool["tier"] == tier]
    sizes = [pool["bytes"] for pool in chosen]
    counts = {name: sum(pool[name] for pool in chosen) for name in ("blocks", *_STATES)}
    return {"tier": tier, "bytes": None if None in sizes else sum(sizes), **counts}


def _reuse(asked: int, found: int) -> dict[str, Any]:
    return {"query_tokens": asked, "hit_tokens": found, "hit_rate": round(found / asked, 4) if asked else None}


def _pools(pools: Sequence[Mapping[str, Any]], totals: Sequence[Mapping[str, Any]]) -> str:
    rows = [("EXECUTOR", "MODEL", "NODE", "TIER", "FORMAT", "BLOCK BYTES", "MIB", "BLOCKS", "FREE", "CACHED", "LEASED")]
    for pool in pools:
        nodes = ",".join(map(str, pool["nodes"])) or "-"
        size = "-" if pool["block_bytes"] is None else f"{pool['block_bytes']:,}"
        place = (pool["executor"], pool["model"] or "-", nodes, pool["tier"], pool["format"], size)
        rows.append((*place, _mib(pool["bytes"]), *_counts(pool)))
    for total in totals:
        rows.append(("all", "", "", total["tier"], "", "", _mib(total["bytes"]), *_counts(total)))
    return align(rows, right=range(5, 11))


def _counts(pool: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return f"{pool['blocks']:,}", f"{pool['free']:,}", f"{pool['cached']:,}", f"{pool['leased']:,}"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / (1 << 20):,.1f}"


def _share(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:.1%}"
