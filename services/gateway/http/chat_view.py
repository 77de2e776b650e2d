"""Other APIs that say what a chat completion says: their bodies become one, and failures name their own fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from services.gateway.field_names import rename
from services.gateway.http.errors import HttpError, from_validation
from services.gateway.http.schemas import ChatRequest
from services.gateway.http.to_input import Job, chat_job


def view_job(body: Mapping[str, Any], fields: Mapping[str, str]) -> Job:
    """The job of a chat completion's body, whose parts were checked.

    `fields` maps its fields to those that the client wrote. Raises HttpError naming the latter.
    """
    try:
        job = chat_job(ChatRequest.model_validate(body))
    except ValidationError as error:
        raise renamed(from_validation(error), fields) from None
    except HttpError as error:
        raise renamed(error, fields) from None
    return job.renamed(fields)


def renamed(error: HttpError, fields: Mapping[str, str]) -> HttpError:
    """A failure that names the client's field."""
    if error.param is not None:
        name = rename(error.param, fields)
        error.message = name + error.message.removeprefix(error.param)
        error.param = name
    return error
