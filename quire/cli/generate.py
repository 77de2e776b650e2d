"""`quire generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from quire.cli.common import Failure, add_address, failures, gateway, parser
from quire.cli.patience import Watch, patience
from quire.cli.plain import plain
from quire.cli.sampling import add_sampling, defaults, options
from quire.client import Answer, Client, Prompt


def run(argv: Sequence[str]) -> int:
    args = parser(
        "generate",
        "Continues a prompt and prints the text as it comes.",
        'quire generate "Once upon a time"\n'
        'quire generate --chat "Name three rivers." --temperature 0\n'
        "quire generate - < prompt.txt --json",
    )
    args.add_argument("prompt", help="the text to continue; - reads it from standard input")
    args.add_argument(
        "--chat", action="store_true", help="ask the prompt as a user's message, with the model's template"
    )
    add_sampling(args, max_tokens=128)
    args.add_argument("--beams", type=int, metavar="N", help="answer with the best path of a beam search this wide")
    args.add_argument("--length-penalty", type=float, metavar="X", help="larger favours long paths (default: 1)")
    add_address(args)
    args.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")
    given = args.parse_args(argv)
    text = sys.stdin.read() if given.prompt == "-" else given.prompt
    prompt: Prompt = [{"role": "user", "content": text}] if given.chat else text
    with failures("generate"), gateway(given) as client:
        # A search draws nothing.
        chosen = {} if given.beams else defaults(client.models(), given.model)
        chosen |= options(given) | {"beam_width": given.beams, "length_penalty": given.length_penalty}
        with patience(client) as watch:
            chosen["request_id"] = watch.request_id
            if given.json:
                print(json.dumps(_plain(client.generate(prompt, **chosen))))
            else:
                _stream(client, prompt, chosen, watch)
    return 0


def _stream(client: Client, prompt: Prompt, chosen: dict[str, Any], watch: Watch) -> None:
    reason, said = None, False
    try:
        for piece in client.stream(prompt, **chosen):
            watch.heard()
            print(piece.text, end="", flush=True)
            reason, said = piece.finish_reason or reason, True
    finally:
        if said:
            print(flush=True)
    if reason is None:
        raise Failure("the stream ended before the answer did")


def _plain(answer: Answer) -> dict[str, Any]:
    return {
        "request_id": answer.response.request_id,
        "model": answer.response.model,
        "text": answer.text,
        "token_ids": list(answer.response.choices[0].token_ids),
        "finish_reason": answer.finish_reason,
        "usage": plain(answer.response.usage),
    }
