"""What the controller chooses is about as fast as the best of all fixed lengths, stays, and follows what changes."""

from __future__ import annotations

import itertools
from statistics import fmean, median

import pytest

from services.common.speculation import LEAST_PACE
from services.scheduler.speculation.acceptance import KINDS, NOMINAL, Habit
from services.scheduler.speculation.controller import PROBE_DRAFTS, PROBE_SHARE, Controller, Drafting
from tests.unit.scheduler.speculation.engine import Engine

FIXED = (0, 2, 4, 8)


def memory_bound(tokens: float) -> float:
    """Seconds of a step that reads weights for most of its time, as large models on GPUs do."""
    return 0.020 + 0.0002 * tokens


def compute_bound(tokens: float) -> float:
    """A small model on few cores: each token costs a quarter of the first one."""
    return 0.0023 + 0.0006 * (tokens - 1)


def jumping(tokens: float) -> float:
    """Two tokens take another way than one does, and then more cost little, up to thirty-two."""
    return 0.003 if tokens <= 1 else 0.0045 + 0.0001 * tokens + 0.0006 * max(0.0, tokens - 32)


COSTS = {"memory": memory_bound, "compute": compute_bound, "jumping": jumping}
BATCHES = {
    "good": [0.9],
    "fair": [0.5],
    "bad": [0.05],
    "eight good": [0.85] * 8,
    "eight of all kinds": [0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.98],
    "sixty-four": [0.05, 0.5, 0.8, 0.95] * 16,
}


@pytest.mark.parametrize("drafting", [0.0, 0.1])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("cost", COSTS)
def test_it_is_about_as_fast_as_the_best_fixed_length(cost: str, batch: str, drafting: float) -> None:
    """Within 0.97 of it, probes included, by what theory says of the limits that it came to."""
    engine = Engine(BATCHES[batch], COSTS[cost], drafting, noise=0.05)
    controller = Controller(engine.describe(), None)
    seconds = 10.0 if cost == "memory" else 5.0  # few steps take long there
    engine.run(controller, seconds)
    settled = len(engine.limits)
    engine.run(controller, seconds)
    rate = fmean(map(engine.rate, engine.limits[settled:]))
    best = max(engine.rate([k] * len(engine.chances)) for k in FIXED)
    assert rate >= 0.97 * best, f"{rate:.1f} instead of {best:.1f}: {engine.limits[-1]}"


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_drafts_that_are_proposed_at_times_only_are_no_loss(chance: float) -> None:
    """As of prompt lookup, which has nothing to say of most steps."""
    engine = Engine([chance] * 2, compute_bound, proposes=0.2, noise=0.05)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 5.0)
    plain = engine.rate([0, 0])
    assert engine.run(controller, 5.0) >= (1.2 if chance else 0.98) * plain


@pytest.mark.parametrize("cost", ["memory", "compute"])
@pytest.mark.parametrize("chance", [0.05, 0.5, 0.9])
def test_it_stays_with_what_it_chose(cost: str, chance: float) -> None:
    """Where nothing changes the limit stays too, but for probes, and for a few drafts where they cost little."""
    engine = Engine([chance], COSTS[cost], noise=0.1)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 5.0)
    chosen = []
    for _ in range(200):
        engine.run(controller, 0.05)
        chosen.append(controller.limits[engine.habits[0].kind])
    assert cost == "memory" or max(chosen) - min(chosen) <= 3  # of which all are about as fast
    assert sum(one != other for one, other in itertools.pairwise(chosen)) <= 20


@pytest.mark.parametrize("claimed", [0.1, 10.0])
def test_it_finds_out_what_steps_take_whatever_is_claimed(claimed: float) -> None:
    engine = Engine([0.9], memory_bound, stated=(claimed * memory_bound(1), 5000.0 / claimed), noise=0.05)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 5.0)
    assert engine.rate(engine.limits[-1]) >= 0.97 * engine.rate([16])


def test_probes_cost_no_more_than_their_share() -> None:
    """Drafts that are never accepted, where each costs as much as a token: what is lost is what probes may cost."""
    engine = Engine([0.0] * 4, lambda tokens: 0.001 * tokens, noise=0.0)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 5.0)
    plain = engine.rate([0] * 4)
    probing = engine.run(controller, 10.0)
    assert (1 - 1.5 * PROBE_SHARE) * plain <= probing < plain


def test_catching_up_is_paid_for_by_probes_and_is_no_part_of_a_step() -> None:
    controller = Controller(Engine([0.0], compute_bound).describe(), None)
    habits, step = [Habit(16)], controller.cost.step(1)
    for habit in habits * 100:
        controller.acceptance.add(habit, 8, 8, 0)
    controller.observe(4000, 4000, Drafting(), 4000 * step)
    assert controller.grant(habits, [2], 0.0).probed is habits[0]
    controller.observe(1, 1, Drafting(catch_up=1000.0), 1000.0 + step)
    assert controller.cost.step(1) == pytest.approx(step)
    assert controller.grant(habits, [2], 0.01).probed is None
    controller.observe(10_000, 10_000, Drafting(), 10_000 * step)
    assert controller.grant(habits, [2], 0.02).probed is habits[0]


def probes(waiting: int, steps: int, most: int = 16) -> list[tuple[int, int, int]]:
    """Who was probed in turn, with how many drafts, for how many steps, where all that takes is saved each time."""
    controller = Controller(Engine([0.0], compute_bound).describe(), None)
    habits = [Habit(most) for _ in range(waiting)]
    for habit in habits * 100:
        controller.acceptance.add(habit, 8, 8, 0)
    found = []
    for turn in range(waiting * 12):
        controller.observe(4000, 4000 * waiting, Drafting(), 4000 * compute_bound(waiting))
        grant = controller.grant(habits, [steps] * waiting, 0.05 * turn)
        assert grant.probed is not None
        found.append((habits.index(grant.probed), grant.drafts(grant.probed), grant.probe_steps))
    return found


@pytest.mark.parametrize("waiting", [1, 2, 3, 5, 6, 7, 12])
def test_each_of_those_that_wait_is_probed_with_few_drafts_and_with_many(waiting: int) -> None:
    sizes: dict[int, set[int]] = {}
    for at, drafts, _ in probes(waiting, 2):
        sizes.setdefault(at, set()).add(drafts)
    assert sizes == {at: set(PROBE_DRAFTS) for at in range(waiting)}


def test_a_probe_is_for_one_that_gets_steps_and_costs_what_it_gets() -> None:
    controller = Controller(Engine([0.0], memory_bound).describe(), None)
    habits = [Habit(16) for _ in range(4)]
    for habit in habits * 20:
        controller.acceptance.add(habit, 8, 8, 0)
    controller.observe(4000, 16000, Drafting(), 4000 * memory_bound(4))
    saved = controller._budget
    assert controller.grant(habits, [0] * 4, 0.0).probed is None
    assert controller._budget == saved
    spent = []
    for gets in (2, 4):
        grant = controller.grant(habits, [0, 0, gets, 0], 0.0)
        assert grant.probed is habits[2]
        assert grant.probe_steps == gets
        spent.append((saved - controller._budget) / gets / controller._prices[habits[2].kind, grant.probe_drafts])
        saved = controller._budget
    assert spent == pytest.approx([1.0, 1.0])


@pytest.mark.parametrize("slower", [1, 100])
def test_the_batch_is_probed_on_slow_machines_too(slower: int) -> None:
    """Where steps take two seconds, as where they take twenty milliseconds: what is saved is counted in steps."""
    engine = Engine([0.9] * 2, lambda tokens: slower * memory_bound(tokens), noise=0.02)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 20.0 * slower)
    settled = len(engine.limits)
    engine.run(controller, 40.0 * slower)
    assert [0, 0] in engine.limits[settled:]
    assert engine.limits[settled:].count([0, 0]) < 0.02 * len(engine.limits[settled:])


def test_probes_of_the_batch_are_of_the_limits_that_are() -> None:
    """Not of those that were chosen while something else was known."""
    controller = Controller(Engine([0.0], memory_bound).describe(), None)
    habits = [Habit(16) for _ in range(4)]
    lost = []
    for accepted in (8, 3):
        for habit in habits * 100:
            controller.acceptance.add(habit, 8, 8, accepted)
        controller.grant(habits, [0] * 4, float(accepted == 3))
        others = controller._others
        assert others[0][0] == [0] * KINDS
        lost.append(others[0][1])
        for limits, _ in others[1:]:
            assert limits == [min(2 * limit, controller.most) for limit in controller.limits]
    assert lost[0] > lost[1] > 0.0


def test_what_some_sequences_show_holds_for_those_not_tried_yet() -> None:
    """Probes are rare: with each sequence to be tried by itself, a batch of good ones would go without for long."""
    controller = Controller(Engine([0.9], memory_bound).describe(), None)
    tried, untried = Habit(16), Habit(16)
    controller.grant([tried, untried], [2, 2], 0.0)
    first = untried.kind
    for _ in range(200):
        controller.acceptance.add(tried, 8, 8, 7)
    controller.grant([tried, untried], [2, 2], 1.0)
    assert NOMINAL[untried.kind] > max(0.8, NOMINAL[first])


def test_drafts_that_begin_to_be_accepted_are_found_out() -> None:
    """And given up again once they are not."""
    engine = Engine([0.0], compute_bound)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 20.0)
    assert controller.limits[engine.habits[0].kind] == 0
    engine.chances = [0.95]
    engine.run(controller, 10.0)
    assert controller.limits[engine.habits[0].kind] >= 4
    engine.chances = [0.0]
    engine.run(controller, 5.0)
    assert controller.limits[engine.habits[0].kind] == 0


def test_a_burst_ends_drafts_and_they_come_back_at_once() -> None:
    """G7: with many sequences no draft pays; once one of them is alone again, its drafts are what they were."""
    engine = Engine([0.95], compute_bound, draft_part=0.1)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 5.0)
    alone = engine.habits[0]
    before = controller.limits[alone.kind]
    assert before >= 4
    engine.chances = [0.95] * 64
    engine.run(controller, 5.0)
    assert {controller.limits[habit.kind] for habit in engine.habits} == {0}
    engine.chances, engine.habits = [0.95], [alone]
    engine.run(controller, 0.05)
    assert engine.limits[-1][0] >= before - 2


def test_a_request_sets_the_most() -> None:
    engine = Engine([0.95] * 3, memory_bound)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 2.0)
    for most, habit in zip((0, 3, 16), engine.habits, strict=True):
        habit.most = most
    grant = controller.steady(engine.habits)
    assert [grant.drafts(habit) for habit in engine.habits[:2]] == [0, 3]
    assert grant.drafts(engine.habits[2]) > 3


@pytest.mark.parametrize("cost", ["memory", "compute"])
@pytest.mark.parametrize(("admitted", "count"), [(1, 31), (2, 8)])
def test_what_requests_do_not_admit_is_not_counted_on(cost: str, admitted: int, count: int) -> None:
    """Beside many that admit few drafts the one that admits all has what is best for the batch."""
    engine = Engine([0.9] * (count + 1), COSTS[cost], noise=0.02)
    controller = Controller(engine.describe(), None)
    engine.habits = [*(Habit(admitted) for _ in range(count)), Habit(16)]
    engine.run(controller, 4.0)
    settled = len(engine.limits)
    engine.run(controller, 4.0)
    rate = fmean(map(engine.rate, engine.limits[settled:]))
    best = max(engine.rate([min(k, habit.most) for habit in engine.habits]) for k in range(17))
    assert rate >= 0.97 * best, f"{rate:.1f} instead of {best:.1f}: {engine.limits[-1]}"


def test_groups_are_as_large_at_each_position_as_requests_admit() -> None:
    controller = Controller(Engine([0.9], memory_bound).describe(), None)
    habits = [Habit(most) for most in (0, 1, 1, 2, 16)]
    controller.grant(habits, [0] * 5, 0.0)
    (mixed,) = controller._groups(controller._count(habits))
    (whole,) = controller._groups(controller._count([Habit(16)]))
    assert (mixed.size, whole.size) == (4, 1)
    for mine, each in ((mixed.proposed, whole.proposed), (mixed.accepted, whole.accepted)):
        sizes = [4 * part / one for part, one in zip(mine, each, strict=True)]
        assert sizes == pytest.approx([4.0, 2.0, *[1.0] * 14])


@pytest.mark.parametrize(("fixed", "most", "limit"), [(0, 8, 0), (4, 8, 4), (16, 8, 8)])
def test_a_fixed_limit_is_kept_as_far_as_the_executor_admits(fixed: int, most: int, limit: int) -> None:
    engine = Engine([0.0], memory_bound)
    description = engine.describe()
    description.speculation.max_draft_tokens = most
    engine.run(Controller(description, fixed), 1.0)
    assert {limits[0] for limits in engine.limits} == {limit}


def test_limits_give_way_to_a_neighbour_without_drafts() -> None:
    """They were chosen before it came, and promise more tokens than any that leave it half of its speed."""
    engine = Engine([0.95] * 8, memory_bound, draft_part=0.1, noise=0.02)
    controller = Controller(engine.describe(), None)
    engine.run(controller, 20.0)

    def pace(limits: list[int]) -> float:
        """Of a sequence without drafts."""
        drafting = sum(memory_bound(sum(limit > k for limit in limits)) for k in range(max(limits)))
        return memory_bound(len(limits)) / (memory_bound(len(limits) + sum(limits)) + 0.1 * drafting)

    assert pace(engine.limits[-1]) < LEAST_PACE
    before = len(engine.limits)
    engine.chances = [*engine.chances, 0.0]
    engine.habits.append(Habit(0))
    engine.run(controller, 1.0)
    usual = median(map(pace, engine.limits[before:]))  # but for probes
    assert LEAST_PACE - 0.05 <= usual < 1.0  # costs are measured


def test_what_weighs_drafts_itself_is_granted_all() -> None:
    """Nothing is learned of its drafts either; a request's own limit counts, and so does the operator's."""
    description = Engine([0.0], memory_bound).describe()
    description.speculation.weighs_drafts = True
    weighed, fixed = Controller(description, None), Controller(description, 4)
    for now in (0.0, 1.0):
        grant = weighed.grant([Habit(16), Habit(5), Habit(0)], [2, 2, 2], now)
        assert [grant.drafts(Habit(most)) for most in (16, 5, 0)] == [16, 5, 0]
        assert grant.probed is None
    assert (weighed.learns, fixed.learns) == (False, True)
    assert fixed.grant([Habit(16)], [2], 0.0).limits == [4] * KINDS


def test_what_drafts_saved_is_what_they_gave_less_what_they_took() -> None:
    controller = Controller(Engine([0.0], memory_bound).describe(), None)
    controller.batch = 4.0
    step = controller.cost.step
    assert controller.worth(6) == pytest.approx(6 * step(4) / 4)
    assert controller.price(Drafting()) == 0.0
    price = controller.price(Drafting(steps=2, drafts=6, rounds=4, seconds=0.5, catch_up=0.25))
    assert price == pytest.approx(2 * (step(7) - step(4)) + 0.75)


def test_a_fixed_limit_meets_sequences_as_a_chosen_one_does() -> None:
    controller, habit = Controller(Engine([0.0], memory_bound).describe(), 4), Habit(16)
    grant = controller.grant([habit], [2], 0.0)
    assert habit.kind >= 0
    assert grant.drafts(habit) == 4


@pytest.mark.parametrize(("good", "is_chosen_for"), [(8, False), (9, True)])
def test_another_kind_is_chosen_for_at_once_where_it_is_more_than_an_eighth(good: int, is_chosen_for: bool) -> None:
    engine = Engine([0.0] * 64, memory_bound)
    controller = Controller(engine.describe(), None)
    habits = [Habit(16) for _ in range(64)]
    for habit in habits:
        controller.acceptance.add(habit, 8, 8, 0)
    controller.grant(habits, [2] * 64, 0.0)
    for habit in habits[:good]:
        for _ in range(64):
            controller.acceptance.add(habit, 8, 8, 8)
    controller.grant(habits, [2] * 64, 0.01)
    assert any(controller.limits) == is_chosen_for
