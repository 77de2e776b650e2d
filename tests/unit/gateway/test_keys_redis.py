"""Keys in a real Redis: edited in turn, followed by gateways, kept while it is away."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import cli
from services.common.errors import QuireError, Reason
from services.common.store import Store
from services.gateway.caller import digest_of, key_id
from services.gateway.identity import Identity
from services.gateway.keys.document import parse
from services.gateway.keys.editing import entry_text, with_key
from services.gateway.keys.redis import NAME, RedisKeys, RedisPlace
from tests.fixtures.redis_server import RedisServer


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    made = RedisServer(tmp_path)
    made.start()
    yield made
    made.kill()


def add(server: RedisServer, key: str) -> None:
    RedisPlace(server.url).edit(lambda text: with_key(text, entry_text("acme", key, ["infer"], None, None)))


def test_editors_come_in_turn(server: RedisServer) -> None:
    threads = [threading.Thread(target=add, args=(server, f"qk-{number}")) for number in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(parse(RedisPlace(server.url).read()).keys) == 10


async def test_gateways_follow(server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(server.url, 60)
    keys = RedisKeys(store)
    identity = Identity(keys)
    with pytest.raises(QuireError) as caught:
        await identity.caller(["Bearer qk-a"])
    assert caught.value.reason is Reason.STORE_LOST
    add(server, "qk-a")
    await keys.follow()
    assert (await identity.caller(["Bearer qk-a"])).key == key_id(digest_of("qk-a"))
    add(server, "qk-b")
    await keys.follow()
    assert (await identity.caller(["Bearer qk-b"])).tenant == "acme"

    await store.client.hset(NAME, mapping={"text": "[[keys]", "stamp": "broken"})
    for _ in range(3):
        await keys.follow()
    assert [record.levelname for record in caplog.records if "stay" in record.message] == ["ERROR"]
    assert (await identity.caller(["Bearer qk-a"])).tenant == "acme"

    server.kill()
    await keys.follow()
    assert (await identity.caller(["Bearer qk-a"])).tenant == "acme"
    server.start()
    add(server, "qk-c")
    store._silent_until = 0
    await keys.follow()
    assert (await identity.caller(["Bearer qk-c"])).tenant == "acme"
    with pytest.raises(QuireError, match="not known"):
        await identity.caller(["Bearer qk-a"])
    await store.close()


def test_the_command_edits_them(
    server: RedisServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUIRE_GATEWAY_REDIS", server.url)

    def said(*arguments: str) -> list[dict[str, str]] | dict[str, str]:
        assert cli.main(["keys", *arguments, "--json"]) == 0
        answer: list[dict[str, str]] | dict[str, str] = json.loads(capsys.readouterr().out)
        return answer

    first, second = said("create", "acme"), said("create", "blue")
    assert isinstance(first, dict)
    assert isinstance(second, dict)
    said("revoke", first["id"])
    [left] = said("list")
    assert left == {
        "id": second["id"],
        "tenant": "blue",
        "scopes": ["infer"],
        "created": left["created"],
        "expires": None,
    }
    document = tmp_path / "keys.toml"
    document.write_text(entry_text("acme", "qk-a", ["admin"], None, None) + "[tenants.acme]\ntokens_per_minute = 9\n")
    assert said("import", str(document)) == {"keys": 1}
    assert RedisPlace(server.url).read() == document.read_text()
    server.kill()
    with pytest.raises(SystemExit) as end:
        cli.main(["keys", "list"])
    assert end.value.code == 1
    assert "Redis: " in capsys.readouterr().err
