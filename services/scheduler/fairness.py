"""What each tenant was served by a model: virtual time, by which those who wait take turns.

The Virtual Token Counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): whoever waits and was
served least by weight is next, and who begins to wait gets no credit for the time in which it wanted nothing.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.scheduler.order import Line
    from services.scheduler.sequence import Sequence

IDLE_ACCOUNTS = 1024
"""So many tenants are known before those that want nothing now are forgotten."""
SHARE_SECONDS, MARK_SECONDS = 60.0, 10.0
"""Span over which shares are stated, and how exactly."""
PRESENT_SECONDS = 30.0
"""So long after its last request a tenant is expected to come again."""


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """One tenant at one model. A cost is in prompt tokens.

    Prompts count as served once blocks are asked for, or a turn with room for several would choose one tenant alone.
    What was cached is taken back with the answer; what is computed again after a preemption counts once.
    """

    tenant: str
    output_cost: float  # of a token
    weight: float = 1.0
    lift: float = 0.0  # virtual time that passed while it wanted nothing
    prompt_tokens: int = 0
    output_tokens: int = 0
    live_count: int = 0  # sequences that have not ended
    running_count: int = 0  # of these, those with blocks
    queued_count: int = 0  # of these, those in `lines`, or asked for since
    lines: dict[int, Line] = field(default_factory=dict)  # where it stands in the queue, by level

    @property
    def waiting_count(self) -> int:
        return self.live_count - self.running_count

    @property
    def cost(self) -> float:
        return self.prompt_tokens + self.output_cost * self.output_tokens

    @property
    def virtual_time(self) -> float:
        """Cost served per weight: the least is next, the greatest yields first."""
        return self.lift + self.cost / self.weight

    def set_weight(self, weight: float) -> None:
        """Counts from now on: what was served keeps its weight."""
        if weight != self.weight:
            self.lift += self.cost / self.weight - self.cost / weight
            self.weight = weight

    def lift_to(self, virtual_time: float) -> None:
        self.lift += max(0.0, virtual_time - self.virtual_time)

    def ask(self, sequence: Sequence) -> None:
        """Blocks were asked for."""
        if not sequence.charged:
            self.queued_count += 1
            self.prompt_tokens += len(sequence.token_ids)

    def grant(self, sequence: Sequence, cached_tokens: int) -> None:
        """They were granted."""
        if not sequence.charged:
            sequence.charged = True
            self.queued_count -= 1
            self._take_back(cached_tokens)

    def give_back(self, sequence: Sequence) -> None:
        """They were not granted, or are not wanted any more."""
        if not sequence.charged:
            self.queued_count -= 1
            self._take_back(len(sequence.token_ids))

    def _take_back(self, tokens: int) -> None:
        if tokens:
            self.prompt_tokens -= tokens
            for line in self.lines.values():
                line.offer()


class Ledger:
    """All tenants' accounts at one model."""

    def __init__(self, output_cost: float) -> None:
        self._output_cost = output_cost
        self._accounts: dict[str, Account] = {}
        self._sweep_at = IDLE_ACCOUNTS
        self._marks: deque[tuple[float, dict[Account, float]]] = deque()  # (seconds, costs)
        self._present: dict[Account, tuple[float, float]] = {}  # when last seen and the weight, in that order
        self._present_weight = 0.0

    def open(self, tenant: str, weight: float, now: float) -> Account:
        """The account of a tenant that has a request, with this weight from now on. `now` in seconds."""
        account = self._accounts.get(tenant)
        if account is None:
            if len(self._accounts) >= self._sweep_at:
                self._sweep(now)
            account = self._accounts[tenant] = Account(tenant, self._output_cost)
        account.set_weight(weight)
        self._leave(account)
        self._enter(account, now)
        return account

    def share(self, account: Account, now: float) -> float:
        """Its part, 0 to 1, by weight among those that want something or did lately."""
        while (first := next(iter(self._present), account)) is not account:
            if self._present[first][0] > now - PRESENT_SECONDS:
                break
            self._leave(first)
            if first.live_count:
                self._enter(first, now)
        return account.weight / max(account.weight, self._present_weight)

    def accounts(self) -> list[Account]:
        return list(self._accounts.values())

    def waiting_count(self, tenant: str) -> int:
        """Sequences of a tenant that hold no blocks."""
        account = self._accounts.get(tenant)
        return account.waiting_count if account is not None else 0

    def _enter(self, account: Account, now: float) -> None:
        self._present[account] = now, account.weight
        self._present_weight += account.weight

    def _leave(self, account: Account) -> None:
        _, weight = self._present.pop(account, (0.0, 0.0))
        self._present_weight -= weight

    def _sweep(self, now: float) -> None:
        """Forgets those that want nothing."""
        self._accounts = {name: known for name, known in self._accounts.items() if known.live_count}
        self._sweep_at = max(IDLE_ACCOUNTS, 2 * len(self._accounts))
        self._present, self._present_weight = {}, 0.0
        for account in self._accounts.values():
            self._enter(account, now)

    def mark(self, now: float) -> None:
        """Remembers what was served by now, where that is due. `now` in seconds."""
        if self._marks and now < self._marks[-1][0] + MARK_SECONDS:
            return
        self._marks.append((now, {account: account.cost for account in self._accounts.values()}))
        while self._marks[0][0] < now - SHARE_SECONDS:
            self._marks.popleft()

    def shares(self) -> dict[Account, float]:
        """Each one's part, 0 to 1, of what was served lately."""
        before = self._marks[0][1] if self._marks else {}
        # What was taken back since may be more than what was served.
        costs = {account: max(0.0, account.cost - before.get(account, 0.0)) for account in self._accounts.values()}
        total = sum(costs.values())
        return {account: cost / total if total > 0 else 0.0 for account, cost in costs.items()}
