"""Hundreds of random requests through the core, with everything that can happen to them; every answer is checked."""

from __future__ import annotations

import random

import pytest

from quire.v1 import scheduler_pb2
from services.scheduler.state import Limits
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe


def random_submit(rng: random.Random, handle: int, most_output: int = 30) -> scheduler_pb2.Submit:
    shared = [7, 8, 9, 10, 11, 12, 13, 14, 15]
    prompt = shared[: rng.randint(0, 9)] + [rng.randint(1, 999) for _ in range(rng.randint(1, 50))]
    return submit(
        handle,
        prompt,
        rng.randint(1, most_output),
        ignore_eos=rng.random() < 0.5,
        choice_count=rng.choice([1, 1, 1, 2, 3]),
        priority=rng.choice([0, 0, 5]),
        stop=["x"] if rng.random() < 0.2 else [],
    )


def assert_idle(harness: Harness) -> None:
    """Everything ended and every block came back."""
    state = harness.state
    assert not state.request_ids
    assert not harness.gateway.requests
    assert state.live_count == 0
    for executor in state.executors:
        assert not (executor.running)
        assert not (executor.leaving)
        assert not (executor.appends)
        assert executor.asked_count == 0
        assert not harness.sims[executor.index].sequences
    harness.kv.assert_idle(harness.sims)
    for model in state.models.values():
        assert model.queue.peek(harness.now, 1e6) is None


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("executors", [1, 2])
def test_everything_at_once(seed: int, executors: int) -> None:
    """Chunked prompts, n > 1, cancels, stops, pauses, preemption, lost executors and a lost kvmanager."""
    rng = random.Random(seed)
    descriptions = [describe(executor_id=f"e{i}", blocks=40, max_sequences=5) for i in range(executors)]
    harness = Harness(*descriptions, limits=Limits(lookahead_tokens=8, step_tokens=16), seed=seed)
    run(harness, rng, [random_submit(rng, handle) for handle in range(1, 61)])


@pytest.mark.parametrize("seed", range(4))
def test_everything_at_once_with_a_real_kvmanager(seed: int) -> None:
    """Equal prompts wait for each other, and blocks go down to a disk and come up."""
    rng = random.Random(seed)
    descriptions = [describe(executor_id=f"e{i}", blocks=40, max_sequences=5, disk_blocks=60) for i in range(2)]
    harness = Harness(*descriptions, limits=Limits(lookahead_tokens=8, step_tokens=16), seed=seed, kv=RealKv())
    run(harness, rng, [random_submit(rng, handle) for handle in range(1, 61)])


def long_submit(rng: random.Random, handle: int) -> scheduler_pb2.Submit:
    prompt = [7] * rng.choice([0, 100, 256, 300, 400]) + [rng.randint(8, 9)] * rng.randint(1, 120)
    return submit(handle, prompt, rng.randint(1, 80), ignore_eos=rng.random() < 0.8, choice_count=rng.choice([1, 1, 2]))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("blocks", [(30, 24, 24), (19, 12, 14)], ids=["roomy", "tight"])
def test_everything_at_once_with_formats_by_age(seed: int, blocks: tuple[int, ...]) -> None:
    """Every token reads every block in the format that its own length prescribes, whatever happens around it."""
    rng = random.Random(seed)
    description = describe(
        blocks=blocks[0],
        block_size=32,
        max_sequences=4,
        max_step_tokens=160,
        kv_policy="hot:128,int8:256,int4",
        colder_blocks=blocks[1:],
    )
    harness = Harness(description, limits=Limits(lookahead_tokens=32), seed=seed, kv=RealKv())
    run(harness, rng, [long_submit(rng, handle) for handle in range(1, 31)])


def run(harness: Harness, rng: random.Random, submits: list[scheduler_pb2.Submit]) -> None:
    """Sends them one after the other, with random events between, and sees that every one is answered as alone."""
    executors = len(harness.sims)
    held: set[int] = set()
    for wanted in submits:
        harness.send(wanted)
        for _ in range(rng.randint(0, 30)):
            harness.step()
        open_handles = list(harness.gateway.requests)
        if not open_handles:
            continue
        victim = rng.choice(open_handles)
        client = harness.clients[victim]
        event = rng.random()
        if event < 0.15:
            harness.cancel(victim)
        elif event < 0.3 and client.submit.stop.stop:
            choice = rng.randrange(client.submit.choice_count)
            if choice not in client.ends and client.outputs[choice]:
                client.cut[choice] = len(client.outputs[choice])
                harness.send(stops=[scheduler_pb2.StopAt(handle=victim, choice=choice, output_length=1)])
        elif event < 0.4:
            held ^= {victim}
            harness.send(holds=[scheduler_pb2.Hold(handle=victim, held=victim in held)])
        elif event < 0.46:
            index = rng.randrange(executors)
            harness.lose(index)
            harness.turn()
            harness.step()
            harness.open(index)
            harness.turn()
        elif event < 0.49:
            harness.restart_kv()
            harness.turn()
        elif event < 0.52:
            harness.reconnect_kv()
            harness.turn()
    harness.send(holds=[scheduler_pb2.Hold(handle=h, held=False) for h in held])
    harness.settle()
    for handle, client in harness.clients.items():
        assert client.done, f"request {handle} has not ended"
        assert_correct(harness, handle)
    assert_idle(harness)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("drafts", "weighs"), [(None, False), (None, True), (1, False), (4, False), (16, False)])
def test_everything_at_once_with_drafts(seed: int, drafts: int | None, weighs: bool) -> None:
    """Steps that yield several tokens: nothing is granted past blocks or budgets, and all answers stay the same."""
    rng = random.Random(seed)
    description = describe(blocks=60, max_sequences=5, disk_blocks=60, most_drafts=16, weighs_drafts=weighs)
    limits = Limits(lookahead_tokens=8, step_tokens=16, speculation=drafts)
    harness = Harness(description, limits=limits, seed=seed, kv=RealKv())
    harness.sims[0].draft_quality = rng.choice([0.2, 0.7, 1.0])
    run(harness, rng, [random_submit(rng, handle) for handle in range(1, 41)])
    assert (drafts is None and not weighs) or harness.sims[0].accepted_count > 0


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once_with_drafts_and_formats_by_age(seed: int) -> None:
    """No step crosses a change of a block table, however many drafts are accepted."""
    rng = random.Random(seed)
    description = describe(
        blocks=30,
        block_size=32,
        max_sequences=4,
        max_step_tokens=160,
        kv_policy="hot:128,int8:256,int4",
        colder_blocks=(24, 24),
        most_drafts=8,
    )
    harness = Harness(description, limits=Limits(lookahead_tokens=32, speculation=5), seed=seed, kv=RealKv())
    run(harness, rng, [long_submit(rng, handle) for handle in range(1, 31)])
    assert harness.sims[0].accepted_count > 0


def test_preemption_keeps_every_token_once() -> None:
    """E1: a pool for 2.5 of 6 long sequences; each answer equals the one computed alone."""
    harness = Harness(describe(blocks=25, max_sequences=6), limits=Limits(lookahead_tokens=4))
    for handle in range(1, 7):
        harness.send(submit(handle, [handle] * 10, 30, ignore_eos=True))
    harness.settle()
    assert harness.state.executors[0].counters.preemptions > 0
    for handle in range(1, 7):
        assert_correct(harness, handle)
    assert_idle(harness)


def test_cancel_in_every_state_gives_all_blocks_back() -> None:
    """D2: a cancel after any number of events of a request's life."""
    for moment in range(60):
        harness = Harness(describe(blocks=16), seed=moment)
        harness.send(submit(1, list(range(1, 30)), 12, ignore_eos=True), submit(2, [5] * 3, 9, ignore_eos=True))
        for _ in range(moment):
            harness.step()
        if 1 in harness.gateway.requests:
            harness.cancel(1)
        harness.settle()
        assert harness.clients[1].done
        assert_correct(harness, 2)
        assert_idle(harness)


def test_lost_results_are_computed_again() -> None:
    """E3: an executor is lost at any moment; the answer goes on with no token lost or repeated."""
    for moment in range(0, 120, 3):
        harness = Harness(describe(), seed=moment)
        harness.send(submit(1, [3, 1, 4, 1, 5], 20, ignore_eos=True, choice_count=2))
        for _ in range(moment):
            harness.step()
        harness.lose(0)
        harness.turn()
        harness.open(0)
        harness.turn()
        harness.settle()
        assert_correct(harness, 1)
        assert_idle(harness)
