"""What each tenant gets where several want more than there is."""

from __future__ import annotations

from itertools import pairwise

from quire.v1 import scheduler_pb2
from services.scheduler.fairness import IDLE_ACCOUNTS, Account, Ledger
from services.scheduler.policy import Policy, first_come
from services.scheduler.sequence import Phase
from services.scheduler.state import Limits, Model
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import place

COST = Limits().output_cost


def shared(policy: Policy | None = None, **fields: int) -> Harness:
    """One executor that several tenants shall share."""
    limits = Limits(lookahead_tokens=8) if policy is None else Limits(lookahead_tokens=8, policy=policy)
    settings: dict[str, int] = {"blocks": 400, "max_sequences": 4, "max_step_tokens": 64} | fields
    return Harness(describe(**settings), limits=limits)  # type: ignore[arg-type]


def model_of(harness: Harness) -> Model:
    (model,) = harness.state.models.values()
    return model


def account_of(harness: Harness, tenant: str) -> Account:
    return next(account for account in model_of(harness).ledger.accounts() if account.tenant == tenant)


def served(harness: Harness) -> dict[str, float]:
    """Cost of all that clients saw begin or come: counted apart from the scheduler's own books."""
    costs: dict[str, float] = {}
    for client in harness.clients.values():
        prompt = len(client.submit.prompt_token_ids) if client.started else 0
        output = sum(len(tokens) for tokens in client.outputs.values())
        costs[client.submit.tenant] = costs.get(client.submit.tenant, 0.0) + prompt + COST * output
    return costs


def backlogged(harness: Harness, *tenants: str) -> bool:
    return all(account_of(harness, tenant).queued_count for tenant in tenants)


def windows(harness: Harness, seconds: float, *tenants: str) -> list[list[float]]:
    """What each tenant was served in each span of time, while all of them have more that waits."""
    marks = [served(harness)]
    at = harness.now
    while backlogged(harness, *tenants) and harness.step():
        if harness.now >= at + seconds:
            at = harness.now
            marks.append(served(harness))
    return [[after[tenant] - before[tenant] for tenant in tenants] for before, after in pairwise(marks)]


def jain(shares: list[float]) -> float:
    """1 where all are equal, 1/n where one has all (Jain, Chiu and Hawe, 1984)."""
    return sum(shares) ** 2 / (len(shares) * sum(share**2 for share in shares))


def flood(harness: Harness, tenant: str, first: int, count: int, prompt: int, output: int, **fields: object) -> None:
    """`count` requests at once, with tokens in prompt and output as stated."""
    handles = range(first, first + count)
    made = (submit(h, [h % 900 + 1] * prompt, output, ignore_eos=True, tenant=tenant, **fields) for h in handles)
    harness.send(*made)


def test_a_tenant_who_floods_gets_no_more_than_another() -> None:
    harness = shared()
    flood(harness, "a", 1000, 1500, 8, 8)
    flood(harness, "b", 1, 150, 8, 8)
    found = windows(harness, 0.35, "a", "b")
    assert len(found) >= 3
    assert min(map(jain, found)) >= 0.95


def test_without_the_fair_order_the_flood_has_it_all() -> None:
    """What the test above would see if it could see nothing."""
    harness = shared(first_come())
    flood(harness, "a", 1000, 60, 20, 30)
    flood(harness, "b", 1, 20, 20, 30)
    while model_of(harness).queue.peek(harness.now, 1e6) is not None and harness.step():
        if served(harness)["b"]:
            break
    assert served(harness)["a"] >= 52 * (20 + 30 * COST)


def test_shares_follow_tokens_and_not_requests() -> None:
    """J2: one tenant's requests are eight times as long as the other's."""
    harness = shared()
    flood(harness, "long", 1000, 50, 32, 32)
    flood(harness, "short", 1, 400, 4, 4)
    found = windows(harness, 0.8, "long", "short")
    assert len(found) >= 3
    assert min(map(jain, found)) >= 0.95


def test_a_light_tenant_waits_for_one_place_and_not_for_a_queue() -> None:
    """J2: two hundred long requests are there before; then somebody sends a short one every second."""
    harness = shared(max_sequences=4)
    flood(harness, "a", 1000, 200, 60, 40)
    for handle in range(1, 30):
        for _ in range(40):
            harness.step()
        last = max(request.lead.sequence_id for request in harness.gateway.requests.values())  # of those asked for
        harness.send(submit(handle, [1, 2, 3], 2, ignore_eos=True, tenant="b"))
        sequence = harness.gateway.requests[handle].lead
        while sequence.phase is Phase.WAITING:
            assert harness.step()
        assert sequence.sequence_id <= last + 2, "more than one of the others came before it"
    assert backlogged(harness, "a")
    harness.send(cancels=[scheduler_pb2.Cancel(handle=handle) for handle in range(1000, 1200)])
    harness.settle()
    for handle in range(1, 30):
        assert_correct(harness, handle)


def test_shares_follow_weights() -> None:
    harness = shared()
    flood(harness, "a", 1000, 150, 8, 8, tenant_weight=1.0)
    flood(harness, "b", 1, 350, 8, 8, tenant_weight=3.0)
    found = windows(harness, 0.6, "a", "b")
    assert len(found) >= 3
    for a, b in found:
        assert jain([a, b / 3]) >= 0.95


def test_several_choices_do_not_count_as_one() -> None:
    """A tenant that asks for four choices at a time gets no more tokens than one that asks for one."""
    harness = shared()
    flood(harness, "many", 1000, 40, 10, 15, choice_count=4)
    flood(harness, "one", 1, 60, 10, 15)
    marks = account_of(harness, "many"), account_of(harness, "one")
    while backlogged(harness, "one") and marks[0].waiting_count and harness.step():
        pass
    assert jain([account.cost for account in marks]) >= 0.95
    assert marks[0].output_tokens > 300


def test_who_wanted_nothing_saves_nothing_up() -> None:
    """A tenant that comes late shares from then on; what others were served before does not count for it."""
    harness = shared()
    flood(harness, "a", 1000, 300, 8, 8)
    for _ in range(600):
        harness.step()
    flood(harness, "b", 1, 140, 8, 8)
    found = windows(harness, 0.35, "a", "b")
    assert len(found) >= 3
    assert min(map(jain, found)) >= 0.95


def test_what_is_computed_again_counts_once() -> None:
    harness = shared(blocks=25, max_sequences=6)
    flood(harness, "a", 1, 6, 10, 30)
    harness.settle()
    account = account_of(harness, "a")
    (executor,) = harness.state.executors
    assert executor.counters.preemptions > 0
    assert executor.counters.prefix_query_tokens == 60, "nor is it looked for in the cache again, for those who count"
    assert (account.prompt_tokens, account.output_tokens) == (60, 180)
    assert (account.live_count, account.running_count, account.queued_count) == (0, 0, 0)


def test_what_was_cached_does_not_count() -> None:
    harness = shared()
    for handle in (1, 2):
        harness.send(submit(handle, [7] * 41, 3, ignore_eos=True, tenant="a"))
        harness.settle()
    assert account_of(harness, "a").prompt_tokens == 41 + 1


def test_what_was_refused_or_cancelled_before_it_ran_does_not_count() -> None:
    harness = shared(blocks=12)
    harness.send(submit(1, [1] * 30, 8, ignore_eos=True, tenant="a"))
    harness.send(submit(2, [2] * 30, 8, ignore_eos=True, tenant="b"))
    while not harness.kv.refusals:
        harness.step()
    while harness.from_kv:
        harness.step()
    assert account_of(harness, "b").prompt_tokens == 0
    harness.cancel(2)
    harness.settle()
    assert account_of(harness, "b").cost == 0
    assert account_of(harness, "a").prompt_tokens == 30


def test_a_refusal_costs_no_tenant_its_turn() -> None:
    """Else small requests of others would take whatever comes free, for ever, before a large one."""
    harness = shared(blocks=12, max_sequences=2)
    harness.send(submit(1, [1] * 30, 8, ignore_eos=True, tenant="a"))
    place(harness)
    harness.send(
        submit(2, [2] * 30, 8, ignore_eos=True, tenant="b"), submit(3, [3] * 4, 8, ignore_eos=True, tenant="a")
    )
    place(harness)
    assert harness.kv.refusals == 1
    following = model_of(harness).queue.peek(harness.now, 1e6)
    assert following is not None
    assert following.request.tenant == "b"
    assert account_of(harness, "b").virtual_time < account_of(harness, "a").virtual_time
    harness.settle()
    for handle in (1, 2, 3):
        assert_correct(harness, handle)


def test_a_new_weight_counts_from_now_on() -> None:
    account = Account("a", COST)
    account.prompt_tokens = 100
    account.set_weight(4.0)
    assert account.virtual_time == 100
    account.output_tokens = 10
    assert account.virtual_time == 100 + 10 * COST / 4


def test_a_ledger_forgets_those_that_want_nothing_and_states_shares() -> None:
    ledger = Ledger(COST)
    busy = ledger.open("busy", 1.0, 0.0)
    busy.live_count = 1
    for number in range(3 * IDLE_ACCOUNTS):
        ledger.open(f"t{number}", 1.0, 0.0)
    assert len(ledger.accounts()) <= IDLE_ACCOUNTS + 1
    assert ledger.open("busy", 1.0, 0.0) is busy
    ledger.mark(0.0)
    busy.prompt_tokens, ledger.open("other", 1.0, 0.0).output_tokens = 100, 50
    assert ledger.shares()[busy] == 0.5
    for at in range(10, 130, 10):
        ledger.mark(float(at))
    busy.prompt_tokens += 10
    assert ledger.shares()[busy] == 1.0
    busy.prompt_tokens -= 60
    assert ledger.shares()[busy] == 0.0, "what was taken back is no share below nothing"


def test_a_first_token_does_not_wait_behind_the_prompts_of_a_flood() -> None:
    """Prompts are placed as they are computed: what is placed is out of the fair order."""
    harness = shared(blocks=4000, max_sequences=64, max_step_tokens=64)
    flood(harness, "a", 1000, 60, 64, 8)
    while not harness.state.executors[0].running:
        harness.step()
    harness.send(submit(1, [1] * 64, 8, ignore_eos=True, tenant="b"))

    def begun() -> int:
        return sum(any(client.outputs.values()) for client in harness.clients.values())

    before = begun()
    while not any(harness.clients[1].outputs.values()):
        assert harness.step()
    assert before < 10
    assert begun() - before <= 6
