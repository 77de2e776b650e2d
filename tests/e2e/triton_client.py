"""Talks to a gateway by NVIDIA's own client and says what it saw as JSON: `python triton_client.py TARGET MODEL`.

A program of its own, for that client and this project register the same messages.
"""

from __future__ import annotations

import json
import queue
import sys
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException


def text(name: str, value: str) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BYTES")
    tensor.set_data_from_numpy(np.array([value.encode()], np.object_))
    return tensor


def flag(name: str, value: bool) -> triton.InferInput:
    tensor = triton.InferInput(name, [1], "BOOL")
    tensor.set_data_from_numpy(np.array([value]))
    return tensor


def texts(result: triton.InferResult) -> list[str]:
    return [one.decode() for one in result.as_numpy("text_output")]


def talk(client: triton.InferenceServerClient, model: str) -> dict[str, Any]:
    seen: dict[str, Any] = {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "model": client.is_model_ready(model),
        "absent": client.is_model_ready("absent"),
        "server": client.get_server_metadata().name,
        "inputs": [tensor.name for tensor in client.get_model_metadata(model).inputs],
    }
    without = flag("exclude_input_in_output", True)
    parameters = {"max_tokens": 40, "temperature": "0"}
    seen["whole"] = texts(client.infer(model, [text("text_input", "Hi"), without], parameters=parameters))
    seen["with prompt"] = texts(client.infer(model, [text("text_input", "Hi")], parameters={"max_tokens": 1}))
    try:
        client.infer(model, [text("text_input", "Hi"), text("sampling_parameters", '{"top_p": 7}')])
    except InferenceServerException as error:
        seen["refused"] = [error.status(), error.message()]

    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(callback=lambda result, error: results.put(error or result))
    inputs = [text("text_input", "Hi"), flag("stream", True), text("sampling_parameters", '{"max_tokens": 40}')]
    client.async_stream_infer(model, inputs, enable_empty_final_response=True)
    pieces = []
    while True:
        result = results.get(timeout=60)
        pieces += texts(result)
        if result.get_response().parameters["triton_final_response"].bool_param:
            break
    client.async_stream_infer(model, [flag("stream", True)])
    seen["in stream"] = str(results.get(timeout=60))
    client.stop_stream()
    return {**seen, "pieces": pieces}


if __name__ == "__main__":
    target, name = sys.argv[1:]
    with triton.InferenceServerClient(target) as connected:
        print(json.dumps(talk(connected, name)))
