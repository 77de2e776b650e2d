"""The draft limit of each sequence on one executor: the best by what is measured, held steady, probed rarely. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.v1 import types_pb2
from services.common.speculation import MAX_DRAFT_TOKENS
from services.scheduler.speculation.acceptance import KINDS, NOMINAL, Acceptance, Habit
from services.scheduler.speculation.choice import Group, choose, forecast, is_allowed
from services.scheduler.speculation.cost import StepCost

MARGIN = 0.015
"""A choice gives way to one that promises so much more: less may be chance, and changes would never end."""
REVISE_SECONDS, OTHER_BATCH, OTHER_KIND = 0.1, 1.25, 0.125
"""Between two choices, unless the batch grew or shrank by this factor, or a kind that was not in it is more than this
part of it."""
PROBE_SHARE, PROBE_SAVINGS, FIRST_STEPS = 0.005, 32, 5
"""Part of the time that probes may cost, the most that is saved for them, in steps, and the steps that they may cost at
first, when nothing is known."""
LEAST_PRICE = 0.25
"""Part of a probe's time that counts as its cost, however many tokens it may give."""
PROBE_DRAFTS, LEAST_PROBE_STEPS = (2, 4, 2, 8, 2, 16), 2
"""In turns: a few tell whether any are accepted, many what steps of many tokens take."""
BATCH_PROBE_SECONDS = 1.0
"""Between two grants without drafts, or with more of them, where sequences have some: what such steps take must be
known as well."""


@dataclass(slots=True)
class Grant:
    """What one top-up gives beside one token a step."""

    limits: Sequence[int]  # drafts of each step, by kind
    probed: Habit | None = None  # has drafts where its kind has none
    probe_drafts: int = 0
    probe_steps: int = 0  # that it gets

    def drafts(self, habit: Habit) -> int:
        """Drafts of each step of a sequence."""
        if habit is self.probed:
            return min(self.probe_drafts, habit.most)
        limit = self.limits[habit.kind]
        return limit if limit < habit.most else habit.most


Counts = Mapping[tuple[int, int], int]
"""Sequences of a batch that may have drafts, by kind and by the most that their requests admit."""


class Drafting(NamedTuple):
    """What some steps did with drafts."""

    steps: int = 0  # those that verified any
    drafts: int = 0  # verified
    rounds: int = 0  # of proposing: the most drafts of one sequence in a step, summed over the steps
    seconds: float = 0.0  # spent on proposing
    catch_up: float = 0.0  # seconds that what proposes spent on texts that it was behind with


class Controller:
    """Learns from an executor's results, and says before each top-up how many drafts there shall be."""

    def __init__(self, description: types_pb2.ExecutorDescription, fixed: int | None) -> None:
        """`fixed`: the same limit at all times; None to choose it, unless what proposes weighs drafts itself."""
        self.most = min(MAX_DRAFT_TOKENS, description.speculation.max_draft_tokens)
        self.room = description.max_step_tokens
        self.cost = StepCost.stated(description)
        self.acceptance = Acceptance()
        self.learns = fixed is not None or not description.speculation.weighs_drafts
        if not self.learns:
            fixed = self.most  # what proposes knows each text and each step: a limit could only be in its way
        self.limits = [min(fixed or 0, self.most)] * KINDS
        self._fixed = fixed is not None
        self._expected = [Group(kind, 1, *self.acceptance.kinds[kind].expect(NOMINAL[kind])) for kind in range(KINDS)]
        self.batch = 1.0  # sequences of a step, as last heard
        self._counts: Counts = {}  # of the batch that was chosen for
        self._rows = 0
        self._revised_at = self._batch_probe_at = float("-inf")
        self._others: list[tuple[list[int], float]] = []  # limits to probe, and what part of the tokens that costs
        self._budget = FIRST_STEPS * self.cost.step(1)  # seconds that probes may cost
        self._turn = self._batch_turn = 0  # of those that wait to be probed, and of `_others`
        self._prices: dict[tuple[int, int], float] = {}  # seconds that a step of such a probe costs, by kind and drafts

    def observe(self, steps: int, rows: int, drafting: Drafting, seconds: float) -> None:
        """Takes in steps that computed no prefill: for how many sequences in all, and how long it took with all that
        was done about drafts.
        """
        batch, plain_steps = rows / steps, steps - drafting.steps
        savings = PROBE_SAVINGS * self.cost.step(batch)
        self._budget = min(max(self._budget + PROBE_SHARE * seconds - drafting.catch_up, -savings), savings)
        parts = [(plain_steps, batch)] if plain_steps else []
        if drafting.steps:
            parts.append((drafting.steps, batch + drafting.drafts / drafting.steps))
        self.cost.observe(parts, seconds - drafting.seconds - drafting.catch_up)
        if drafting.rounds:
            self.cost.observe_drafts(drafting.rounds, drafting.drafts, drafting.seconds)

    def worth(self, accepted: int) -> float:
        """Seconds that so many tokens would have taken more without drafts."""
        return accepted * self.cost.step(self.batch) / self.batch

    def price(self, drafting: Drafting) -> float:
        """Seconds that steps took longer by their drafts."""
        verifying, steps = 0.0, drafting.steps
        if steps:
            verifying = steps * (self.cost.step(self.batch + drafting.drafts / steps) - self.cost.step(self.batch))
        return verifying + drafting.seconds + drafting.catch_up

    def steady(self, habits: Sequence[Habit]) -> Grant:
        """Drafts as they were chosen last: some of the sequences that decode get credit out of turn."""
        if self.learns:  # else limits are the same, whatever kind
            for habit in habits:
                self.acceptance.meet(habit)
        return Grant(self.limits)

    def grant(self, habits: Sequence[Habit], steps: Sequence[int], now: float) -> Grant:
        """Drafts for sequences that decode; `steps` that each of them gets now, some perhaps none."""
        if self._fixed:
            return self.steady(habits)
        counts = self._count(habits)
        if self._is_due(counts, len(habits), now):
            for habit in habits:
                self.acceptance.sort(habit)
            counts = self._count(habits)
            self._revise(counts, len(habits), now)
        if self._others and now >= self._batch_probe_at + BATCH_PROBE_SECONDS:
            limits, lost = self._others[self._batch_turn % len(self._others)]
            step = self.cost.step(len(habits))
            price = sum(steps) / len(steps) * step * lost
            if price <= self._budget:
                self._batch_turn += 1
                self._batch_probe_at = now
                self._budget -= price
                return Grant(limits)
            if price <= PROBE_SAVINGS * step:
                return Grant(self.limits)  # it is saved for; until it is due, the other probes have what there is
        if any(not self.limits[kind] for kind, _ in counts):
            return self._probe(habits, counts, steps)
        return Grant(self.limits)

    def _count(self, habits: Sequence[Habit]) -> Counts:
        meet = self.acceptance.meet
        return Counter((meet(habit), habit.most) for habit in habits if habit.most)

    def _is_due(self, counts: Counts, rows: int, now: float) -> bool:
        if now - self._revised_at >= REVISE_SECONDS:
            return True
        if not self._rows <= rows * OTHER_BATCH <= self._rows * OTHER_BATCH * OTHER_BATCH:
            return True
        others: Counter[int] = Counter()
        known = {kind for kind, _ in self._counts}
        for (kind, _), count in counts.items():
            others[kind] += count * (kind not in known)
        return max(others.values(), default=0) > OTHER_KIND * rows

    def _revise(self, counts: Counts, rows: int, now: float) -> None:
        """Chooses anew, and keeps to what was chosen before unless something is clearly better."""
        self._counts, self._rows, self._revised_at = counts, rows, now
        self._prices, self._others = {}, []
        for kind in {kind for kind, _ in counts}:
            self._expected[kind] = Group(kind, 1, *self.acceptance.kinds[kind].expect(NOMINAL[kind]))
        groups = self._groups(counts)
        if not groups:
            return
        limits: Sequence[int] = [self.limits[group.kind] for group in groups]
        plain = [0] * len(groups)
        room = max(0, self.room - rows)
        is_allowed_still = is_allowed(groups, limits, rows, self.cost, room)
        present = forecast(groups, limits, rows, self.cost).rate if is_allowed_still else 0.0
        off = forecast(groups, plain, rows, self.cost).rate
        best = choose(groups, rows, self.cost, self.most, room)
        chosen = present
        if best.rate > max(present, off) * (1 + MARGIN):
            limits, chosen = best.limits, best.rate
        elif off > present * (1 + MARGIN):
            limits, chosen = plain, off
        for group, limit in zip(groups, limits, strict=True):
            self.limits[group.kind] = limit
        if any(limits):
            deeper = [min(2 * limit, self.most) for limit in limits]
            value = forecast(groups, deeper, rows, self.cost).rate
            self._others = [([0] * KINDS, max(0.0, 1 - off / chosen))]
            if value < chosen:
                self._others.append(([min(2 * limit, self.most) for limit in self.limits], 1 - value / chosen))

    def _groups(self, counts: Counts) -> list[Group]:
        """A group for each kind. A draft that some of its requests do not admit is as much less likely there."""
        by_kind: dict[int, list[int]] = {}
        for (kind, most), count in sorted(counts.items()):
            admitting = by_kind.setdefault(kind, [0] * MAX_DRAFT_TOKENS)
            for position in range(min(most, MAX_DRAFT_TOKENS)):
                admitting[position] += count
        groups = []
        for kind, admitting in by_kind.items():
            group, size = self._expected[kind], admitting[0]
            if admitting[self.most - 1] < size:
                parts = [count / size for count in admitting]
                group = Group(
                    kind,
                    size,
                    [chance * part for chance, part in zip(group.proposed, parts, strict=True)],
                    [chance * part for chance, part in zip(group.accepted, parts, strict=True)],
                )
            groups.append(group._replace(size=size))
        return groups

    def _probe(self, habits: Sequence[Habit], counts: Counts, steps: Sequence[int]) -> Grant:
        """Drafts for one of those that have none, in turns, as far as what that costs was saved."""
        limits = self.limits
        waiting = [
            (habit, gets)
            for habit, gets in zip(habits, steps, strict=True)
            if gets and habit.most and not limits[habit.kind]
        ]
        if not waiting or self._budget < 0:
            return Grant(limits)
        probed, gets = waiting[self._turn % len(waiting)]
        # Once the two turns come round together, one of them moves on: else some would get only few drafts for ever.
        slipped = self._turn // math.lcm(len(waiting), len(PROBE_DRAFTS))
        most = min(PROBE_DRAFTS[(self._turn + slipped) % len(PROBE_DRAFTS)], self.most, probed.most)
        key = probed.kind, most
        if key not in self._prices:
            self._prices[key] = self._price_of(probed, most, counts, len(habits))
        price = self._prices[key]
        affordable = gets if price * gets <= self._budget else int(self._budget / price)
        if affordable < min(LEAST_PROBE_STEPS, gets):
            return Grant(limits)
        self._turn += 1
        self._budget = max(0.0, self._budget - price * affordable)
        return Grant(limits, probed, most, affordable)

    def _price_of(self, probed: Habit, most: int, counts: Counts, rows: int) -> float:
        """Seconds that a step loses where one sequence has so many drafts more: what they take beside what the tokens
        that are hoped for would have taken anyway, or a part of it where the hope is great."""
        groups = self._groups(Counter(counts) - Counter({(probed.kind, probed.most): 1}))
        limits = [self.limits[group.kind] for group in groups]
        groups.append(self._expected[probed.kind])
        now = forecast(groups, [*limits, 0], rows, self.cost)
        then = forecast(groups, [*limits, most], rows, self.cost)
        return max(0.0, then.seconds - then.tokens / now.rate, LEAST_PRICE * (then.seconds - now.seconds))
