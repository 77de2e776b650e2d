"""Rules of the wires and of time: results that cannot be, releases, scores, losses, settings, metrics."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from quire.v1 import executor_pb2, kvmanager_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.settings import load
from services.scheduler import epochs, requests
from services.scheduler.alarms import next_alarm
from services.scheduler.apply import apply
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.reserve import reserve, take
from services.scheduler.settings import SchedulerSettings
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, assert_correct, submit
from tests.unit.scheduler.sim_executor import describe
from tests.unit.scheduler.test_batcher import answer, made, place


def test_gap_in_results_is_refused() -> None:
    harness, executor = made()
    with pytest.raises(QuireError) as refused:
        apply(harness.state, executor, executor_pb2.StepResults(epoch=executor.epoch, sequence_number=2), 0.0)
    assert refused.value.reason is Reason.PLAN_GAP


def test_results_of_an_older_epoch_are_skipped() -> None:
    harness, executor = made()
    old = executor_pb2.StepResults(epoch=executor.epoch - 1, sequence_number=9, sequence_ids=[1])
    apply(harness.state, executor, old, 0.0)
    assert executor.acknowledged_results == 0


@pytest.mark.parametrize(("computed", "steps"), [(99, 1), (10, 9)])
def test_more_than_was_granted_is_refused(computed: int, steps: int) -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100))
    place(harness)
    with pytest.raises(QuireError) as refused:
        answer(harness, executor, 1, [7], computed, steps)
    assert refused.value.reason is Reason.PROTOCOL


def test_blocks_of_a_cancelled_sequence_return_after_the_plan_that_ends_it_was_answered() -> None:
    """F6: until then the executor may still write to them."""
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 100), submit(2, [5] * 10, 100))
    place(harness)
    harness.cancel(1)
    ending = harness.plans[0][-1]
    assert list(ending.ended_sequence_ids) == [1]
    answer(harness, executor, 2, [7], 10, 1, last_plan=ending.step - 1)
    assert reserve(harness.state, 0.0) == [] or not harness.state.releases
    assert 1 in executor.leaving
    answer(harness, executor, 2, [8], 11, 1, last_plan=ending.step)
    assert harness.state.releases == [1]


def test_full_blocks_are_reported_before_their_release() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 10, 1))
    place(harness)
    message = executor_pb2.StepResults(
        epoch=executor.epoch,
        sequence_number=1,
        last_plan=executor.step,
        sequence_ids=[1],
        token_counts=[1],
        token_ids=[7],
        computed_lengths=[10],
        step_counts=[1],
        ended=[executor_pb2.SequenceEnd(sequence_id=1, reason=types_pb2.FINISH_REASON_LENGTH)],
    )
    apply(harness.state, executor, message, 0.0)
    first, second = reserve(harness.state, 0.0)
    assert [(p.sequence_id, p.computed_length, list(p.token_ids)) for p in first.progress] == [(1, 10, [7])]
    assert not first.released_sequence_ids
    assert list(second.released_sequence_ids) == [1]


def test_granted_after_cancel_goes_straight_back() -> None:
    harness, _ = made()
    harness.send(submit(1, [5] * 10, 100))
    harness.cancel(1)
    place(harness)
    assert not harness.kv.held
    assert not harness.plans[0]


def test_an_answer_that_cannot_be_leaves_its_question_open() -> None:
    harness, _ = made()
    harness.send(submit(1, [5] * 10, 100))
    granted = kvmanager_pb2.RESERVATION_OUTCOME_GRANTED
    wrong = kvmanager_pb2.ReservationResult(sequence_id=1, outcome=granted, executor_id="another")
    with pytest.raises(QuireError, match="not among those allowed"):
        take(harness.state, kvmanager_pb2.ReserveResponse(reservations=[wrong]), harness.now)
    harness.reconnect_kv()
    harness.settle()
    assert_correct(harness, 1)


def test_prompt_scores_are_passed_once_and_by_the_lead_alone() -> None:
    harness, executor = made()
    wanted = submit(1, [5] * 4, 100, choice_count=2)
    wanted.logprobs.prompt_count = 1
    harness.send(wanted)
    assert harness.to_kv[0].reservations[0].skip_prefix_cache
    place(harness)
    assert harness.plans[0][0].enter[0].logprobs.HasField("prompt_count")

    def scores(start: int, count: int) -> executor_pb2.StepResults:
        packed = types_pb2.TokenLogprobs(
            chosen=[-0.5] * count, ranks=[1] * count, top_count=1, top_token_ids=[1] * count, top_logprobs=[0.0] * count
        )
        return executor_pb2.StepResults(
            epoch=executor.epoch,
            sequence_number=executor.acknowledged_results + 1,
            logprobs=[executor_pb2.SequenceLogprobs(sequence_id=1, prompt=packed, prompt_start=start)],
        )

    apply(harness.state, executor, scores(1, 2), 0.0)
    apply(harness.state, executor, scores(1, 3), 0.0)  # as after a preemption
    seen = [(part.prompt_start, len(part.prompt.chosen)) for part in harness.gateway.outbox.logprobs]
    assert seen == [(1, 2), (3, 1)]
    answer(harness, executor, 1, [7], 4, 1)
    harness.turn()
    place(harness)
    sibling = harness.plans[0][-1].enter[0]
    assert sibling.choice == 1
    assert not sibling.logprobs.HasField("prompt_count")


def test_sealed_blocks_travel_with_the_next_plan() -> None:
    harness, executor = made()
    block = executor_pb2.SealedBlock(block_id=3, key=b"k" * 32)
    sealed = kvmanager_pb2.ExecutorSealedBlocks(executor_id="e0", blocks=[block])
    take(harness.state, kvmanager_pb2.ReserveResponse(sealed=[sealed]), 0.0)
    harness.turn()
    assert not harness.plans[0]  # not worth a message of its own
    harness.send(submit(1, [5], 5))
    place(harness)
    assert list(harness.plans[0][0].sealed) == [block]
    assert not executor.sealed


def test_deadline_of_a_waiting_request_is_never_computed() -> None:
    harness = Harness(describe(max_sequences=1))
    harness.send(submit(1, [1], 30, ignore_eos=True), submit(2, [2], 5, deadline_ms=1))
    harness.now += 1.0
    harness.turn()
    assert harness.clients[2].ends[0].error.reason == "DEADLINE"
    harness.settle()
    assert harness.clients[2].outputs[0] == []
    assert_correct(harness, 1)


def test_model_without_executors_is_waited_for_and_then_given_up() -> None:
    harness, _ = made()
    harness.lose(0)
    harness.send(submit(1, [1], 5))
    assert harness.clients[1].ends == {}
    assert next_alarm(harness.state) == pytest.approx(harness.now + 30.0)
    harness.now += 30.1
    harness.turn()
    assert harness.clients[1].ends[0].error.reason == "EXECUTOR_LOST"
    assert harness.state.models == {}
    assert next_alarm(harness.state) is None


def test_choices_that_wait_for_their_lead_end_with_their_model() -> None:
    """One was enough to break the core: queued by the lead's end, for a model that was gone."""
    harness, executor = made()
    harness.send(submit(1, [1], 5, choice_count=3))
    harness.lose(0)
    assert executor.model is not None
    epochs.forget_model(harness.state, executor.model.name, QuireError(Reason.MODEL_NOT_FOUND, "unloaded"))
    harness.turn()
    assert {choice: end.error.reason for choice, end in harness.clients[1].ends.items()} == dict.fromkeys(
        range(3), "MODEL_NOT_FOUND"
    )
    assert harness.state.live_count == 0


def test_kvmanager_that_knows_no_executor_is_asked_again_with_patience() -> None:
    harness, _ = made()
    harness.kv.epochs["e0"] -= 1  # the executor's word of its new epoch is still on the way
    harness.send(submit(1, [1], 5))
    place(harness)
    assert next_alarm(harness.state) == pytest.approx(harness.now + 0.025)
    harness.kv.epochs["e0"] += 1
    harness.settle()
    assert_correct(harness, 1)


def test_replaced_tokenizer_ends_what_was_asked_under_the_old_one() -> None:
    harness, executor = made()
    harness.send(submit(1, [1], 500, ignore_eos=True))
    harness.lose(0)
    harness.turn()
    epochs.executor_opened(harness.state, executor, 9, describe(tokenizer="t1", fingerprint="f1"), harness.now)
    harness.turn()
    assert harness.clients[1].ends[0].error.reason == "EXECUTOR_LOST"


def test_silence_marks_a_stream_as_failed() -> None:
    harness, executor = made()
    harness.send(submit(1, [1], 500))
    place(harness)
    harness.now += 59.0
    harness.turn()
    assert executor.stream_failure == ""
    harness.now += 2.0
    harness.turn()
    assert executor.stream_failure == "no result for 60 s"


def test_idle_scheduler_sets_no_timer() -> None:
    harness, _ = made()
    harness.send(submit(1, [1], 5))
    harness.settle()
    harness.now += 120.0
    harness.turn()
    assert next_alarm(harness.state) is None


def test_newer_stream_of_a_gateway_replaces_the_older() -> None:
    harness, _ = made()
    harness.send(submit(1, [1], 5))
    newer = requests.open_gateway(harness.state, "g", harness.now)
    assert not harness.gateway.open
    assert harness.state.gateways == [newer]
    assert harness.state.request_ids == {}


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda s: s.sampling.ClearField("seed"), "sampling.seed"),
        (lambda s: s.prompt_token_ids.append(-1), "prompt_token_ids"),
        (lambda s: s.prompt_token_ids.append(2**31 - 1), "prompt_token_ids"),
        (lambda s: s.constraint.CopyFrom(types_pb2.Constraint()), "constraint"),
        (lambda s: s.constraint.CopyFrom(types_pb2.Constraint(regex="a" * (1 << 17))), "constraint.regex"),
        (lambda s: setattr(s, "choice_count", 0), "choice_count"),
        (lambda s: s.progress.add(choice=1), "progress[0].choice"),
        (lambda s: s.progress.add(choice=0, token_ids=[5000]), "progress[0].token_ids"),
        (lambda s: setattr(s.stop, "max_tokens", 0), "stop.max_tokens"),
        (lambda s: setattr(s, "request_id", ""), "request_id"),
    ],
)
def test_bad_fields_are_named(change, field: str) -> None:
    """B6: what is wrong is refused by name, for that handle alone."""
    harness, _ = made()
    bad = submit(1, [1], 5)
    change(bad)
    harness.clients.clear()
    requests.serve(harness.state, harness.gateway, scheduler_pb2.ServeRequest(submits=[bad]), 0.0)
    end = harness.gateway.outbox.ended[0]
    assert end.error.message.startswith(field)
    assert harness.state.request_ids == {}


def test_metrics_carry_the_usual_names() -> None:
    """N1: output tokens are those received; names and labels as dashboards expect them."""
    harness = Harness(describe(blocks=25, max_sequences=6), limits=Limits(lookahead_tokens=4))
    for handle in range(1, 7):
        harness.send(submit(handle, [handle] * 10, 30, ignore_eos=True))
    registry = CollectorRegistry()
    registry.register(SchedulerMetrics(harness.state))
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:num_requests_waiting", labels) == 6
    harness.settle()
    value = {
        name: registry.get_sample_value(f"vllm:{name}", labels)
        for name in ("generation_tokens_total", "prompt_tokens_total", "num_preemptions_total", "num_requests_running")
    }
    assert value["generation_tokens_total"] == sum(len(c.outputs[0]) for c in harness.clients.values()) == 180
    assert value["prompt_tokens_total"] == 60
    assert value["num_preemptions_total"] > 0
    assert value["num_requests_running"] == registry.get_sample_value("vllm:num_requests_waiting", labels) == 0
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", labels) == 0
    assert registry.get_sample_value("vllm:prefix_cache_queries_total", labels) == 60, (
        "who returns is not counted again"
    )


def test_settings_read_flags_and_refuse_nonsense(capsys: pytest.CaptureFixture[str]) -> None:
    settings = load(SchedulerSettings, "scheduler", ["--executors", "a:1,b:2", "--grant-ms", "40"])
    assert settings.executors == ("a:1", "b:2")
    assert settings.grant_ms == 40
    with pytest.raises(SystemExit) as refused:
        load(SchedulerSettings, "scheduler", ["--stall-seconds", "0"])
    assert refused.value.code == 2
    assert "stall_seconds" in capsys.readouterr().err
