"""Signed tokens: who is let in by them, and how the issuer's keys are followed."""

from __future__ import annotations

import base64
import hmac
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from services.common.errors import QuireError, Reason
from services.gateway.caller import Caller, Scope, digest_of
from services.gateway.identity import Identity
from services.gateway.jwks import FRESH_SECONDS, PAUSE_SECONDS, SigningKeys
from services.gateway.keys.document import Roster, parse, roster_of
from services.gateway.quota.limits import Rates, Subject

RSA, OTHER = rsa.generate_private_key(65537, 2048), rsa.generate_private_key(65537, 2048)
EC, ED = ec.generate_private_key(ec.SECP256R1()), ed25519.Ed25519PrivateKey.generate()


def public(key: Any, kid: str, **more: str) -> dict[str, Any]:
    kinds: dict[type, Any] = {
        rsa.RSAPrivateKey: jwt.algorithms.RSAAlgorithm,
        ec.EllipticCurvePrivateKey: jwt.algorithms.ECAlgorithm,
        ed25519.Ed25519PrivateKey: jwt.algorithms.OKPAlgorithm,
    }
    algorithm = next(one for kind, one in kinds.items() if isinstance(key, kind))
    found: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
    return found | {"kid": kid} | more


class Provider:
    """An identity provider on a port of this machine."""

    def __init__(self) -> None:
        self.keys = [public(RSA, "r", use="sig", alg="RS256"), public(EC, "e"), public(ED, "d")]
        self.asked: list[str] = []
        self.status = 200
        self.calls_itself: str | None = None
        provider = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.asked.append(self.path)
                answers = {
                    "/.well-known/openid-configuration": {
                        "issuer": provider.calls_itself or provider.issuer,
                        "jwks_uri": f"{provider.issuer}/keys",
                    },
                    "/keys": {"keys": provider.keys},
                }
                body = json.dumps(answers[self.path]).encode()
                self.send_response(provider.status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.issuer = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def token(self, key: Any = RSA, kid: str | None = "r", algorithm: str = "RS256", **claims: Any) -> str:
        whole = {"iss": self.issuer, "aud": "quire", "exp": time.time() + 600, "tenant": "acme"} | claims
        whole = {name: value for name, value in whole.items() if value is not None}
        return jwt.encode(whole, key, algorithm=algorithm, headers={"kid": kid} if kid else None)


class Source(NamedTuple):
    roster: Roster


@pytest.fixture
def provider() -> Iterator[Provider]:
    made = Provider()
    yield made
    made.server.shutdown()
    made.server.server_close()


def identity(provider: Provider, more: str = "", head: str = "") -> Identity:
    text = f'{head}[oidc]\nissuer = "{provider.issuer}"\naudience = "quire"\n{more}'
    return Identity(Source(roster_of(parse(text))))


async def test_a_token_opens_what_it_says(provider: Provider) -> None:
    tenants = "[tenants.acme]\nweight = 2\nrequests_per_minute = 5\n[tenants.'*']\nmax_priority = 4\n"
    who = identity(provider, head=tenants)
    caller = await who.caller([f"Bearer {provider.token(scope='openid quire:infer quire:metrics quire:root')}"])
    scopes = frozenset({Scope.INFER, Scope.METRICS})
    assert caller == Caller("acme", "", 2.0, 0, scopes, counted=(Subject("acme", "", Rates(5)),))
    caller = await who.caller([f"Bearer {provider.token(scp=['quire:admin'], tenant='new')}"])
    assert caller == Caller("new", "", 1.0, 4, frozenset({Scope.ADMIN}))
    assert (await who.caller([f"Bearer {provider.token()}"])).scopes == frozenset(), "without scopes nothing opens"
    for key, kid, algorithm in ((EC, "e", "ES256"), (ED, "d", "EdDSA"), (RSA, "r", "RS256")):
        assert (await who.caller([f"Bearer {provider.token(key, kid, algorithm)}"])).tenant == "acme"
    assert provider.asked == ["/.well-known/openid-configuration", "/keys"], "keys are kept"


async def test_keys_and_tokens_live_side_by_side(provider: Provider) -> None:
    keys = f'[[keys]]\ntenant = "blue"\nsha256 = "{digest_of("qk-b").hex()}"\n'
    who = identity(provider, head=keys, more='tenant_claim = "org"')
    assert (await who.caller(["Bearer qk-b"])).tenant == "blue"
    assert (await who.caller([f"Bearer {provider.token(org='acme')}"])).tenant == "acme"
    with pytest.raises(QuireError, match="'org' names no tenant"):
        await who.caller([f"Bearer {provider.token()}"])


def changed(token: str, **fields: Any) -> str:
    """With another header and the same signature."""
    _, payload, signature = token.split(".")
    head = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode().rstrip("=")
    return f"{head}.{payload}.{signature}"


async def test_what_is_wrong_with_a_token_keeps_it_out(provider: Provider) -> None:
    who, now = identity(provider), time.time()
    good = provider.token()
    head, payload, signature = good.split(".")
    forged = base64.urlsafe_b64encode(json.dumps({"tenant": "blue", "exp": now + 60}).encode()).decode().rstrip("=")
    shared = RSA.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    by_hmac = changed(good, alg="HS256", kid="r").rpartition(".")[0]
    seal = base64.urlsafe_b64encode(hmac.digest(shared, by_hmac.encode(), "sha256")).decode().rstrip("=")
    wrong = {
        "expired": provider.token(exp=now - 60),
        "without an end": provider.token(exp=None),
        "not yet": provider.token(nbf=now + 600),
        "of another issuer": provider.token(iss="https://elsewhere.example"),
        "for others": provider.token(aud="elsewhere"),
        "for nobody": provider.token(aud=None),
        "signed by another key": provider.token(OTHER),
        "by a key that is not shown": provider.token(OTHER, "other"),
        "by a key without a name": provider.token(kid=None),
        "by a key of another kind": provider.token(EC, "r", "ES256"),
        "signed by what all may read": f"{by_hmac}.{seal}",
        "not signed": changed(good, alg="none", kid="r"),
        "nor here": f"{head}.{payload}.",
        "of other words": f"{head}.{forged}.{signature}",
        "with a key of its own": changed(good, alg="RS256", kid="r", jku="http://127.0.0.1:9/"),
        "no tenant": provider.token(tenant=None),
        "no name": provider.token(tenant="a b"),
        "no name with a line": provider.token(tenant="a\n"),
        "many tenants": provider.token(tenant=["acme"]),
        "nothing": "a.b.c",
        "dots": "..",
        "broken": f"{head[:-3]}.{payload}.{signature}",
    }
    for what, token in wrong.items():
        with pytest.raises(QuireError) as caught:
            await who.caller([f"Bearer {token}"])
        assert caught.value.reason is Reason.UNAUTHENTICATED, what
        assert token not in caught.value.message or len(token) < 6
    assert (await who.caller([f"Bearer {good}"])).tenant == "acme"


async def test_keys_of_the_issuer_are_followed(provider: Provider) -> None:
    now = 1000.0
    keys = SigningKeys(provider.issuer, None, lambda: now)
    assert await keys.find("r") is not None
    assert await keys.find("n") is None
    assert len(provider.asked) == 2, "whoever makes names up makes us ask"
    provider.keys = [public(OTHER, "n")]
    now += PAUSE_SECONDS
    assert await keys.find("n") is not None
    assert await keys.find("r") is None
    provider.status = 500
    now += FRESH_SECONDS
    assert await keys.find("n") is not None, "an issuer that is away took its keys along"
    provider.status = 200
    provider.keys = []
    now += PAUSE_SECONDS
    assert await keys.find("n") is not None, "an answer without keys took them away"


@pytest.mark.parametrize("fault", ["away", "another", "no json"])
async def test_nothing_opens_before_the_issuer_was_heard(provider: Provider, fault: str) -> None:
    if fault == "away":
        provider.status = 503
    elif fault == "another":
        provider.calls_itself = "https://elsewhere.example"
    else:
        provider.keys = "none"  # type: ignore[assignment]
    with pytest.raises(QuireError) as caught:
        await identity(provider).caller([f"Bearer {provider.token()}"])
    assert caught.value.reason is Reason.STORE_LOST


@pytest.mark.parametrize("field", ["issuer", "jwks"])
@pytest.mark.parametrize("address", ["http://id.example.com", "file:///etc/passwd", "id.example.com", ""])
def test_keys_come_only_from_where_nobody_can_change_them(field: str, address: str) -> None:
    said = {"issuer": "https://id.example.com", "jwks": "https://id.example.com/keys"} | {field: address}
    lines = "\n".join(f'{name} = "{value}"' for name, value in said.items())
    with pytest.raises(ValueError, match=rf"oidc\.{field}: .*https"):
        parse(f'[oidc]\naudience = "quire"\n{lines}')
