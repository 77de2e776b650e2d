"""ExecutorService.Run over a real stream: grants ahead, chunks, cancels, epochs, gaps, errors."""

import asyncio
import random
import threading

import grpc

from quire.v1 import executor_pb2
from tests.contract.executor.conftest import Stream, eventually, run
from tests.unit.executor.fake_backend import generate
from tests.unit.executor.plans import ends, state, tokens_by_sequence

PROMPT = [5, 6, 7]


async def test_a_request_from_prompt_to_end(executor):
    stream = await run(executor)
    assert stream.epoch == 1
    await stream.plan(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 1), (1, 1, 9)])
    assert tokens_by_sequence(await stream.until_ended(1)) == {1: generate(PROMPT, 8)}


async def test_plans_sent_ahead_keep_the_executor_busy_without_answers(executor):
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(8), max_tokens=25)], grants=[(1, 32, 1)], report_credit=2)
    for _ in range(6):
        await stream.plan(grants=[(1, 1, 4)], report_credit=2)
    results = await stream.until_ended(1)
    assert tokens_by_sequence(results) == {1: generate(PROMPT, 25)}
    assert [message.sequence_number for message in results] == list(range(1, len(results) + 1))


async def test_results_of_several_steps_share_a_message(executor):
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(16), max_tokens=41)], grants=[(1, 32, 1), (1, 1, 40)])
    results = await stream.until_ended(1)
    assert [list(message.token_counts) for message in results] == [[1], [40]]
    assert results[1].timings.step_count == 40
    assert results[1].timings.compute_seconds > 0


async def test_newcomers_join_between_steps(executor):
    executor.backend.gate = threading.Event()
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(8), max_tokens=20)], grants=[(1, 32, 1), (1, 1, 19)])
    await stream.plan(enter=[state(2, [1, 2], range(8, 16))], grants=[(2, 32, 9)])
    await eventually(lambda: executor.engine.worker.steps.computing_since is not None)
    executor.backend.gate.set()
    results = await stream.until_ended(1, 2)
    assert tokens_by_sequence(results) == {1: generate(PROMPT, 20), 2: generate([1, 2], 8)}
    assert [1, 2] in executor.backend.batches[1:3] or [1, 1] in executor.backend.batches


async def test_cancel_between_steps_is_answered(executor):
    executor.backend.step_seconds = 0.01
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(60), max_tokens=200)], grants=[(1, 32, 1), (1, 1, 199)])
    await stream.next_results()
    await stream.plan(ended_sequence_ids=[1])
    while (await stream.next_results()).last_plan < 2:
        pass
    assert executor.engine.sequence_count == 0
    assert len(executor.backend.batches) < 100


async def test_a_new_stream_fences_the_old_one(executor):
    old = await run(executor)
    await old.plan(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 1)])
    await old.next_results()
    new = await run(executor)
    assert new.epoch == 2
    code, details = await old.status()
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "epoch 2" in details
    assert executor.engine.sequence_count == 0
    await new.plan(enter=[state(1, [9], range(4))], grants=[(1, 32, 9)])
    assert tokens_by_sequence(await new.until_ended(1)) == {1: generate([9], 8)}


async def test_a_returning_scheduler_gets_what_it_missed(executor):
    first = await run(executor)
    await first.plan(enter=[state(1, PROMPT, range(8), max_tokens=20)], grants=[(1, 32, 1), (1, 1, 4)])
    seen = [await first.next_results(), await first.next_results()]
    first.call.cancel()
    again = await run(executor, previous_epoch=1, acknowledged=seen[0].sequence_number)
    missed = await again.next_results()
    assert (missed.epoch, missed.sequence_number) == (1, 2)
    assert missed == seen[1]


async def test_a_gap_ends_the_stream_and_a_new_one_works(executor):
    stream = await run(executor)
    stream.step = 1
    await stream.plan(enter=[state(1, PROMPT, range(4))])
    code, details = await stream.status()
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "plan 2 does not follow plan 0" in details
    await run(executor)


async def test_protocol_errors_name_themselves(executor):
    without_hello = Stream(executor.stub.Run())
    await without_hello.plan()
    code, details = await without_hello.status()
    assert code == grpc.StatusCode.FAILED_PRECONDITION
    assert "hello" in details
    twice = await run(executor)
    await twice.call.write(executor_pb2.RunRequest(hello=executor_pb2.RunHello()))
    assert (await twice.status())[0] == grpc.StatusCode.FAILED_PRECONDITION


async def test_a_closed_stream_ends_without_error(executor):
    stream = await run(executor)
    await stream.call.done_writing()
    assert (await stream.status())[0] == grpc.StatusCode.OK


async def test_backend_errors_end_their_sequences_and_the_engine_survives(executor):
    executor.backend.fails = 1
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 9)])
    assert ends(await stream.until_ended(1))[1].error.reason == "INTERNAL"
    await stream.plan(enter=[state(2, PROMPT, range(4))], grants=[(2, 32, 9)])
    assert tokens_by_sequence(await stream.until_ended(2))[2] == generate(PROMPT, 8)


async def test_b6_a_bad_sequence_leaves_its_neighbour_alone(executor):
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(4)), state(2, [100], range(4, 8))], grants=[(1, 32, 9), (2, 32, 9)])
    results = await stream.until_ended(1, 2)
    assert tokens_by_sequence(results)[1] == generate(PROMPT, 8)
    assert ends(results)[2].error.message.startswith("token_ids:")


async def test_l1_messages_beyond_grpc_s_default_of_4_mib(executor):
    stream = await run(executor)
    big = state(1, PROMPT, range(4))
    big.traceparent = "x" * (5 << 20)
    await stream.plan(enter=[big], grants=[(1, 32, 9)])
    assert tokens_by_sequence(await stream.until_ended(1)) == {1: generate(PROMPT, 8)}


async def test_idle_executor_neither_computes_nor_wakes(executor):
    stream = await run(executor)
    await stream.plan(enter=[state(1, PROMPT, range(8), max_tokens=30)], grants=[(1, 32, 3)])
    for _ in range(2):
        await stream.next_results()
    await asyncio.sleep(0.1)  # the turn after the last step finds nothing
    turns = 0
    turn = executor.engine.worker.steps.turn

    def counted():
        nonlocal turns
        turns += 1
        return turn()

    executor.engine.worker.steps.turn = counted
    await asyncio.sleep(0.3)
    assert turns == 0


async def test_answers_do_not_depend_on_neighbours_chunks_or_timing(executor):
    """Random arrivals, chunk sizes and cancels; every sequence that ends equals its lone run."""
    draw = random.Random(4)
    stream = await run(executor)
    prompts = {i: [draw.randrange(99) for _ in range(draw.randrange(1, 20))] for i in range(1, 25)}
    free = list(range(64))
    held: dict[int, list[int]] = {}
    cancelled: dict[int, int] = {}  # by the plan that did it
    waiting, running = list(prompts), []
    while waiting or running:
        entering, grants, ending = [], [], []
        while waiting and len(free) >= 8 and draw.random() < 0.7:
            number = waiting.pop(0)
            held[number] = [free.pop(draw.randrange(len(free))) for _ in range(7)]
            running.append(number)
            entering.append(state(number, prompts[number], held[number], max_tokens=8))
        for number in running:
            grants.append((number, draw.randrange(1, 9), draw.randrange(1, 6)))
        if running and draw.random() < 0.15:
            number = draw.choice(running)
            ending.append(number)
            grants = [grant for grant in grants if grant[0] != number]
            cancelled[number] = stream.step + 1
        if not (grants or ending):
            continue
        await stream.plan(enter=entering, grants=grants, ended_sequence_ids=ending, report_credit=draw.randrange(3))
        while (results := await stream.next_results()).last_plan < stream.step:
            running = [n for n in running if n not in {end.sequence_id for end in results.ended}]
        over = {end.sequence_id for end in results.ended} | set(ending)
        gone = [n for n in held if n in over or n not in running]
        for number in gone:
            free += held.pop(number)
        running = [n for n in running if n not in over]
    tokens = tokens_by_sequence(stream.results)
    complete = set(prompts) - set(cancelled)
    assert len(complete) > 12
    for number in complete:
        assert tokens[number] == generate(prompts[number], 8)


async def test_a_caller_that_leaves_while_opening_harms_nobody(executor):
    executor.backend.gate = threading.Event()
    old = await run(executor)
    await old.plan(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 1)])
    await eventually(lambda: executor.engine.worker.steps.computing_since is not None)
    call = executor.stub.Run()
    await call.write(executor_pb2.RunRequest(hello=executor_pb2.RunHello()))
    await asyncio.sleep(0.05)
    call.cancel()
    await asyncio.sleep(0.05)
    executor.backend.gate.set()
    assert (await old.status())[0] == grpc.StatusCode.FAILED_PRECONDITION
    again = await run(executor)
    assert again.epoch == 3
    await again.plan(enter=[state(1, PROMPT, range(4))], grants=[(1, 32, 9)])
    assert tokens_by_sequence(await again.until_ended(1)) == {1: generate(PROMPT, 8)}
