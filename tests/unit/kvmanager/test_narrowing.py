"""Of many places only few are looked at closely: the choice is the one among all."""

from __future__ import annotations

import random
from array import array

from services.kvmanager.keys import KeySpace
from services.kvmanager.manager import KvManager
from services.kvmanager.matching import PromptKeys
from services.kvmanager.narrowing import Spot, narrow
from services.kvmanager.options import Option
from services.kvmanager.placement import Decision, choose
from services.kvmanager.reservations import AllowedExecutor, Reservation
from tests.unit.kvmanager.helpers import MODEL, executor, manager, pool, reservation


def _spots(made: KvManager, loads: list[AllowedExecutor]) -> list[Spot]:
    return [
        Spot(made.executors[load.executor_id], place, load)
        for load in loads
        for place in made.executors[load.executor_id].places
    ]


def _choice(wanted: Reservation, spots: list[Spot], *left_out: int) -> tuple[Decision, Spot | None]:
    keys = PromptKeys(wanted.key_space, wanted.tokens)
    options = [Option.of(wanted, keys, *spot) for spot in spots]
    decision = choose([option.candidate(wanted) for option in options], *left_out)
    return decision, spots[decision.position] if decision.position >= 0 else None


def test_the_choice_is_the_one_among_all_places() -> None:
    """Random pools on one or two nodes, contents, holders, loads and prompts."""
    chosen_with_prefix = refused = 0
    for seed in range(300):
        draw = random.Random(seed)
        pools = [
            (pool(draw.randrange(2, 9), 4, nodes=(0,)), pool(4, 4, first=20, pool_id=1, nodes=(1,))) for _ in "12345"
        ]
        specs = [executor(f"e{n}", *both[: draw.randrange(1, 3)]) for n, both in enumerate(pools)]
        made, session = manager(*specs)
        prompts = [[draw.randrange(3)] * 4 + [draw.randrange(2) for _ in range(draw.randrange(20))] for _ in range(6)]
        for number, prompt in enumerate(prompts, 1):
            name = draw.choice(specs).executor_id
            made.reserve(session, reservation(number, prompt, on=[name]))
            if number in session.holdings and draw.random() < 0.8:
                made.progress(session, number, len(prompt), [])
            if number in session.holdings and draw.random() < 0.5:
                made.release(session, number)
        loads = [
            AllowedExecutor(
                s.executor_id,
                1,
                draw.randrange(4),
                8 * draw.randrange(4),
                draw.randrange(90),
                draw.choice([1.0, 1.0, 2.5]),
            )
            for s in specs
        ]
        tokens = array("i", draw.choice(prompts) + [7] * draw.randrange(9))
        most = draw.choice([0, 30])
        skips = draw.random() < 0.2
        wanted = Reservation(
            99,
            KeySpace(MODEL, "default"),
            tokens,
            draw.randrange(8),
            loads,
            skips,
            most_tokens=most,
            output_tokens=draw.choice([0, 20]),
        )
        spots = _spots(made, loads)
        few, *left_out = narrow(made.executors, wanted, PromptKeys(wanted.key_space, tokens))
        among_all, expected = _choice(wanted, spots)
        among_few, found = _choice(wanted, few, *left_out)
        assert (among_few.outcome, found) == (among_all.outcome, expected), f"seed {seed}"
        if expected is None:
            refused += 1
        else:
            assert among_few.reasons == among_all.reasons, f"seed {seed}"
            chosen_with_prefix += "0 of" not in among_all.reasons[0]
    assert chosen_with_prefix > 30
    assert refused > 5


def test_places_without_any_of_the_prompt_are_one() -> None:
    made, session = manager(*(executor(f"e{n}") for n in range(20)))
    made.reserve(session, reservation(1, range(9), on=["e3"]))
    loads = [AllowedExecutor(f"e{n}", 1, running_count=20 - n) for n in range(20)]
    wanted = reservation(2, range(9), on=loads)
    few = narrow(made.executors, wanted, PromptKeys(wanted.key_space, wanted.tokens))
    assert [spot.load.executor_id for spot in few.spots] == ["e3", "e19"]
    assert few.left_out == 18


def test_a_refusal_counts_those_left_out() -> None:
    made, session = manager(*(executor(f"e{n}", pool(2)) for n in range(4)))
    answer = made.reserve(session, reservation(1, range(9), on=[f"e{n}" for n in range(4)]))
    assert answer is not None
    assert answer.reasons == ["e0 node -1: needs 3 KV blocks, has 2", "so do 3 others"]
