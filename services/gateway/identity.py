"""Whom requests count for, the same on every surface: a prefix is shared within a tenant only."""

from __future__ import annotations

from typing import Final

TENANT: Final = "default"
"""The only tenant while there are no keys."""
