"""Runs of drafts in the core, over a backend whose next token depends on all that its KV holds."""

from __future__ import annotations

import pytest

from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError
from services.common.kv_policy import KvPolicy
from services.executor.batch import StepLimits
from tests.unit.executor.conftest import Bench, make_bench
from tests.unit.executor.fake_backend import EOS, FREE, generate, loaded, next_token
from tests.unit.executor.plans import blocks, ends, plan, state, tokens_by_sequence
from tests.unit.executor.speculation.oracle import Oracle

PROMPT = [5, 6, 7]


def make(accuracy: float = 1.0, limits: StepLimits | None = None, seed: int = 0) -> tuple[Bench, Oracle]:
    bench = make_bench(limits or StepLimits(sequences=8, tokens=32))
    oracle = Oracle(lambda tokens: bench.backend.script.get(len(tokens), next_token(tokens)), accuracy, EOS, seed)
    bench.loop.proposer = oracle
    return bench, oracle


def drafted(messages) -> dict[int, list[tuple[int, int]]]:
    """(proposed, accepted) of each sequence's steps that might draft."""
    found: dict[int, list[tuple[int, int]]] = {}
    for message in messages:
        steps = list(zip(message.proposed_counts, message.accepted_counts, strict=True))
        assert sum(message.draft_step_counts) == len(steps)
        for sequence_id, count in zip(message.sequence_ids, message.draft_step_counts, strict=bool(steps)):
            found.setdefault(sequence_id, []).extend(steps[:count])
            del steps[:count]
    return found


@pytest.mark.parametrize("accuracy", [0.0, 0.6, 0.9, 1.0])
@pytest.mark.parametrize("limit", [0, 1, 2, 5, 16])
def test_output_is_that_of_plain_decoding(limit: int, accuracy: float) -> None:
    bench, oracle = make(accuracy)
    bench.take(enter=[state(1, PROMPT, range(12), max_tokens=40)], grants=[(1, 32, 1), (1, 1, 60, limit)])
    sent = bench.run()
    assert tokens_by_sequence(sent) == {1: generate(PROMPT, 40)}
    assert ends(sent)[1].reason == types_pb2.FINISH_REASON_LENGTH
    assert sent[-1].computed_lengths[-1] == len(PROMPT) + 39
    steps = drafted(sent).get(1, [])
    accepted = sum(accepted for _, accepted in steps)
    assert sum(sum(message.step_counts) for message in sent) + accepted == 40
    assert [proposed for proposed, _ in steps if proposed] == [len(draft) for draft in oracle.proposed if draft]
    if limit and accuracy == 1.0:
        assert accepted >= 39 * limit // (limit + 1)
    if not limit or not accuracy:
        assert accepted == 0


def test_what_was_proposed_and_accepted_is_told_for_each_step() -> None:
    """Also of steps without room or without a proposal; not of those whose grant allowed none."""
    bench, oracle = make()
    bench.take(
        enter=[state(1, PROMPT, range(8), max_tokens=9)], grants=[(1, 32, 1), (1, 1, 1), (1, 1, 1, 2), (1, 1, 4, 3)]
    )
    sent = bench.run()
    assert drafted(sent) == {1: [(2, 2), (3, 3)]}  # 1 + 1 + 3 + 4 tokens
    assert oracle.asked == [2, 3]
    timings = [message.timings for message in sent]
    assert sum(timing.draft_count for timing in timings) == sum(timing.draft_round_count for timing in timings) == 5
    assert sum(timing.draft_step_count for timing in timings) == 2
    assert sum(timing.token_count for timing in timings) == len(PROMPT) + 3 + 5
    assert sum(timing.sampled_count for timing in timings) == 4
    bench.loop.proposer = None
    bench.take(enter=[state(2, PROMPT, range(8), max_tokens=4)], grants=[(2, 32, 1), (2, 1, 4, 3)])
    assert drafted(bench.run()) == {2: [(0, 0)] * 3}


def test_steps_with_drafts_are_told_with_the_steps_not_with_the_sequences() -> None:
    """A first token leaves alone, with the timings of all: those of steps whose drafts are told later."""
    bench, _ = make(0.0)
    enter = [state(i, PROMPT, range(8 * i, 8 * i + 8), max_tokens=9) for i in range(2)]
    bench.take(enter=enter, grants=[(0, 32, 1), (0, 1, 5, 4), (1, 32, 1), (1, 1, 5, 3)])
    bench.run(3)
    late = state(2, PROMPT, range(16, 24), max_tokens=9)
    bench.take(enter=[late], grants=[(2, 32, 1)])
    urgent = bench.run(1)[-1]
    assert (list(urgent.sequence_ids), list(urgent.proposed_counts)) == ([2], [])
    timings = urgent.timings
    assert (timings.draft_step_count, timings.draft_count, timings.draft_round_count) == (3, 3 * 7, 3 * 4)


def test_drafts_keep_within_the_budget_and_the_context() -> None:
    bench, oracle = make()
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=7)], grants=[(1, 32, 1), (1, 1, 9, 16)])
    assert tokens_by_sequence(bench.run()) == {1: generate(PROMPT, 7)}
    assert oracle.asked == [5]  # seven tokens but the first, of which the step itself gives one
    prompt = [3] * 250
    bench.take(enter=[state(2, prompt, range(64), max_tokens=50)], grants=[(2, 32, 8), (2, 1, 9, 16)])
    assert tokens_by_sequence(bench.run()) == {2: generate(prompt, 6)}
    assert oracle.asked == [5, 4]


def test_drafts_keep_within_the_blocks() -> None:
    bench, oracle = make()
    bench.take(enter=[state(1, PROMPT, [2, 9], max_tokens=30)], grants=[(1, 32, 1), (1, 1, 30, 16)])
    sent = bench.run()
    assert oracle.asked == [4]
    assert tokens_by_sequence(sent) == {1: generate(PROMPT, 6)}
    assert sum((bench.backend.kv != FREE).sum(axis=1)) == 8
    bench.take(append=[executor_pb2.BlockAppend(sequence_id=1, blocks=blocks(20, 21, 22))])
    sent += bench.run()
    assert oracle.asked == [4, 11]
    assert tokens_by_sequence(sent) == {1: generate(PROMPT, 18)}


def test_so_many_drafts_are_accepted_as_there_is_credit_for() -> None:
    """What is not used is kept, across grants and kinds of steps; what was refused costs none."""
    bench, oracle = make()
    grants = [(1, 32, 1), (1, 1, 4, 4)]
    bench.take(enter=[state(1, PROMPT, range(20), max_tokens=60)], grants=grants, draft_credits=[0, 6])
    assert tokens_by_sequence(bench.run()) == {1: generate(PROMPT, 1 + 5 + 3 + 1 + 1)}
    assert oracle.asked == [4, 2]
    oracle._accuracy = 0.0
    bench.take(grants=[(1, 1, 3, 2)], draft_credits=[3])
    assert drafted(bench.run()) == {1: [(2, 0)] * 3}
    oracle._accuracy = 1.0
    bench.take(grants=[(1, 1, 2), (1, 1, 2, 16)], draft_credits=[0, 4])
    sent = bench.run()
    assert drafted(sent) == {1: [(7, 7), (0, 0)]}
    assert sent[-1].computed_lengths[-1] == len(PROMPT) + 10 + 3 + 2 + 8 + 1


def test_a_step_has_no_more_tokens_than_its_limit() -> None:
    bench, oracle = make(limits=StepLimits(sequences=3, tokens=8))
    entering = [state(i, PROMPT, range(8 * i, 8 * i + 8), max_tokens=20) for i in range(3)]
    bench.take(enter=entering, grants=[grant for i in range(3) for grant in ((i, 8, 1), (i, 1, 20, 4))])
    sent = bench.run()
    assert tokens_by_sequence(sent) == {i: generate(PROMPT, 20) for i in range(3)}
    assert max(map(sum, bench.backend.batches)) <= 8
    assert max(oracle.asked) == 4


@pytest.mark.parametrize("at", range(5, 13))
def test_a_stop_token_within_a_run_ends_it(at: int) -> None:
    """What was drafted behind it is neither output nor accepted."""
    bench, _ = make()
    bench.backend.script[at] = EOS
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=20)], grants=[(1, 32, 1), (1, 1, 20, 4)])
    sent = bench.run()
    output = tokens_by_sequence(sent)[1]
    assert output == [*generate(PROMPT, at - 3), EOS]
    end = ends(sent)[1]
    assert (end.reason, end.stop_token_id) == (types_pb2.FINISH_REASON_STOP, EOS)
    steps = drafted(sent)[1]
    assert 1 + len(steps) + sum(accepted for _, accepted in steps) - len(output) in (0, 1)
    assert sent[-1].computed_lengths[-1] == len(PROMPT) + len(output) - 1


def test_logits_that_are_not_finite_matter_where_a_token_counts() -> None:
    for accuracy, fails in ((1.0, True), (0.0, False)):
        bench, _ = make(accuracy)
        bench.backend.bad_lengths = {6}  # within the first run of 4 tokens, 5, 6, 7
        bench.take(enter=[state(1, PROMPT, range(8), max_tokens=9)], grants=[(1, 32, 1), (1, 1, 1, 3)])
        sent = bench.run()
        assert tokens_by_sequence(sent) == {1: generate(PROMPT, 3 if fails else 2)}
        if fails:
            assert ends(sent)[1].error.reason == "NOT_FINITE"
        else:
            assert not ends(sent)


def test_scores_come_with_the_tokens_that_count() -> None:
    bench, _ = make(0.6)
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=20, logprobs=2)], grants=[(1, 32, 1), (1, 1, 30, 4)])
    sent = bench.run()
    scored = [token for message in sent for part in message.logprobs for token in part.output.top_token_ids[::2]]
    assert scored == generate(PROMPT, 20)


def test_prompts_in_chunks_and_neighbours_that_draft_otherwise() -> None:
    bench, _ = make(0.8)
    prompts = {i: list(range(i, i + 4 * i + 1)) for i in range(1, 7)}
    entering = [state(i, prompt, range(9 * i, 9 * i + 9), max_tokens=8) for i, prompt in prompts.items()]
    bench.take(enter=entering, grants=[(i, 7, 20, 2 * i % 5) for i in prompts])
    assert tokens_by_sequence(bench.run()) == {i: generate(prompt, 8) for i, prompt in prompts.items()}


def test_a_sequence_that_left_in_between_goes_on_with_what_counted() -> None:
    """As after a preemption: what it entered with is what its results said."""
    bench, _ = make(0.7, seed=3)
    bench.take(enter=[state(1, PROMPT, range(10), max_tokens=30)], grants=[(1, 32, 1), (1, 1, 4, 5)])
    output = tokens_by_sequence(bench.run())[1]
    assert 5 < len(output) < 30
    bench.take(ended_sequence_ids=[1])
    bench.take(
        enter=[state(2, PROMPT, range(20, 30), output=output, max_tokens=30)], grants=[(2, 32, 1, 3), (2, 1, 30, 5)]
    )
    assert [*output, *tokens_by_sequence(bench.run())[2]] == generate(PROMPT, 30)


def test_keys_name_no_block_that_a_sequence_may_write_to() -> None:
    """Nor, while they are granted only, their content from before."""
    bench, _ = make(0.0)
    sealed = [executor_pb2.SealedBlock(block_id=i, key=bytes([i]) * 32) for i in range(6)]
    bench.take(sealed=sealed)
    bench.take(enter=[state(1, list(range(6)), range(4), computed=4, max_tokens=8)])
    assert [block.block_id for block in bench.core.inventory.to_sealed_blocks()] == [0, 4, 5]
    blocks = [executor_pb2.BlockList(block_ids=[4])]
    bench.take(append=[executor_pb2.BlockAppend(sequence_id=1, blocks=blocks)])
    assert [block.block_id for block in bench.core.inventory.to_sealed_blocks()] == [0, 5]


def test_no_run_crosses_a_change_of_the_block_table() -> None:
    """Periods are of 128 tokens; a step ends there, accepted or not."""
    bench, oracle = make(1.0, StepLimits(sequences=8, tokens=200))
    bench.core.set_model(None)
    policy = KvPolicy.named("hot+warm", 32, 64)
    bench.core.set_model(loaded(bench.backend, policy=policy).limits)
    prompt = [1] * 120
    change = executor_pb2.BlockDemotion(
        sequence_id=1, at_length=128, positions=[1, 2], block_ids=[64, 65], writes=[True, True]
    )
    bench.take(
        enter=[state(1, prompt, range(40), max_tokens=24)],
        demotions=[change],
        grants=[(1, 120, 1), (1, 1, 20, 16)],
    )
    assert tokens_by_sequence(bench.run()) == {1: generate(prompt, 24)}
    assert oracle.asked[0] == 7  # position 120 is computed with those up to 127
    assert bench.backend.demotions == [(1, 64), (2, 65)]


@pytest.mark.parametrize("part", ["propose", "computed"])
def test_a_proposer_that_fails_costs_its_drafts_alone(part: str, caplog: pytest.LogCaptureFixture) -> None:
    """It is told once, and not asked again."""
    bench, oracle = make(0.0)

    def fail(*_arguments: object) -> None:
        raise RuntimeError("staged")

    setattr(oracle, part, fail)
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=8)], grants=[(1, 32, 1), (1, 1, 20, 4)])
    sent = bench.run()
    assert tokens_by_sequence(sent) == {1: generate(PROMPT, 8)}
    assert bench.loop.proposer is None
    assert [record.message for record in caplog.records if record.exc_info] == [
        "drafts could not be proposed: there are none from now on"
    ]
    # A step that fails to propose has none; what was proposed before a failure to learn is verified.
    assert drafted(sent)[1] == [(0, 0) if part == "propose" else (4, 0), *[(0, 0)] * 6]


def test_a_proposer_that_answers_for_others_is_one_that_fails() -> None:
    bench, oracle = make()
    oracle.propose = lambda requests, _tables, _tokens: [[]] * (len(requests) + 1)
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=8)], grants=[(1, 32, 1), (1, 1, 20, 4)])
    assert tokens_by_sequence(bench.run()) == {1: generate(PROMPT, 8)}
    assert bench.loop.proposer is None


@pytest.mark.parametrize("limit", [-1, 17])
def test_draft_limits_beyond_the_protocol_end_the_stream(limit: int) -> None:
    bench, _ = make()
    with pytest.raises(QuireError, match="draft limits"):
        bench.core.take(plan(bench.core.epoch, 1, enter=[state(1, PROMPT, range(4))], grants=[(1, 8, 1, limit)]))
