"""`quire generate`: one prompt, streamed to the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from quire.cli.common import Failure, add_address, failures, gateway, parser
from quire.cli.sampling import add_sampling, generation_input
from quire.v1 import gateway_pb2, gateway_pb2_grpc, types_pb2


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
    add_address(args)
    args.add_argument("--json", action="store_true", help="print one JSON object at the end instead of text")
    given = args.parse_args(argv)
    asked = generation_input(given)
    prompt = sys.stdin.read() if given.prompt == "-" else given.prompt
    if given.chat:
        asked.chat.messages.add(role="user", content=prompt)
    else:
        asked.text = prompt
    with failures("generate"), gateway(given) as channel:
        stub = gateway_pb2_grpc.InferenceServiceStub(channel)
        if given.json:
            print(json.dumps(_whole(stub.Generate(gateway_pb2.GenerateRequest(input=asked)))))
        else:
            _stream(stub, asked)
    return 0


def _stream(stub: gateway_pb2_grpc.InferenceServiceStub, asked: gateway_pb2.GenerationInput) -> None:
    reason = types_pb2.FINISH_REASON_UNSPECIFIED
    for message in stub.GenerateStream(gateway_pb2.GenerateStreamRequest(input=asked)):
        print(message.text, end="", flush=True)
        reason = message.finish_reason or reason
    print()
    if reason == types_pb2.FINISH_REASON_UNSPECIFIED:
        raise Failure("the stream ended before the answer did")


def _whole(answer: gateway_pb2.GenerateResponse) -> dict[str, object]:
    (choice,) = answer.choices
    return {
        "request_id": answer.request_id,
        "model": answer.model,
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": types_pb2.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower(),
        "usage": {
            "prompt_tokens": answer.usage.prompt_tokens,
            "completion_tokens": answer.usage.completion_tokens,
            "cached_tokens": answer.usage.cached_tokens,
        },
    }
