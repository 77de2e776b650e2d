"""What commands share: their parser, the gateway's address, and errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from quire.supervisor.rundir import RunDirectory

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024


class Failure(Exception):
    """What to tell the user, in one line."""


def parser(command: str, description: str, examples: str) -> argparse.ArgumentParser:
    """A parser whose help ends with examples."""
    return argparse.ArgumentParser(
        prog=f"quire {command}",
        description=description,
        epilog="examples:\n" + "\n".join(f"  {line}" for line in examples.strip().splitlines()),
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_address(to: argparse.ArgumentParser) -> None:
    """--address of the gateway."""
    to.add_argument(
        "--address",
        metavar="HOST:PORT",
        help=f"the gateway (default: $QUIRE_ADDRESS, the run of `quire up`, or {DEFAULT_ADDRESS})",
    )


def gateway_address(args: argparse.Namespace) -> str:
    """The gateway to talk to."""
    if args.address:
        return str(args.address)
    if address := os.environ.get("QUIRE_ADDRESS"):
        return address
    live = RunDirectory().live()
    return live.grpc if live is not None else DEFAULT_ADDRESS


@contextmanager
def gateway(args: argparse.Namespace) -> Iterator[grpc.Channel]:
    """A channel to the gateway; RPC errors inside become a Failure that names the address where that is the problem."""
    address = gateway_address(args)
    options = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            raise Failure(rpc_message(error, address)) from error


def rpc_message(error: Any, address: str) -> str:
    """An RPC error in words."""
    code, details = error.code(), error.details()
    if code == grpc.StatusCode.UNAVAILABLE and "connect" in (details or "").lower():
        return f"no gateway answers on {address}; is `quire up` running?"
    return f"{details or code.name} ({code.name})"


@contextmanager
def failures(command: str) -> Iterator[None]:
    """Prints a Failure as `quire COMMAND: ...` and ends with status 1."""
    try:
        yield
    except Failure as failure:
        print(f"quire {command}: {failure}", file=sys.stderr)
        raise SystemExit(1) from None
