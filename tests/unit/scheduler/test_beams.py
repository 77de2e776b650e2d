"""Beam search through the core: its answers are those of a plain search, whatever happens to its sequences."""

from __future__ import annotations

import random

import pytest

from quire.v1 import executor_pb2, kvmanager_pb2, scheduler_pb2, types_pb2
from services.scheduler import epochs
from services.scheduler.reserve import take
from services.scheduler.state import Limits
from tests.unit.scheduler.beam_reference import Answer, beam_search
from tests.unit.scheduler.real_kv import RealKv
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import EOS, describe, log_probabilities
from tests.unit.scheduler.test_random_load import assert_idle, random_submit

COPY = executor_pb2.BLOCK_OPERATION_KIND_COPY
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
INVALID, UNSUPPORTED = "INVALID_FIELD", "UNSUPPORTED"


def beams(handle: int, prompt: list[int], max_tokens: int, width: int, **fields: object) -> scheduler_pb2.Submit:
    return submit(handle, prompt, max_tokens, beam_width=width, **({"choice_count": width} | fields))


def truth(wanted: scheduler_pb2.Submit) -> list[Answer]:
    stop = wanted.stop
    ends = {*stop.stop_token_ids, *([] if stop.ignore_eos else [EOS])}
    return beam_search(
        log_probabilities,
        list(wanted.prompt_token_ids),
        wanted.beam_width,
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        ends=ends,
        length_penalty=wanted.length_penalty if wanted.HasField("length_penalty") else 1.0,
    )


def assert_answers(harness: Harness, handle: int) -> None:
    client = harness.clients[handle]
    expected = truth(client.submit)[: client.submit.choice_count]
    found = [(client.outputs[c], client.ends[c].reason, client.ends[c].cumulative_logprob) for c in client.outputs]
    assert [(ids, reason) for ids, reason, _ in found] == [(a.tokens, STOP if a.ends else LENGTH) for a in expected]
    assert [total for _, _, total in found] == [pytest.approx(a.total, rel=1e-12) for a in expected]


def random_beams(rng: random.Random, handle: int, most_output: int = 12) -> scheduler_pb2.Submit:
    width = rng.choice([1, 2, 3, 4, 5])
    max_tokens = rng.randint(1, most_output)
    wanted = beams(
        handle,
        [rng.randint(1, 999) for _ in range(rng.randint(1, 40))],
        max_tokens,
        width,
        choice_count=rng.randint(1, width),
        ignore_eos=rng.random() < 0.3,
    )
    wanted.stop.min_tokens = rng.choice([0, 0, min(3, max_tokens), max_tokens])
    wanted.stop.stop_token_ids.extend(rng.sample(range(1, 1000), rng.choice([0, 0, 40])))
    if rng.random() < 0.5:
        wanted.length_penalty = rng.choice([-1.0, 0.0, 0.5, 2.0])
    return wanted


@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_a_plain_search(seed: int) -> None:
    rng = random.Random(seed)
    harness = Harness(describe(blocks=200, max_sequences=32), seed=seed, kv=RealKv())
    for handle in range(1, 13):
        harness.send(random_beams(rng, handle))
    harness.settle()
    for handle in harness.clients:
        assert_answers(harness, handle)
    assert_idle(harness)


@pytest.mark.parametrize("real_kv", [False, True], ids=["plain", "real"])
@pytest.mark.parametrize("seed", range(4))
def test_answers_stay_the_same_whatever_happens(seed: int, real_kv: bool) -> None:
    """Beside others, with room for a part of the paths, cancels, pauses, lost executors, a lost kvmanager."""
    rng = random.Random(seed)
    descriptions = [describe(executor_id=f"e{i}", blocks=24, max_sequences=4) for i in range(2)]
    kv = RealKv() if real_kv else None
    harness = Harness(*descriptions, limits=Limits(lookahead_tokens=8, step_tokens=16), seed=seed, kv=kv)
    held: set[int] = set()
    for handle in range(1, 31):
        harness.send(random_beams(rng, handle) if handle % 2 else random_submit(rng, handle, 12))
        for _ in range(rng.randint(0, 40)):
            harness.step()
        open_handles = list(harness.gateway.requests)
        event, index = rng.random(), rng.randrange(2)
        if event < 0.15 and open_handles:
            harness.cancel(rng.choice(open_handles))
        elif event < 0.3 and open_handles:
            held ^= {victim := rng.choice(open_handles)}
            harness.send(holds=[scheduler_pb2.Hold(handle=victim, held=victim in held)])
        elif event < 0.4:
            harness.lose(index)
            harness.turn()
            harness.step()
            harness.open(index)
            harness.turn()
        elif event < 0.45:
            harness.restart_kv()
            harness.turn()
        elif event < 0.5:
            harness.reconnect_kv()
            harness.turn()
    harness.send(holds=[scheduler_pb2.Hold(handle=handle, held=False) for handle in held])
    harness.settle()
    for handle, client in harness.clients.items():
        assert client.done, f"request {handle} has not ended"
        if not client.submit.beam_width:
            assert_correct(harness, handle)
        elif not client.cancelled:
            assert_answers(harness, handle)
    assert_idle(harness)


def test_paths_take_turns_where_there_is_room_for_one() -> None:
    """Eight paths of up to 44 tokens in 12 blocks of 4: those that rest make way, and no answer changes for it."""
    for kv in (None, RealKv()):
        harness = Harness(describe(blocks=12, max_sequences=3), kv=kv)
        harness.send(beams(1, list(range(1, 31)), 14, 8, ignore_eos=True))
        harness.settle()
        assert harness.state.executors[0].counters.preemptions > 0
        assert_answers(harness, 1)
        assert_idle(harness)


def test_a_search_goes_on_beside_one_that_its_client_holds() -> None:
    """It has one place for three paths: the other one stands still, for as long as the client likes."""
    harness = Harness(describe(blocks=64, max_sequences=2), kv=RealKv())
    harness.send(submit(1, [9, 9], 60, ignore_eos=True), beams(2, [1, 2, 3], 6, 3, ignore_eos=True))
    while not harness.clients[1].outputs[0]:
        assert harness.step()
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=True)])
    harness.settle()
    assert_answers(harness, 2)
    assert not harness.clients[1].done
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=False)])
    harness.settle()
    assert_correct(harness, 1)
    assert_idle(harness)


@pytest.mark.parametrize("blocks", range(7, 12))
def test_a_search_goes_on_beside_a_held_one_that_leaves_few_blocks(blocks: int) -> None:
    """Its forks are refused while others are asked for: the last answer lets a path that rests make way."""
    harness = Harness(describe(blocks=blocks, max_sequences=6), limits=Limits(lookahead_tokens=1), kv=RealKv())
    harness.send(submit(1, [9, 9], 20, ignore_eos=True))
    while len(harness.clients[1].outputs[0]) < 8:
        assert harness.step()
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=True)])
    harness.send(beams(2, [1, 2, 3], 6, 4, ignore_eos=True))
    harness.settle()
    assert_answers(harness, 2)
    harness.send(holds=[scheduler_pb2.Hold(handle=1, held=False)])
    harness.settle()
    assert_correct(harness, 1)
    assert_idle(harness)


def test_a_fork_that_finds_nothing_where_it_was_to_be_holds_up_nobody() -> None:
    """What was said of one executor says nothing of the model: the fork waits for any place, and others go on."""
    harness = Harness(*(describe(executor_id=f"e{i}", blocks=64) for i in range(2)), kv=RealKv())
    harness.send(beams(1, [1, 2, 3], 9, 3, ignore_eos=True))
    asked = harness.state.asked
    while not any(question.is_fork for question in asked.values()):
        assert harness.step()
    stay, question = next((stay, question) for stay, question in asked.items() if question.is_fork)
    for message in harness.to_kv:  # it gets another answer than that of the kvmanager
        kept = [reservation for reservation in message.reservations if reservation.sequence_id != stay]
        del message.reservations[:]
        message.reservations.extend(kept)
    refused = kvmanager_pb2.ReservationResult(sequence_id=stay, outcome=kvmanager_pb2.RESERVATION_OUTCOME_NO_EXECUTOR)
    take(harness.state, kvmanager_pb2.ReserveResponse(reservations=[refused]), harness.now)
    assert harness.state.models["m"].retry_at is None
    harness.send(submit(2, [7, 7], 5))
    again = [other for other in asked.values() if other.sequence is question.sequence]
    assert [len(other.executors) for other in again] == [2]
    assert any(other.sequence is not None and other.sequence.request.handle == 2 for other in asked.values())
    harness.settle()
    assert_answers(harness, 1)
    assert_correct(harness, 2)
    assert_idle(harness)


def test_forks_share_full_blocks_and_copy_one() -> None:
    """While nothing is preempted, each path takes one block of its own, and nothing is computed twice."""
    harness = Harness(describe(blocks=64), kv=RealKv())
    harness.send(beams(1, list(range(1, 23)), 6, 4, ignore_eos=True))
    most = 0
    while harness.step():
        pool = harness.kv.manager.executors["e0"].pools[0]  # type: ignore[union-attr]
        most = max(most, pool.blocks.leased_count)
    assert_answers(harness, 1)
    # 22 + 5 tokens fill 7 blocks: 5 that all share, then two of each path, and one more while paths replace others.
    assert most <= 5 + 2 * 4 + 4
    assert harness.sims[0].computed_tokens == 22 + 5 * 4
    assert harness.sims[0].copy_count > 0


def test_choices_of_one_prompt_are_forks_of_the_first() -> None:
    """n = 4: the prompt is computed once, but for its last token; full blocks are shared, the rest is copied."""
    harness = Harness(describe(blocks=64), kv=RealKv())
    harness.send(submit(1, list(range(1, 23)), 12, ignore_eos=True, choice_count=4))
    harness.settle()
    assert_correct(harness, 1)
    assert harness.sims[0].computed_tokens == 22 + 3 + 4 * 11
    assert harness.sims[0].copy_count == 3
    assert_idle(harness)


def test_cancel_and_deadline_at_any_moment_give_all_blocks_back() -> None:
    for moment in range(0, 90, 3):
        harness = Harness(describe(blocks=20, max_sequences=4), seed=moment, kv=RealKv())
        harness.send(beams(1, list(range(1, 20)), 8, 4, ignore_eos=True), beams(2, [7] * 9, 8, 3, deadline_ms=10**6))
        for _ in range(moment):
            harness.step()
        if 1 in harness.gateway.requests:
            harness.cancel(1)
        harness.now += 2000.0 * (moment % 2)
        harness.turn()
        harness.settle()
        assert harness.clients[1].done
        assert harness.clients[2].done
        assert_idle(harness)


def test_scores_go_with_each_path() -> None:
    harness = Harness(describe(blocks=64))
    wanted = beams(1, [4, 5, 6], 5, 3)
    wanted.logprobs.output_count = 2
    harness.send(wanted)
    harness.settle()
    for choice, answer in enumerate(truth(wanted)):
        scores = harness.clients[1].logprobs[choice]
        assert sum(scores.chosen) == pytest.approx(answer.total)
        assert len(scores.top_token_ids) == 2 * len(answer.tokens)
        for at, token in enumerate(answer.tokens):
            values = log_probabilities([4, 5, 6, *answer.tokens[:at]])
            assert scores.chosen[at] == values[token]
            assert scores.ranks[at] == 1 + (values > values[token]).sum()
            assert scores.top_logprobs[2 * at] == values.max()


@pytest.mark.parametrize(
    ("change", "field", "reason"),
    [
        (lambda s: setattr(s, "beam_width", 33), "beam_width", INVALID),
        (lambda s: setattr(s, "beam_width", -1), "beam_width", INVALID),
        (lambda s: setattr(s, "choice_count", 3), "choice_count", INVALID),
        (lambda s: setattr(s, "length_penalty", 10.5), "length_penalty", INVALID),
        (lambda s: setattr(s, "length_penalty", float("nan")), "length_penalty", INVALID),
        (lambda s: (setattr(s, "beam_width", 0), setattr(s, "length_penalty", 1.0)), "length_penalty", INVALID),
        (lambda s: setattr(s.sampling, "temperature", 0.7), "sampling.temperature", INVALID),
        (lambda s: setattr(s.sampling, "top_k", 5), "sampling.top_k", INVALID),
        (lambda s: setattr(s.sampling, "frequency_penalty", 0.1), "sampling.frequency_penalty", INVALID),
        (lambda s: s.sampling.logit_bias.update({5: 1.0}), "sampling.logit_bias", INVALID),
        (lambda s: s.stop.stop.append("x"), "stop.stop", UNSUPPORTED),
        (lambda s: setattr(s.logprobs, "prompt_count", 0), "logprobs.prompt_count", UNSUPPORTED),
        (lambda s: s.stop.stop_token_ids.extend(range(1, 999)), "beam_width", INVALID),
        (lambda s: s.progress.add(choice=0, token_ids=[5]), "progress", UNSUPPORTED),
    ],
)
def test_what_contradicts_a_search_is_refused_by_name(change, field: str, reason: str) -> None:
    harness = Harness(describe())
    bad = beams(1, [1], 5, 2)
    change(bad)
    harness.send(bad)
    end = harness.clients[1].ends[0]
    assert end.error.reason == reason
    assert end.error.message.startswith(field)
    assert not harness.state.request_ids


def test_failure_of_one_path_ends_the_request_once() -> None:
    harness = Harness(describe(blocks=64), seed=3)
    harness.send(beams(1, [1, 2, 3], 30, 3, ignore_eos=True))
    while len(harness.sims[0].sequences) < 3:
        harness.step()
    harness.sims[0].fail(next(iter(harness.sims[0].sequences)))
    harness.settle()
    assert [end.error.reason for end in harness.clients[1].ends.values()] == ["NOT_FINITE"] * 3
    assert_idle(harness)


def test_copies_outlive_the_stream_to_the_kvmanager() -> None:
    """Granted, and not yet in a plan: what the kvmanager will not say again is not forgotten."""
    harness = Harness(describe(blocks=64), kv=RealKv())
    harness.send(beams(1, [1, 2, 3], 9, 3, ignore_eos=True))
    while not any(result.copies for message in harness.from_kv for result in message.reservations):
        assert harness.step()
    while harness.from_kv:
        take(harness.state, harness.from_kv.popleft(), harness.now)
    harness.reconnect_kv()
    harness.turn()
    assert any(operation.kind == COPY for operation in harness.plans[0][-1].operations)
    harness.settle()
    assert_answers(harness, 1)
    assert_idle(harness)


def test_paths_do_not_wait_for_forks_whose_question_was_lost() -> None:
    harness = Harness(describe(blocks=64), kv=RealKv())
    executor = harness.state.executors[0]
    harness.send(beams(1, [1, 2, 3], 9, 3, ignore_eos=True))
    while not (executor.running and any(message.reservations for message in harness.to_kv)):
        assert harness.step()
    executor.retired = True  # so the forks find no place for now
    harness.reconnect_kv()
    harness.turn()
    assert set(harness.plans[0][-1].sequence_ids) == set(executor.running)
    epochs.executor_used_again(harness.state, executor)
    harness.turn()
    harness.settle()
    assert_answers(harness, 1)
    assert_idle(harness)


def test_an_executor_of_one_sequence_computes_path_after_path() -> None:
    harness = Harness(describe(blocks=64, max_sequences=1), kv=RealKv())
    harness.send(beams(1, [3, 2, 1], 5, 4, ignore_eos=True), submit(2, [9, 9], 5))
    harness.settle()
    assert_answers(harness, 1)
    assert_correct(harness, 2)
    assert_idle(harness)


def test_forks_do_not_wait_behind_the_prompts_of_others() -> None:
    """Each is one token of a running request, as a decode is."""
    harness = Harness(describe(blocks=900, max_sequences=8), limits=Limits(step_tokens=16), kv=RealKv())
    harness.send(beams(1, [3, 2, 1], 20, 4, ignore_eos=True))
    while len(harness.sims[0].sequences) < 4:
        assert harness.step()
    harness.send(submit(2, [1 + i % 900 for i in range(2000)], 5))
    while not harness.clients[1].done:
        assert harness.step()
    assert_answers(harness, 1)
    assert not harness.clients[2].outputs[0], "the search took as long as the prompt"


class NeverStill(RealKv):
    """A kvmanager for which something always happens."""

    def stand_still(self) -> None:
        assert not len(self.manager.waiting), "a reservation waits for a sequence that stands still"


@pytest.mark.parametrize("seed", range(4))
def test_no_path_waits_for_the_blocks_of_one_that_rests(seed: int) -> None:
    """Paths begin alike: one that comes back from the queue computes blocks that the next to come back waits for."""
    descriptions = [describe(executor_id=f"e{i}", blocks=24, max_sequences=4) for i in range(2)]
    harness = Harness(*descriptions, limits=Limits(lookahead_tokens=8), seed=seed, kv=NeverStill())
    harness.send(beams(1, [1, 2, 3], 12, 8, ignore_eos=True))
    harness.settle()
    assert_answers(harness, 1)
    assert_idle(harness)
