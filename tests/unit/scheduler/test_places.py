"""Places that stay free for tenants that hold less than their share."""

from __future__ import annotations

from services.scheduler.fairness import IDLE_ACCOUNTS, PRESENT_SECONDS, Ledger
from services.scheduler.places import BELOW_SHARE
from services.scheduler.policy import first_come
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.test_batcher import place
from tests.unit.scheduler.test_fairness import account_of, flood, model_of, shared

PLACES, KEPT = 16, 2


def full(*, seen: bool = True, policy_keeps: bool = True) -> Harness:
    """One tenant's flood on an executor, as much of it as may run; another tenant was `seen` before."""
    harness = shared(None if policy_keeps else first_come(), max_sequences=PLACES, max_step_tokens=512)
    if seen:
        harness.send(submit(1, [1, 2, 3], 2, ignore_eos=True, tenant="light"))
        harness.settle()
    flood(harness, "flood", 1000, 60, 4, 200)
    place(harness)
    return harness


def running(harness: Harness, tenant: str) -> int:
    return account_of(harness, tenant).running_count


def test_a_tenant_alone_takes_all_places() -> None:
    assert running(full(seen=False), "flood") == PLACES


def test_the_last_places_wait_for_others_that_were_there_lately() -> None:
    harness = full()
    assert running(harness, "flood") == PLACES - KEPT
    for handle in (2, 3):
        harness.send(submit(handle, [5, 6, 7], 100, ignore_eos=True, tenant="light"))
    while running(harness, "light") < KEPT:
        assert harness.step()
    assert running(harness, "flood") == PLACES - KEPT
    assert not any(client.ends for handle, client in harness.clients.items() if handle > 1), "nobody had to end"


def test_not_for_ever() -> None:
    harness = full()
    harness.now += PRESENT_SECONDS
    harness.send(submit(2000, [9, 9, 9, 9], 200, ignore_eos=True, tenant="flood"))
    place(harness)
    assert running(harness, "flood") == PLACES


def test_nor_in_the_order_of_arrival() -> None:
    assert running(full(policy_keeps=False), "flood") == PLACES


def test_places_below_the_share_are_for_everyone() -> None:
    """Two that flood fill all of them, however they take turns."""
    harness = full()
    flood(harness, "light", 100, 60, 4, 200)
    while running(harness, "light") < KEPT:
        assert harness.step()
    assert (running(harness, "light"), running(harness, "flood")) == (KEPT, PLACES - KEPT)
    harness.settle()
    assert not harness.state.running


def test_shares_go_by_the_weights_of_those_present() -> None:
    ledger = Ledger(1.0)
    heavy, light = ledger.open("heavy", 3.0, now=0.0), ledger.open("light", 1.0, now=0.0)
    assert (ledger.share(heavy, 1.0), ledger.share(light, 1.0)) == (0.75, 0.25)
    ledger.open("heavy", 1.0, now=20.0)
    assert ledger.share(heavy, 20.0) == 0.5
    assert ledger.share(heavy, PRESENT_SECONDS + 1) == 1.0
    light.live_count = 1
    ledger.open("light", 1.0, now=60.0)
    ledger.open("heavy", 1.0, now=100.0)
    assert ledger.share(heavy, 100.0) == 0.5, "who still wants something is there"


def test_the_forgotten_are_not_present() -> None:
    ledger = Ledger(1.0)
    busy = ledger.open("busy", 1.0, now=0.0)
    busy.live_count = 1
    for number in range(IDLE_ACCOUNTS):
        ledger.open(f"t{number}", 1.0, now=0.0)
    assert ledger.share(busy, 0.0) > 0.3


def test_what_none_of_the_waiting_may_have_is_not_kept() -> None:
    """Of two tenants that wait, the one over its share has the higher priority: nobody comes before it."""
    harness = shared(max_sequences=PLACES, max_step_tokens=512)
    harness.send(submit(1, [1, 2, 3], 2, ignore_eos=True, tenant="light"))
    harness.settle()
    harness.send(submit(2, [1, 2, 3], 2, ignore_eos=True, tenant="light"))
    flood(harness, "flood", 1000, 60, 4, 200, priority=1)
    flood(harness, "light", 10, 10, 4, 200)
    while running(harness, "flood") < PLACES - 1:
        assert harness.step()
    while running(harness, "light"):
        assert harness.step()
    place(harness)
    assert running(harness, "flood") == PLACES


def test_who_may_take_a_place_does_not_wait_behind_who_may_not() -> None:
    """The light tenant was served far more of late, so the flood is next; but what is left is not for the flood."""
    harness = full()
    account_of(harness, "light").prompt_tokens += 100_000
    harness.send(submit(2, [5, 6, 7], 100, ignore_eos=True, tenant="light"))
    head = model_of(harness).queue.peek(harness.now, 1e6)
    while running(harness, "light") == 0:
        assert harness.step()
    assert head is not None
    assert head.request.tenant == "flood"
    assert model_of(harness).admissions[-1].why == BELOW_SHARE
    assert running(harness, "flood") == PLACES - KEPT
    assert not any(client.ends for handle, client in harness.clients.items() if handle > 1), "nobody had to end"
    harness.settle()
    for handle in (2, 1000, 1059):
        assert_correct(harness, handle)
