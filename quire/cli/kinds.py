"""Commands that have kinds, each a module with `main(argv) -> int` that is imported only when it is asked for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence


def run_kind(command: str, kinds: Mapping[str, str], usage: str, argv: Sequence[str]) -> int:
    """Runs `quire COMMAND KIND ...`; 2 where the kind is missing or unknown."""
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    if argv[0] not in kinds:
        print(f"quire {command}: no such kind: {argv[0]}; one of {', '.join(kinds)}", file=sys.stderr)
        return 2
    status: int = importlib.import_module(kinds[argv[0]]).main(list(argv[1:]))
    return status
