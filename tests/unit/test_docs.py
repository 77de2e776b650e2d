"""The documents name only what exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = re.compile(r"`((?:services|kernels|quire|tests|protos|docs|tools)/[\w./-]+?)(?:: ([\w.]+))?`")


def names_in(path: Path) -> set[str]:
    """Classes, functions and methods ("Class.method") of a module."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            functions = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{node.name}.{item.name}" for item in functions}
    return found


@pytest.mark.parametrize("document", ["docs/token-path.md", "README.md"])
def test_what_a_document_names_exists(document: str) -> None:
    for path, name in REFERENCE.findall((ROOT / document).read_text()):
        assert (ROOT / path).exists(), f"{document}: no {path}"
        if name:
            assert name in names_in(ROOT / path), f"{document}: no {name} in {path}"


def test_the_token_path_has_a_file_per_hop() -> None:
    hops = re.findall(r"^\d+\. .*?(?=^\d+\. |^## |\Z)", (ROOT / "docs/token-path.md").read_text(), re.M | re.S)
    assert len(hops) == 14
    assert all(REFERENCE.search(hop) for hop in hops)
