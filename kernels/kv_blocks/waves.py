"""Copies that can be made at once, so that all together do what one after the other would."""

from __future__ import annotations

from collections.abc import Sequence


def waves(pairs: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Cuts copies (source, destination) into runs in which none reads or writes what another of the run writes."""
    found: list[list[tuple[int, int]]] = []
    read: set[int] = set()
    written: set[int] = set()
    for source, destination in pairs:
        if not found or source in written or destination in written or destination in read:
            found.append([])
            read, written = set(), set()
        found[-1].append((source, destination))
        read.add(source)
        written.add(destination)
    return found
