"""Failures as clients of other protocols meet them: a canonical status whose message names the field they wrote."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from services.common.errors import QuireError, Reason
from services.gateway.field_names import renamed
from services.gateway.http.errors import HttpError


@contextmanager
def naming(names: Mapping[str, str]) -> Iterator[None]:
    """Failures inside name the client's fields; `names` maps paths of the engine's input to them."""
    try:
        yield
    except HttpError as error:  # of what is read as a body of the HTTP API is
        raise QuireError(Reason.INVALID_FIELD, error.message, field=error.param or "") from None
    except QuireError as error:
        if not error.field:
            raise
        field, message = renamed(error, names)
        reason = Reason.INVALID_FIELD if error.reason is Reason.UNSUPPORTED else error.reason
        raise QuireError(reason, message, field=field, retry_after=error.retry_after, headers=error.headers) from None
