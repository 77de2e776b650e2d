"""Prompts that become vectors: computed whole, without output, and nothing of them is kept."""

from __future__ import annotations

import pytest

from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.scheduler.apply import apply
from services.scheduler.reserve import reserve
from services.scheduler.validation import check_submit
from tests.unit.scheduler.sim import submit
from tests.unit.scheduler.test_batcher import answer, grants, made, place

MEAN, STOP = types_pb2.POOLING_MEAN, types_pb2.FINISH_REASON_STOP
MODEL = types_pb2.ModelDescription(name="m", context_length=100, vocab_size=50)


def test_a_prompt_is_computed_whole_and_ends_with_its_vector() -> None:
    harness, executor = made()
    harness.send(submit(1, [5] * 40, 1, pooling=MEAN, ignore_eos=True))
    [asked] = [one for message in harness.to_kv for one in message.reservations]
    assert asked.skip_prefix_cache
    place(harness)
    plans = [message for message in harness.plans[0] if message.enter or message.sequence_ids]
    [entered] = plans[0].enter
    assert (entered.pooling, entered.computed_length) == (MEAN, 0)
    assert sum(limit * steps for message in plans for _, limit, steps in grants(message)) == 40, "nothing is decoded"
    answer(harness, executor, 1, [], 32, 1)
    message = executor_pb2.StepResults(
        epoch=executor.epoch,
        sequence_number=executor.acknowledged_results + 1,
        last_plan=executor.step,
        sequence_ids=[1],
        token_counts=[0],
        computed_lengths=[40],
        step_counts=[1],
        embeddings=[executor_pb2.SequenceEmbedding(sequence_id=1, values=[0.5, 0.25])],
        ended=[executor_pb2.SequenceEnd(sequence_id=1, reason=STOP)],
    )
    apply(harness.state, executor, message, harness.now)
    told = harness.gateway.take_output()
    assert [(one.handle, list(one.values)) for one in told.embeddings] == [(1, [0.5, 0.25])]
    assert [(one.handle, one.reason, one.HasField("stop_token_id")) for one in told.ended] == [(1, STOP, False)]
    said = reserve(harness.state, harness.now)
    assert not [one for message in said for one in message.progress], "what is not known as computed is not kept"
    assert [one for message in said for one in message.released_sequence_ids] == [1]
    assert not executor.running
    assert executor.expected_tokens == 0


def test_where_formats_change_with_age_the_kvmanager_follows() -> None:
    harness, executor = made(kv_policy="hot:128,int8", colder_blocks=(1000,))
    harness.send(submit(1, [5] * 40, 1, pooling=MEAN, ignore_eos=True))
    place(harness)
    answer(harness, executor, 1, [], 32, 1)
    said = reserve(harness.state, harness.now)
    assert [one.computed_length for message in said for one in message.progress] == [32]


@pytest.mark.parametrize(
    "fields",
    [
        {"pooling": 9},
        {"pooling": MEAN, "choice_count": 2},
        {"pooling": MEAN, "beam_width": 2},
    ],
)
def test_what_is_about_output_does_not_go_with_it(fields: dict[str, int]) -> None:
    with pytest.raises(QuireError, match="pooling") as caught:
        check_submit(submit(1, [5], 1, **fields), MODEL)
    assert caught.value.reason is Reason.INVALID_FIELD
    asked = submit(1, [5], 1, pooling=MEAN)
    check_submit(asked, MODEL)
    for change in (
        {"constraint": types_pb2.Constraint(regex="a")},
        {"logprobs": types_pb2.LogprobOptions(prompt_count=0)},
    ):
        wrong = type(asked)(**change)  # type: ignore[arg-type]
        wrong.MergeFrom(asked)
        with pytest.raises(QuireError, match="pooling"):
            check_submit(wrong, MODEL)
