"""Settings: one frozen object per service; flags before environment before file; wrong values are refused by name."""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Container, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from services.common.flags import FlagParser

S = TypeVar("S", bound="ServiceSettings")


def _split(value: Any) -> Any:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


CommaList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
"""A list written with commas, as flag, variable or TOML string."""


def _split_words(value: Any) -> Any:
    return tuple(value.split()) if isinstance(value, str) else value


WordList = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split_words)]
"""A list written with spaces, for values that hold commas themselves."""


def _not_empty(value: Any) -> Any:
    if value == "":
        raise ValueError("an empty path names nothing; leave it out for none")
    return value


NamedPath = Annotated[Path, BeforeValidator(_not_empty)]
"""A path that was meant: an empty one would be the working directory."""


_REDIS = re.compile(r"rediss?://[^/?#]*(/[0-9]*/?)?([?#].*)?|unix://.*", re.DOTALL)


def _check_redis(url: SecretStr) -> SecretStr:
    # Of a database that is no number redis-py takes the first, without a word.
    if not _REDIS.fullmatch(url.get_secret_value()):
        raise ValueError("not redis://HOST:PORT/NUMBER, rediss://HOST:PORT/NUMBER or unix://PATH")
    return url


RedisUrl = Annotated[SecretStr, AfterValidator(_check_redis)]
"""A Redis database, which may name a user and password."""


class ServiceSettings(BaseSettings):
    """What every service needs. Subclasses add their own fields and set `env_prefix`."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", cli_kebab_case=True, cli_implicit_flags=True)

    listen: str = Field(description="address to serve gRPC on: host:port or unix:PATH")
    metrics_listen: str = Field(description="host:port of the Prometheus endpoint; empty serves none")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")
    log_format: Literal["text", "json"] = Field("text", description="log lines for people or for machines")
    drain_seconds: float = Field(30.0, ge=0, description="how long running streams may finish after SIGTERM")
    trust_network: bool = Field(False, description="serve beyond loopback without TLS (a private network, a mesh)")
    tls_cert: NamedPath | None = Field(None, description="PEM certificate chain of this service, for gRPC and metrics")
    tls_key: NamedPath | None = Field(None, description="PEM private key of this service")
    tls_ca: NamedPath | None = Field(None, description="PEM authorities: peers must present a certificate they signed")

    @model_validator(mode="after")
    def _check_addresses(self) -> ServiceSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together")
        for name in ("tls_cert", "tls_key", "tls_ca"):
            path = getattr(self, name)
            if path is not None and not path.is_file():
                raise ValueError(f"{name}: no such file: {path}")
        for name in ("listen", "metrics_listen"):
            address = getattr(self, name)
            if address:
                check_listen(name, address)
            if address and not is_loopback(address) and self.tls_cert is None and not self.trust_network:
                raise ValueError(
                    f"{name}: {address} is reachable from elsewhere; set TLS files, or trust_network on private ones"
                )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (
            init_settings,
            env_settings,
            TomlConfigSettingsSource(settings_cls, cls.model_config.get("toml_file")),
        )


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach an address of the form host:port or unix:PATH."""
    if address.startswith("unix:"):
        return True
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def split_address(address: str) -> tuple[str, int]:
    """Host, without the brackets of IPv6, and port of host:port. ValueError where it is something else."""
    host, separator, port = address.rpartition(":")
    if not separator or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError("not host:port with a port in [0, 65535]")
    return host.strip("[]"), int(port)


def check_listen(name: str, address: str) -> None:
    """Raises ValueError, naming the field, where one cannot listen there: a port too large would become another."""
    if address.startswith("unix:"):
        return
    try:
        host, _ = split_address(address)
    except ValueError:
        host = ""
    if not host:
        raise ValueError(f"{name}: {address} is neither host:port, with a port below 65536, nor unix:PATH")


def load(cls: type[S], role: str, argv: Sequence[str]) -> S:
    """Settings of a service from flags, environment (QUIRE_<ROLE>_<FIELD>) and `--config FILE` (TOML).

    Prints what is wrong, by field, and exits with 2 where a value is refused.
    """
    args = list(argv)
    file: str | None = None
    if "--config" in args:
        at = args.index("--config")
        if at + 1 >= len(args):
            print(f"quire serve {role}: --config needs a file", file=sys.stderr)
            sys.exit(2)
        file = args[at + 1]
        del args[at : at + 2]
        if not Path(file).is_file():
            print(f"quire serve {role}: --config: no such file: {file}", file=sys.stderr)
            sys.exit(2)
    prefix = f"QUIRE_{role.upper()}_"
    for warning in unread_variables(cls.model_fields, prefix, os.environ):
        print(f"quire serve {role}: {warning}", file=sys.stderr)

    class Bound(cls):  # type: ignore[valid-type, misc]
        model_config = SettingsConfigDict(env_prefix=prefix, toml_file=file)

    Bound.__doc__ = (
        f"{cls.__doc__}\n\nEach flag is also a variable: {prefix}LOG_LEVEL for --log-level. --config FILE names a\n"
        'TOML file with lines such as log_level = "debug". Flags win over variables, and those over the file.'
    )
    try:
        parser = FlagParser(prog=f"quire serve {role}", description=Bound.__doc__)
        source: Any = CliSettingsSource(Bound, root_parser=parser, cli_kebab_case=True, cli_hide_none_type=True)
        settings: S = CliApp.run(Bound, cli_args=args, cli_settings_source=source)
        return settings
    except ValidationError as error:
        for problem in error.errors():
            named = "".join(f"{part}: " for part in problem["loc"])  # absent where the message names its fields
            print(f"quire serve {role}: {named}{problem['msg'].removeprefix('Value error, ')}", file=sys.stderr)
    except SettingsError as error:
        print(f"quire serve {role}: {error}", file=sys.stderr)
    sys.exit(2)


def unread_variables(fields: Container[str], prefix: str, environment: Iterable[str]) -> list[str]:
    """What variables that nobody reads were probably meant to set. Not errors: Kubernetes makes up some of its own."""
    problems = []
    for name in sorted(environment):
        own, general = name.removeprefix(prefix).lower(), name.removeprefix("QUIRE_").lower()
        if name.startswith(prefix) and own not in fields and "_PORT" not in name and "_SERVICE_" not in name:
            problems.append(f"{name} is ignored: there is no such setting")
        elif name.startswith("QUIRE_") and general in fields:
            problems.append(f"{name} is ignored: the variable of this setting is {prefix}{general.upper()}")
    return problems


def describe(settings: ServiceSettings) -> str:
    """One line with every resolved value, for the log at start."""
    return " ".join(
        f"{name}={value}" for name, value in settings.model_dump(mode="json").items() if value not in (None, "")
    )
