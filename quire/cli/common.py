"""What commands share: their parser, the gateway's address, and errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from quire.client import DEFAULT_TARGET, Client, ClientError, bearer
from quire.supervisor.rundir import RunDirectory
from services.common.flags import FlagParser


class Failure(Exception):
    """What to tell the user, in one line."""


def parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help ends with examples."""
    shown = "examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines())
    return FlagParser(prog=f"quire {command}", description=description, epilog=shown)


def add_address(to: argparse.ArgumentParser) -> None:
    """--address of the gateway, and --api-key for one that asks for it."""
    to.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=f"the gateway (default: $QUIRE_ADDRESS, the run of `quire up`, or {DEFAULT_TARGET})",
    )
    to.add_argument("--api-key", metavar="KEY", help="of a gateway with keys (default: $QUIRE_API_KEY)")


def api_key(given: str | None) -> str:
    """The API key to show: `given`, or that of the environment; empty for none. SystemExit where it cannot be one."""
    key = given or os.environ.get("QUIRE_API_KEY", "")
    try:
        bearer(key)
    except ValueError as error:
        raise SystemExit(f"quire: {error}") from None
    return key


def gateway_address(args: argparse.Namespace) -> str:
    """The gateway to talk to."""
    if args.address:
        return str(args.address)
    if address := os.environ.get("QUIRE_ADDRESS"):
        return address
    live = RunDirectory().live()
    return live.grpc if live is not None else DEFAULT_TARGET


@contextmanager
def gateway(args: argparse.Namespace) -> Iterator[Client]:
    """A client of the gateway; errors inside become a Failure that names the address where that is the problem."""
    address = gateway_address(args)
    with Client(address, api_key=api_key(args.api_key)) as client:
        try:
            yield client
        except ClientError as error:
            raise Failure(in_words(error.code, error.message, address, error.reason)) from error


def in_words(code: grpc.StatusCode, message: str, address: str, reason: str = "") -> str:
    """A failed call in one line. Where there is a `reason`, the gateway answered."""
    if reason:
        return f"{message} ({code.name})"
    if code == grpc.StatusCode.UNAVAILABLE and "resolving" in message:
        return f"{address}: no such host"
    if code == grpc.StatusCode.UNAVAILABLE and "connect" in message.lower():
        return f"no gateway answers on {address}; is `quire up` running?"
    return f"{message} ({code.name})"


@contextmanager
def failures(command: str) -> Iterator[None]:
    """Prints a Failure as `quire COMMAND: ...` and ends with status 1."""
    try:
        yield
    except Failure as failure:
        print(f"quire {command}: {failure}", file=sys.stderr)
        raise SystemExit(1) from None
