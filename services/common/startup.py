"""How every service's process begins."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.common import log as logs
from services.common.settings import S, describe, load


def begin(cls: type[S], role: str, argv: Sequence[str]) -> S:
    """The service's settings, with logging set up as they say and all of them in its first line."""
    settings = load(cls, role, argv)
    logs.configure(role, settings.log_level, settings.log_format)
    logging.getLogger(f"quire.{role}").info("starting", extra={"settings": describe(settings)})
    return settings
