"""Texts that flags name."""

from __future__ import annotations

from pathlib import Path

from services.common.errors import invalid


def read_text(flag: str, path: str) -> str:
    """A file's text, unchanged. Raises INVALID_FIELD, naming the flag, where there is none or it is not UTF-8."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except OSError as error:
        raise invalid(flag, f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise invalid(flag, f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error
