"""Limits of tenants and keys on the gRPC surface, with counts in memory and in a real Redis that may go away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from quire.client import Client, ClientError
from quire.v1 import gateway_pb2
from tests.contract.gateway.conftest import Stack, eventually, running
from tests.contract.gateway.fake_scheduler import LENGTH, FakeScheduler
from tests.contract.gateway.keys import ACME, BLUE, OPERATOR, write_keys
from tests.contract.gateway.test_generate import asked, reason_of
from tests.contract.gateway.test_identity import key
from tests.fixtures.redis_server import RedisServer


def limited(folder: Path, limits: str, of_key: str = "") -> Path:
    """Keys of which the tenant acme's have limits, and its first one others of its own."""
    path = write_keys(folder)
    text = path.read_text().replace("[tenants.acme]\n", f"[tenants.acme]\n{limits}\n")
    path.write_text(text.replace('tenant = "acme"\n', f'tenant = "acme"\n{of_key}\n', 1))
    return path


@pytest.fixture(params=["memory", "redis"])
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Settings of a gateway, with and without Redis."""
    if request.param == "memory":
        yield {}
        return
    server = RedisServer(tmp_path)
    server.start()
    yield {"redis": server.url, "redis_lost": "closed"}
    server.kill()


@contextlib.asynccontextmanager
async def gateway(folder: Path, scheduler: FakeScheduler, keys: Path, **settings: Any) -> AsyncIterator[Stack]:
    async with running(folder, scheduler, keys=keys, **settings) as stack:
        await eventually(lambda: stack.engine.ready)
        yield stack


class Asking:
    """Requests that the scheduler answers with as many tokens as a test says."""

    def __init__(self, stack: Stack) -> None:
        self.stack, self.count = stack, len(stack.scheduler.submits)

    async def whole(self, text: str = ACME, output: int = 2, **fields: Any) -> grpc.aio.Call:
        """One request from begin to end."""
        call, submit = await self.begin(text, **fields)
        await self.end(call, submit, output)
        return call

    async def begin(self, text: str = ACME, **fields: Any) -> tuple[Any, Any]:
        call = self.stack.inference.GenerateStream(asked("abc", **fields), metadata=key(text))
        reading = asyncio.ensure_future(call.read())
        await eventually(lambda: reading.done() or len(self.stack.scheduler.submits) > self.count)
        if reading.done():
            await reading
        self.count += 1
        submit = self.stack.scheduler.submits[self.count - 1]
        call.first = reading
        return call, submit

    async def end(self, call: Any, submit: Any, output: int) -> None:
        await self.stack.scheduler.started(submit)
        await self.stack.scheduler.tokens(submit, b"x" * output, end=LENGTH)
        await call.first
        while await call.read() is not grpc.aio.EOF:
            pass

    async def refused(self, text: str = ACME, **fields: Any) -> grpc.aio.AioRpcError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.begin(text, **fields)
        return caught.value


def retry_seconds(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.RetryInfo()
    [found] = [info.retry_delay.ToMilliseconds() / 1000 for detail in status.details if detail.Unpack(info)]
    return found


async def test_requests_a_minute(tmp_path: Path, scheduler: FakeScheduler, shared: dict[str, Any]) -> None:
    async with gateway(tmp_path, scheduler, limited(tmp_path, "requests_per_minute = 2"), **shared) as stack:
        asking = Asking(stack)
        call = await asking.whole()
        headers = {name: value for name, value in await call.initial_metadata() if name.startswith("x-ratelimit")}
        assert headers["x-ratelimit-limit-requests"] == "2"
        assert headers["x-ratelimit-remaining-requests"] == "1"
        assert float(headers["x-ratelimit-reset-requests"].removesuffix("s")) <= 30
        await asking.whole(OPERATOR)  # of the same tenant
        for _ in range(2):  # asked again, and known without asking
            error = await asking.refused()
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "RATE_LIMITED"
            assert "requests_per_minute: the limit of tenant 'acme'" in (error.details() or "")
            assert 0 < retry_seconds(error) <= 30
            assert dict(error.trailing_metadata() or ())["x-ratelimit-remaining-requests"] == "0"
        await asking.whole(BLUE)  # another tenant has nothing to do with it
        text = stack.engine.metrics().decode()
        assert 'quire_gateway_refusals_total{limit="requests_per_minute"} 2.0' in text


async def test_calls_that_generate_nothing_count_too(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with gateway(tmp_path, scheduler, limited(tmp_path, "requests_per_minute = 2")) as stack:
        request = gateway_pb2.TokenizeRequest(text="abc")
        await stack.inference.Tokenize(request, metadata=key(ACME))
        await stack.inference.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[97]), metadata=key(ACME))
        with pytest.raises(grpc.aio.AioRpcError, match="requests_per_minute"):
            await stack.inference.Tokenize(request, metadata=key(ACME))


async def test_tokens_a_minute(tmp_path: Path, scheduler: FakeScheduler, shared: dict[str, Any]) -> None:
    """The prompt's four tokens and max_tokens are held, and settled by what was produced."""
    async with gateway(tmp_path, scheduler, limited(tmp_path, "tokens_per_minute = 100"), **shared) as stack:
        asking = Asking(stack)
        call, submit = await asking.begin(stop={"max_tokens": 70})
        error = await asking.refused(stop={"max_tokens": 40})
        assert "tokens_per_minute" in (error.details() or "")
        assert 5 < retry_seconds(error) <= 11
        await asking.end(call, submit, 2)
        call = await asking.whole(stop={"max_tokens": 40})
        left = dict(await call.initial_metadata())["x-ratelimit-remaining-tokens"]
        assert 50 <= int(left) <= 56
        large = await asking.refused(stop={"max_tokens": 97})
        assert reason_of(large) == "TOO_LARGE"
        assert "101 tokens, above the 100" in (large.details() or "")


async def test_what_was_not_stated_is_charged_as_it_is_produced(tmp_path: Path, scheduler: FakeScheduler) -> None:
    async with gateway(tmp_path, scheduler, limited(tmp_path, "tokens_per_minute = 300")) as stack:
        asking = Asking(stack)
        call, submit = await asking.begin()  # holds 4 + 256
        await scheduler.started(submit)
        await scheduler.tokens(submit, b"x" * 400)
        await call.first
        await eventually(lambda: all(grant.held > 400 for grant in stack.engine._quota._open.values()))
        error = await asking.refused(stop={"max_tokens": 1})
        assert 15 < retry_seconds(error) <= 25  # a debt of about 104
        call.cancel()


async def test_requests_at_a_time(tmp_path: Path, scheduler: FakeScheduler, shared: dict[str, Any]) -> None:
    async with gateway(tmp_path, scheduler, limited(tmp_path, "", "concurrent_requests = 1"), **shared) as stack:
        asking = Asking(stack)
        for ending in ("end", "cancel", "end"):
            call, submit = await asking.begin()
            error = await asking.refused()
            assert "concurrent_requests: the limit of key " in (error.details() or "")
            await asking.whole(OPERATOR)  # the other key of the tenant
            if ending == "end":
                await asking.end(call, submit, 1)
            else:
                call.cancel()
            await eventually(lambda: not stack.engine._quota._open and not stack.engine._quota._settling)


async def test_what_each_request_may_ask_for(tmp_path: Path, scheduler: FakeScheduler) -> None:
    limits = 'max_context_tokens = 60\nmax_output_tokens = 50\nmodels = ["m", "n"]\nqueue_share = 0.5'
    of_key = 'max_output_tokens = 20\nmodels = ["m", "x"]\nmax_priority = 3'
    async with gateway(tmp_path, scheduler, limited(tmp_path, limits, of_key)) as stack:
        asking = Asking(stack)
        call, submit = await asking.begin()
        assert (submit.stop.max_tokens, submit.queue_share) == (20, 0.5)
        call.cancel()
        call, submit = await asking.begin(OPERATOR)
        assert submit.stop.max_tokens == 50
        call.cancel()
        call, submit = await asking.begin(BLUE)
        assert (submit.stop.max_tokens, submit.queue_share) == (508, 0)
        call.cancel()
        over = await asking.refused(stop={"max_tokens": 21})
        assert reason_of(over) == "INVALID_FIELD"
        assert "stop.max_tokens: 21 is above 20" in (over.details() or "")
        least = await asking.refused(stop={"min_tokens": 21})
        assert "stop.min_tokens" in (least.details() or "")
        assert reason_of(await asking.refused(OPERATOR, stop={"max_tokens": 57})) == "CONTEXT_EXCEEDED"
        assert "above 3" in (await asking.refused(priority=4)).details()
        call, _ = await asking.begin(OPERATOR, priority=7)
        call.cancel()


async def test_models_that_are_not_allowed_do_not_exist(tmp_path: Path, scheduler: FakeScheduler) -> None:
    other = type(scheduler.model)()
    other.CopyFrom(scheduler.model)
    other.name = "n"
    scheduler.models = [scheduler.model, other]
    async with gateway(tmp_path, scheduler, limited(tmp_path, "", 'models = ["n"]')) as stack:
        listed = await stack.inference.ListModels(gateway_pb2.ListModelsRequest(), metadata=key(ACME))
        assert [model.name for model in listed.models] == ["n"]
        asking = Asking(stack)
        error = await asking.refused(model="m")
        assert reason_of(error) == "MODEL_NOT_FOUND"
        assert error.details() == "model 'm' is not loaded; models: n"
        call, submit = await asking.begin()  # the only one that there is
        assert submit.model == "n"
        call.cancel()
        with pytest.raises(grpc.aio.AioRpcError, match="not loaded"):
            await stack.inference.Tokenize(gateway_pb2.TokenizeRequest(model="m", text="a"), metadata=key(ACME))


async def test_usage_is_counted(tmp_path: Path, scheduler: FakeScheduler, shared: dict[str, Any]) -> None:
    async with gateway(tmp_path, scheduler, write_keys(tmp_path), **shared) as stack:
        asking = Asking(stack)
        await asking.whole(output=5)
        await asking.whole(output=7)
        await asking.whole(BLUE, output=1)
        today = datetime.now(UTC).date()

        def read() -> list[tuple[Any, ...]]:
            with Client(stack.engine.settings.listen, api_key=OPERATOR) as client:
                rows = client.usage(today, today)
                assert client.usage(today, today, tenant="blue") == rows[1:]
                with pytest.raises(ClientError, match="first_day"):
                    client.usage(today, today.replace(year=today.year - 2))
            return [
                (row.day, row.tenant, row.model, row.request_count, row.prompt_tokens, row.output_tokens)
                for row in rows
            ]

        day = today.isoformat()
        assert await asyncio.to_thread(read) == [(day, "acme", "m", 2, 8, 12), (day, "blue", "m", 1, 4, 1)]


@pytest.mark.parametrize("when_lost", ["open", "closed"])
async def test_redis_may_go_and_come_back(
    tmp_path: Path, scheduler: FakeScheduler, when_lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams go on; new requests are counted by the gateway alone, or refused; nobody restarts anything."""
    server = RedisServer(tmp_path)
    server.start()
    keys = limited(tmp_path, "requests_per_minute = 100\nconcurrent_requests = 2")
    try:
        async with gateway(tmp_path, scheduler, keys, redis=server.url, redis_lost=when_lost) as stack:
            asking = Asking(stack)
            running_call, running_submit = await asking.begin()
            server.kill()
            if when_lost == "closed":
                error = await asking.refused()
                assert error.code() == grpc.StatusCode.UNAVAILABLE
                assert reason_of(error) == "STORE_LOST"
                assert retry_seconds(error) > 0
                await asking.whole(BLUE)  # has no limits
            else:
                first, _ = await asking.begin()
                second, _ = await asking.begin()
                assert "concurrent_requests" in ((await asking.refused()).details() or "")
                first.cancel()
                second.cancel()
            assert [r.levelname for r in caplog.records if r.message == "the store is lost"][:1] == ["ERROR"]
            assert "quire_gateway_store_lost 1.0" in stack.engine.metrics().decode()
            await asking.end(running_call, running_submit, 3)
            server.start()
            await eventually(lambda: "quire_gateway_store_lost 0.0" in stack.engine.metrics().decode())
            call = await asking.whole()
            assert dict(await call.initial_metadata())["x-ratelimit-remaining-requests"] == "99"
            assert any(record.message == "the store answers again" for record in caplog.records)
            rows = await stack.engine.usage("", "")
            counted = sum(row.requests for row in rows if row.tenant == "acme")
            assert counted == (2 if when_lost == "closed" else 4), "what was used while Redis was gone is counted too"
    finally:
        server.kill()
