"""The README's client examples, run as they stand apart from ports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.stack import Stack
from tests.fixtures.models import make_script_model

README = (Path(__file__).parents[2] / "README.md").read_text()
ANSWER = "Nile, Po, Ob"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("readme") / "model"
    make_script_model(folder, [ANSWER])
    with Stack(folder, name="smollm2") as running:
        yield running


def example(stack: Stack, language: str, containing: str) -> str:
    blocks = re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)
    (code,) = (block for block in blocks if containing in block)
    return str(code).replace("127.0.0.1:50051", stack.gateway).replace("http://127.0.0.1:8000", stack.http)


@pytest.mark.parametrize("containing", ["from quire.client import Client", "from openai import OpenAI"])
def test_python_examples_print_the_answer(stack: Stack, containing: str) -> None:
    code = example(stack, "python", containing)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ANSWER), done.stderr


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_example_answers(stack: Stack) -> None:
    code = example(stack, "sh", "curl ")
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["choices"][0]["text"] == ANSWER
