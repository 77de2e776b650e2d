"""`quire chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from quire.cli.common import add_address, failures, gateway, gateway_address, in_words, parser
from quire.cli.patience import patience
from quire.cli.sampling import add_sampling, defaults, options
from quire.client import Client, ClientError

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
    with failures("chat"), gateway(given) as client:
        models = client.models()
        chosen = defaults(models, given.model) | options(given)
        print(f"{given.model or ', '.join(model.name for model in models)}: {HELP}")
        lead = [{"role": "system", "content": given.system}] if given.system else []
        messages = list(lead)
        while (text := _ask()) is not None:
            if text == "/new":
                messages = list(lead)
            elif text:
                messages.append({"role": "user", "content": text})
                answer = _answer(client, messages, chosen, gateway_address(given))
                if answer is None:
                    messages.pop()
                else:
                    messages.append({"role": "assistant", "content": answer})
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


def _answer(client: Client, messages: list[dict[str, str]], chosen: dict[str, Any], address: str) -> str | None:
    """Streams an answer. Ctrl-C ends it and keeps what was said; None where it failed, which is printed."""
    said: list[str] = []
    with (
        patience(client) as watch,
        contextlib.closing(client.stream(messages, **chosen, request_id=watch.request_id)) as pieces,
    ):
        try:
            for piece in pieces:
                watch.heard()
                said.append(piece.text)
                print(piece.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except ClientError as error:
            print(f"quire chat: {in_words(error.code, error.message, address, error.reason)}", file=sys.stderr)
            return None
    print()
    return "".join(said)
