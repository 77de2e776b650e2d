"""The core with a fake backend: credit, chunks, ends, errors, results."""

import numpy as np
import pytest

from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.limits import MAX_OPTIONS
from services.executor.batch import StepLimits
from tests.unit.executor.conftest import make_bench
from tests.unit.executor.fake_backend import EOS, VOCAB, generate
from tests.unit.executor.plans import blocks, ends, state, tokens_by_sequence

PROMPT = [5, 6, 7]
BEFORE, AFTER = executor_pb2.BLOCK_OPERATION_PHASE_BEFORE, executor_pb2.BLOCK_OPERATION_PHASE_AFTER


def copy(operation_id, source, destination, phase=BEFORE, kind=executor_pb2.BLOCK_OPERATION_KIND_COPY):
    return executor_pb2.BlockOperation(
        operation_id=operation_id, kind=kind, phase=phase, source_block_id=source, destination_block_id=destination
    )


def test_one_sequence_runs_to_its_budget(bench):
    bench.take(enter=[state(1, PROMPT, [9, 3, 4], max_tokens=8)], grants=[(1, 32, 1), (1, 1, 20)])
    sent = bench.run()
    assert tokens_by_sequence(sent) == {1: generate(PROMPT, 8)}
    end = ends(sent)[1]
    assert end.reason == types_pb2.FINISH_REASON_LENGTH
    assert not end.HasField("stop_token_id")
    assert sent[-1].computed_lengths[-1] == len(PROMPT) + 7
    assert sum(sent_steps for message in sent for sent_steps in message.step_counts) == 8
    assert not bench.core.sequences


def test_first_token_leaves_alone_and_the_rest_when_credit_falls(bench):
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=20)], grants=[(1, 32, 1), (1, 1, 6)], report_credit=3)
    sent = bench.run()
    assert [list(message.token_counts) for message in sent] == [[1], [3], [3]]
    assert [message.sequence_number for message in sent] == [1, 2, 3]
    assert [message.last_step for message in sent] == [1, 4, 7]
    assert [message.timings.step_count for message in sent] == [1, 3, 3]
    assert {message.last_plan for message in sent} == {1}


def test_first_tokens_do_not_flush_what_others_gather(bench):
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=30)], grants=[(1, 32, 1), (1, 1, 10)], report_credit=2)
    bench.run(3)
    bench.take(enter=[state(2, [8], [20, 21])], grants=[(2, 32, 1), (2, 1, 1)], report_credit=2)
    assert [list(message.sequence_ids) for message in bench.run(1)] == [[2]]


def test_a_prefill_chunk_reports_alone(bench):
    bench.take(enter=[state(1, PROMPT, range(8), max_tokens=30)], grants=[(1, 32, 1), (1, 1, 10)], report_credit=1)
    bench.run(2)
    bench.take(enter=[state(2, list(range(20)), range(20, 26))], grants=[(2, 8, 2)], report_credit=1)
    chunk = bench.run(1)
    assert [list(message.sequence_ids) for message in chunk] == [[2]]
    assert list(chunk[0].token_counts) == [0]
    assert list(chunk[0].computed_lengths) == [8]


@pytest.mark.parametrize("limit", [1, 5, 16, 32])
def test_chunks_change_nothing(bench, limit):
    prompt = list(range(30))
    bench.take(enter=[state(1, prompt, range(30, 50), max_tokens=6)], grants=[(1, limit, 40)])
    assert tokens_by_sequence(bench.run()) == {1: generate(prompt, 6)}
    assert bench.backend.batches[0] == [min(limit, 30)]


def test_many_sequences_equal_each_alone(bench):
    prompts = {i: list(range(i, i + 3 * i)) for i in range(1, 8)}
    entering = [state(i, prompt, range(8 * i, 8 * i + 8), max_tokens=8) for i, prompt in prompts.items()]
    bench.take(enter=entering, grants=[(i, 7, 20) for i in prompts])
    assert tokens_by_sequence(bench.run()) == {i: generate(prompt, 8) for i, prompt in prompts.items()}
    assert max(map(len, bench.backend.batches)) > 1
    assert max(map(sum, bench.backend.batches)) <= 32


def test_grants_are_used_in_the_order_sent(bench):
    prompt = list(range(20))
    bench.take(enter=[state(1, prompt, range(10))], grants=[(1, 4, 2), (1, 10, 1), (1, 1, 3)])
    bench.run()
    assert bench.backend.batches == [[4], [4], [10], [1], [1], [1]]


def test_a_step_takes_no_more_than_its_limits_and_nobody_starves():
    bench = make_bench(StepLimits(sequences=2, tokens=8))
    entering = [state(i, [i, i, i], range(8 * i, 8 * i + 8), max_tokens=20) for i in range(3)]
    bench.take(enter=entering, grants=[(i, 8, 12) for i in range(3)])
    bench.run(9)
    assert all(len(batch) <= 2 and sum(batch) <= 8 for batch in bench.backend.batches)
    used = [12 - bench.core.sequences[i].credit.steps for i in range(3)]
    assert max(used) - min(used) <= 1


def test_a_large_chunk_is_not_kept_out_by_steady_decodes():
    bench = make_bench(StepLimits(sequences=4, tokens=4))
    bench.take(enter=[state(1, [1], range(8), max_tokens=30)], grants=[(1, 1, 25)])
    bench.run(1)
    bench.take(enter=[state(2, list(range(9)), range(8, 16))], grants=[(2, 4, 3)])
    bench.run(6)
    assert bench.core.sequences[2].computed == 9


def test_waits_for_blocks_and_goes_on_after_append(bench):
    bench.take(enter=[state(1, PROMPT, [0], max_tokens=6)], grants=[(1, 32, 1), (1, 1, 10)])
    sent = bench.run()
    assert tokens_by_sequence(sent) == {1: generate(PROMPT, 2)}  # 4 slots: 3 prompt tokens and one fed back
    bench.take(append=[executor_pb2.BlockAppend(sequence_id=1, blocks=blocks(7, 2))])
    assert tokens_by_sequence([*sent, *bench.run()]) == {1: generate(PROMPT, 6)}
    assert (bench.backend.kv[[1, 3]] == -1).all()


def test_resumed_sequence_goes_on_with_its_tokens(bench):
    full = generate(PROMPT, 8)
    bench.take(enter=[state(1, PROMPT, range(4), output=full[:5], max_tokens=8)], grants=[(1, 4, 20)])
    sent = bench.run()
    assert tokens_by_sequence(sent) == {1: full[5:]}
    assert sent[-1].computed_lengths[-1] == len(PROMPT) + 7


def test_cached_prefix_is_not_computed_again(bench):
    prompt = list(range(10))
    bench.take(enter=[state(1, prompt, [0, 1, 2, 3])], grants=[(1, 32, 1)])
    bench.run()
    bench.take(enter=[state(2, prompt, [0, 1, 5, 6], computed=8, max_tokens=3)], grants=[(2, 32, 9)])
    assert tokens_by_sequence(bench.run())[2] == generate(prompt, 3)
    assert bench.backend.batches[1] == [2]


def test_eos_and_stop_ids_end_a_sequence(bench):
    bench.backend.script = {3: 42, 4: EOS}
    eos, stop, ignoring = (
        state(1, [1, 2, 3], range(4)),
        state(2, [1, 2, 3], range(4, 8), stop_ids=[42]),
        state(3, [1, 2, 3], range(8, 12), ignore_eos=True, max_tokens=4),
    )
    bench.take(enter=[eos, stop, ignoring], grants=[(i, 32, 9) for i in (1, 2, 3)])
    sent = bench.run()
    found, tokens = ends(sent), tokens_by_sequence(sent)
    assert (found[1].reason, found[1].stop_token_id, tokens[1]) == (types_pb2.FINISH_REASON_STOP, EOS, [42, EOS])
    assert (found[2].reason, found[2].stop_token_id, tokens[2]) == (types_pb2.FINISH_REASON_STOP, 42, [42])
    assert found[3].reason == types_pb2.FINISH_REASON_LENGTH
    assert tokens[3][:2] == [42, EOS]


def test_the_context_length_bounds_the_output(bench):
    prompt = [3] * 254
    bench.take(enter=[state(1, prompt, range(64), max_tokens=50)], grants=[(1, 32, 30)])
    sent = bench.run()
    assert len(tokens_by_sequence(sent)[1]) == 2
    assert ends(sent)[1].reason == types_pb2.FINISH_REASON_LENGTH


def test_logprobs_and_prompt_logprobs_are_packed(bench):
    prompt = list(range(10, 20))
    bench.take(enter=[state(1, prompt, range(8), max_tokens=3, logprobs=2, prompt_logprobs=1)], grants=[(1, 4, 10)])
    sent = bench.run()
    prompt_parts = [
        (part.prompt_start, list(part.prompt.chosen)) for m in sent for part in m.logprobs if part.prompt.chosen
    ]
    assert [start for start, _ in prompt_parts] == sorted(start for start, _ in prompt_parts)
    covered = {start + i: value for start, values in prompt_parts for i, value in enumerate(values)}
    assert covered == {i: -float(prompt[i]) for i in range(1, 10)}
    output = [part.output for m in sent for part in m.logprobs]
    assert sum(len(part.chosen) for part in output) == 3
    assert sum(len(part.top_token_ids) for part in output) == 6


def test_non_finite_logits_end_only_that_sequence(bench):
    bench.backend.bad_lengths = {5}
    bench.take(
        enter=[state(1, [1, 2, 3], range(4)), state(2, [1] * 6, range(4, 10))], grants=[(1, 32, 20), (2, 32, 20)]
    )
    sent = bench.run()
    assert ends(sent)[1].error.reason == "NOT_FINITE"
    assert len(tokens_by_sequence(sent)[1]) == 2
    assert tokens_by_sequence(sent)[2] == generate([1] * 6, 8)


def test_a_failed_step_ends_its_sequences_and_the_engine_survives(bench):
    bench.backend.fails = 1
    bench.take(enter=[state(1, PROMPT, range(4)), state(2, [9], range(4, 8))], grants=[(1, 32, 9)])
    assert ends(bench.run())[1].error.reason == "INTERNAL"
    bench.take(grants=[(2, 32, 9)])
    assert tokens_by_sequence(bench.run())[2] == generate([9], 8)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ({"prompt": [VOCAB]}, "token_ids"),
        ({"prompt": [-1]}, "token_ids"),
        ({"prompt": [2**31 - 1]}, "token_ids"),
        ({"stop_ids": [VOCAB]}, "stop.stop_token_ids"),
        ({"stop_ids": [-1]}, "stop.stop_token_ids"),
        ({"logit_bias": {VOCAB: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "sampling.logit_bias"),
        ({"logit_bias": {1: float("nan")}}, "sampling.logit_bias[1]"),
        ({"temperature": float("nan")}, "sampling.temperature"),
        ({"top_p": 1.5}, "sampling.top_p"),
        ({"repetition_penalty": 0.0}, "sampling.repetition_penalty"),
        ({"block_ids": [64]}, "blocks"),
        ({"block_ids": [-1]}, "blocks"),
        ({"block_ids": [], "computed": 1}, "blocks"),
        ({"computed": 3}, "computed_length"),
        ({"max_tokens": 0}, "stop.max_tokens"),
        ({"logprobs": MAX_OPTIONS + 1}, "logprobs.output_count"),
    ],
)
def test_b6_bad_fields_end_that_sequence_alone(bench, bad, field):
    arguments = {"prompt": PROMPT, "block_ids": [0, 1], **bad}
    entering = state(1, arguments.pop("prompt"), arguments.pop("block_ids"), **arguments)
    bench.take(enter=[entering, state(2, [4], range(4, 8))], grants=[(1, 32, 4), (2, 32, 9)])
    sent = bench.run()
    assert ends(sent)[1].error.reason == "INVALID_FIELD"
    assert ends(sent)[1].error.message.startswith(field + ":")
    assert tokens_by_sequence(sent) == {2: generate([4], 8)}


@pytest.mark.parametrize("penalty", [1e-9, 100.0])
def test_what_the_gateway_admits_is_admitted_here(bench, penalty):
    """Both read one table; a range of its own once refused here what the gateway had let in."""
    bench.take(enter=[state(1, PROMPT, [0, 1], repetition_penalty=penalty)], grants=[(1, 32, 1)])
    assert not ends(bench.run())


def test_unsupported_fields_are_refused_by_name(bench):
    adapted, constrained = state(1, PROMPT, [0, 1]), state(2, PROMPT, [2, 3])
    adapted.adapter = "x"
    constrained.constraint.regex = "a"  # and nothing here that compiles it
    bench.take(enter=[adapted, constrained, state(3, PROMPT, range(8, 12))], grants=[(3, 32, 9)])
    sent = bench.run()
    named = {i: (end.error.reason, end.error.message.split(":")[0]) for i, end in ends(sent).items() if i < 3}
    assert named == {i: ("UNSUPPORTED", name) for i, name in ((1, "adapter"), (2, "constraint"))}
    assert tokens_by_sequence(sent)[3] == generate(PROMPT, 8)


def test_c2_a_prompt_that_leaves_no_output_is_refused(bench):
    bench.take(enter=[state(1, [1] * 256, range(64))])
    assert ends(bench.run())[1].error.reason == "CONTEXT_EXCEEDED"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"step": 3}, Reason.PLAN_GAP),
        ({"step": 1}, Reason.PLAN_GAP),
        ({"epoch": 7}, Reason.STALE_EPOCH),
        ({"token_limits": [1]}, Reason.PROTOCOL),
        ({"sequence_ids": [1], "token_limits": [0], "step_counts": [1]}, Reason.PROTOCOL),
        ({"operations": [copy(1, 0, 64)]}, Reason.PROTOCOL),
        ({"operations": [copy(1, 0, 1, phase=0)]}, Reason.PROTOCOL),
        ({"operations": [copy(1, 0, 1, kind=executor_pb2.BLOCK_OPERATION_KIND_DEMOTE)]}, Reason.UNSUPPORTED),
        ({"enter": [state(1, PROMPT, [3])]}, Reason.PROTOCOL),
    ],
)
def test_malformed_plans_end_the_stream_and_change_nothing(bench, fields, reason):
    bench.take(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 1)])
    with pytest.raises(QuireError) as raised:
        bench.core.take(executor_pb2.StepPlan(**{"epoch": 1, "step": 2, **fields}))
    assert raised.value.reason == reason
    bench.core.take(executor_pb2.StepPlan(epoch=1, step=2, ended_sequence_ids=[1]))  # ignored: the epoch is broken
    assert list(bench.core.sequences) == [1]
    assert bench.core.open(executor_pb2.RunHello()).epoch == 2


def test_an_ended_sequence_is_answered_even_without_a_step(bench):
    bench.take(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 2)])
    bench.run()
    bench.take(ended_sequence_ids=[1, 77])
    sent = bench.run()
    assert [(message.last_plan, list(message.sequence_ids)) for message in sent] == [(2, [])]
    bench.take(acknowledged_results=sent[-1].sequence_number)
    assert bench.run() == []  # a bare acknowledgement is not answered


def test_an_ended_sequence_id_may_enter_again_in_the_same_plan(bench):
    bench.take(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 2)])
    bench.run()
    bench.take(ended_sequence_ids=[1], enter=[state(1, [8], range(4))], grants=[(1, 32, 9)])
    assert tokens_by_sequence(bench.run())[1] == generate([8], 8)


def test_copies_run_in_their_phase_and_are_reported(bench):
    prompt = list(range(6))
    bench.take(enter=[state(1, prompt, [0, 1])], grants=[(1, 32, 1)])
    bench.run()
    bench.take(
        operations=[copy(10, 0, 8), copy(11, 1, 9), copy(12, 9, 20, AFTER)],
        enter=[state(2, prompt, [8, 9, 10, 11], computed=5, max_tokens=3)],
        grants=[(2, 32, 9)],
    )
    sent = bench.run()
    assert tokens_by_sequence(sent)[2] == generate(prompt, 3)
    assert sorted(i for message in sent for i in message.done_operation_ids) == [10, 11, 12]
    assert bench.backend.copies == [(0, 8), (1, 9), (9, 20)]


def test_copies_without_any_sequence_are_done_at_once(bench):
    bench.take(operations=[copy(1, 0, 2, AFTER), copy(2, 1, 3)])
    assert [sorted(message.done_operation_ids) for message in bench.run()] == [[1, 2]]


def test_inventory_keeps_sealed_blocks_until_they_are_written_again(bench):
    key = bytes(32)
    bench.take(enter=[state(1, list(range(9)), [4, 5, 6, 7])], grants=[(1, 32, 1)])
    bench.run()
    sealed = [executor_pb2.SealedBlock(block_id=i, key=key) for i in (4, 5)]
    bench.take(sealed=sealed)
    bench.core.open(executor_pb2.RunHello())  # content outlives the scheduler
    assert [block.block_id for block in bench.core.inventory.to_sealed_blocks()] == [4, 5]
    bench.step = 0
    bench.take(enter=[state(2, [1, 2], [5, 9])], grants=[(2, 32, 1)])
    bench.run()
    assert [block.block_id for block in bench.core.inventory.to_sealed_blocks()] == [4]
    bench.take(operations=[copy(1, 0, 4)])
    bench.run()
    assert len(bench.core.inventory) == 0


def test_a_new_model_forgets_everything(bench):
    bench.take(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 1)], sealed=[executor_pb2.SealedBlock(block_id=9)])
    bench.core.set_model(None)
    assert len(bench.core.inventory) == len(bench.core.sequences) == 0
    bench.take(enter=[state(2, PROMPT, range(4))], grants=[(2, 32, 1)])
    assert ends(bench.run())[2].error.reason == "NO_EXECUTOR"


def test_reopening_repeats_what_the_scheduler_missed(bench):
    bench.take(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 1), (1, 1, 5)], report_credit=0)
    bench.run(3)  # first token sent, two more gathered
    opened = bench.core.open(executor_pb2.RunHello(previous_epoch=1, acknowledged_results=0))
    assert (opened.epoch, opened.closed_epochs) == (2, [1])
    assert tokens_by_sequence(opened.unseen) == {1: generate(PROMPT, 3)}
    assert not bench.core.sequences


def test_reopening_sends_nothing_to_a_stranger_or_twice(bench):
    bench.take(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 1)])
    bench.run()
    assert bench.core.open(executor_pb2.RunHello()).unseen == []
    assert bench.core.open(executor_pb2.RunHello(previous_epoch=1)).unseen == []


def test_acknowledged_results_are_dropped(bench):
    bench.take(enter=[state(1, PROMPT, range(4), max_tokens=9)], grants=[(1, 32, 1), (1, 1, 2)], report_credit=0)
    bench.run()
    assert [kept.sequence_number for kept in bench.core.ledger.unacknowledged] == [1, 2]
    bench.take(acknowledged_results=1, grants=[(1, 1, 1)])
    assert [kept.sequence_number for kept in bench.core.ledger.unacknowledged] == [2]


def test_step_inputs_have_the_shapes_of_the_interface(bench):
    bench.take(enter=[state(1, list(range(9)), [7, 3, 5]), state(2, [4], [1])], grants=[(1, 6, 2), (2, 6, 1)])
    step = bench.core.build(bench.core.choose())
    inputs = step.inputs
    assert inputs.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 4]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 5, 0]
    assert inputs.query_starts.tolist() == [0, 6, 7]
    assert inputs.context_lengths.tolist() == [6, 1]
    assert inputs.block_tables.tolist() == [[7, 3, 5], [1, 0, 0]]
    assert [row.row for row in inputs.samples] == [6]
    arrays = (inputs.token_ids, inputs.positions, inputs.query_starts, inputs.context_lengths, inputs.block_tables)
    assert all(array.dtype == np.int32 for array in arrays)
