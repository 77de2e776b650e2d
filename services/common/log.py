"""Structured logs: one line per event, as text for people or JSON for machines."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any

_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {k: v for k, v in record.__dict__.items() if k not in _STANDARD}


class JsonFormatter(logging.Formatter):
    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "service": self._service,
        }
        line |= {"logger": record.name, "event": record.getMessage(), **_extra(record)}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class TextFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        extra = "".join(f" {k}={v}" for k, v in _extra(record).items())
        line = f"{clock}.{int(record.msecs):03d} {record.levelname[0]} {record.getMessage()}{extra}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def configure(service: str, level: str, form: str) -> None:
    """Sets the process's logging up, once. `form` is "text" or "json"; `level` a standard name in lower case."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for noisy in ("httpx", "httpcore", "uvicorn.access", "filelock", "asyncio"):
        logging.getLogger(noisy).setLevel(max(root.level, logging.WARNING))
