"""The same beginning goes to the same scheduler, unless that has much more to do."""

from __future__ import annotations

from collections import Counter

from services.gateway.placing.choice import PREFIX_TOKENS, choose, prefix_key

NAMES = [f"s{index}" for index in range(5)]
KEYS = [prefix_key("t", "m", [index]) for index in range(2000)]


def test_tenants_models_and_beginnings_differ() -> None:
    long = list(range(PREFIX_TOKENS))
    keys = [("t", "m", long), ("tm", "", long), ("t", "m", long[:-1]), ("u", "m", long), ("t", "n", long)]
    assert len({prefix_key(*key) for key in keys}) == len(keys)
    assert prefix_key("t", "m", [*long, 1]) == prefix_key("t", "m", [*long, 2])


def test_idle_schedulers_share_evenly_and_steadily() -> None:
    loads = dict.fromkeys(NAMES, 0)
    placed = {key: choose(key, loads) for key in KEYS}
    counts = Counter(placed.values())
    assert all(320 < counts[name] < 480 for name in NAMES)
    assert placed == {key: choose(key, dict(reversed(loads.items()))) for key in KEYS}


def test_one_that_leaves_moves_only_its_own() -> None:
    loads = dict.fromkeys(NAMES, 0)
    fewer = dict.fromkeys(NAMES[1:], 0)
    for key in KEYS:
        before = choose(key, loads)
        assert before == NAMES[0] or choose(key, fewer) == before


def test_a_hot_beginning_spreads() -> None:
    """No scheduler has more than a quarter more than its share; what overflows is steady, too."""
    key, loads = KEYS[0], dict.fromkeys(NAMES, 0)
    order: list[str] = []
    for _ in range(400):
        name = choose(key, loads)
        loads[name] += 1
        if name not in order:
            order.append(name)
    assert max(loads.values()) <= 101
    again, second = dict.fromkeys(NAMES, 0), list[str]()
    for _ in range(400):
        name = choose(key, again)
        again[name] += 1
        if name not in second:
            second.append(name)
    assert order == second
    assert loads[order[0]] >= loads[order[-1]]


def test_a_busy_one_is_passed_over() -> None:
    key = KEYS[1]
    first = choose(key, dict.fromkeys(NAMES, 0))
    loads = dict.fromkeys(NAMES, 4) | {first: 40}
    assert choose(key, loads) != first
    assert choose(key, {first: 40}) == first
