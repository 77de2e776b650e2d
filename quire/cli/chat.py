"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence

import grpc

from quire.cli.common import add_address, failures, gateway, gateway_address, parser, rpc_message
from quire.cli.sampling import add_sampling, generation_input
from quire.v1 import gateway_pb2, gateway_pb2_grpc

HELP = "/new begins anew, /quit (or Ctrl-D) ends, Ctrl-C stops an answer"


def run(argv: Sequence[str]) -> int:
    args = parser(
        "chat",
        f"Talks with a model. {HELP}.",
        'quire chat\nquire chat --model a --system "Answer in rhymes." --temperature 0.7',
    )
    args.add_argument("--system", metavar="TEXT", help="a system message that leads the conversation")
    add_sampling(args, max_tokens=512)
    add_address(args)
    given = args.parse_args(argv)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  line editing and history for input()
    with failures("chat"), gateway(given) as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        listed = stub.ListModels(gateway_pb2.ListModelsRequest(), timeout=10)
        print(f"{given.model or ', '.join(model.name for model in listed.models)}: {HELP}")
        lead = [gateway_pb2.ChatMessage(role="system", content=given.system)] if given.system else []
        messages = list(lead)
        while (text := _ask()) is not None:
            if text == "/new":
                messages = list(lead)
            elif text:
                messages.append(gateway_pb2.ChatMessage(role="user", content=text))
                asked = generation_input(given)
                asked.chat.messages.extend(messages)
                answer = _answer(stub, asked, gateway_address(given))
                if answer is None:
                    messages.pop()
                else:
                    messages.append(gateway_pb2.ChatMessage(role="assistant", content=answer))
    return 0


def _ask() -> str | None:
    """The user's next line; None to end."""
    try:
        text = input("> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print()
        return ""
    return None if text == "/quit" else text


def _answer(
    stub: gateway_pb2_grpc.InferenceServiceStub, asked: gateway_pb2.GenerationInput, address: str
) -> str | None:
    """Streams an answer. Ctrl-C ends it and keeps what was said; None where it failed, which is printed."""
    call = stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=asked))
    said: list[str] = []
    try:
        for message in call:
            said.append(message.text)
            print(message.text, end="", flush=True)
    except KeyboardInterrupt:
        call.cancel()
    except grpc.RpcError as error:
        print(f"quire chat: {rpc_message(error, address)}", file=sys.stderr)
        return None
    print()
    return "".join(said)
