"""A file of keys for tests of both surfaces: two tenants, one of them with keys of all scopes, and one that expired."""

from __future__ import annotations

from pathlib import Path

from services.gateway.caller import digest_of

ACME, BLUE, OPERATOR = "qk-acme-" + "a" * 35, "qk-blue-" + "b" * 35, "qk-oper-" + "c" * 35
METRICS, EXPIRED = "qk-metr-" + "d" * 35, "qk-exp-" + "e" * 35

# S3: none of them opens anything.
WRONG = [
    None,
    "",
    ACME,
    f"Basic {ACME}",
    "Bearer",
    "Bearer ",
    f"Bearer {ACME[:-1]}x",
    f"Bearer {ACME[:-1]}",
    f"Bearer {ACME}x",
    f"Bearer {ACME} {ACME}",
    f"Bearer {digest_of(ACME).hex()}",
    f"Bearer {EXPIRED}",
    "Bearer " + "x" * 4000,
]


def write_keys(folder: Path) -> Path:
    path = folder / "keys.toml"
    entries = [
        ("acme", ACME, ""),
        ("blue", BLUE, ""),
        ("acme", OPERATOR, 'scopes = ["infer", "admin"]\n'),
        ("acme", METRICS, 'scopes = ["metrics"]\n'),
        ("acme", EXPIRED, "expires = 2026-01-01T00:00:00Z\n"),
    ]
    path.write_text(
        "".join(
            f'[[keys]]\ntenant = "{tenant}"\nsha256 = "{digest_of(key).hex()}"\n{more}' for tenant, key, more in entries
        )
        + "[tenants.acme]\nweight = 2.5\nmax_priority = 7\n"
    )
    return path
