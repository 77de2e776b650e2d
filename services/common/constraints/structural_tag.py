"""Structural tags: free text in which some beginnings, once written, must go on as stated. Pure.

Two ways to write them are understood, as clients of other servers send them:

    {"type": "structural_tag", "triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {...}, "end": "</f>"}]}
    {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f"], "tags": [
        {"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {...}}, "end": "</f>"}]}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.common.errors import invalid

MAX_TAGS = 128


@dataclass(frozen=True, slots=True)
class Tag:
    """What follows a beginning: JSON of that schema, then the end."""

    begin: str
    schema: Mapping[str, Any]
    end: str


def tags_to_lark(path: str, value: Any, json_options: Mapping[str, Any]) -> str:
    """A grammar in Lark. Raises INVALID_FIELD naming the part that is wrong."""
    triggers, tags = _parse(path, value)
    free, lines = [], []
    for number, tag in enumerate(tags):
        trigger = next((one for one in triggers if tag.begin.startswith(one)), None)
        if trigger is None:
            raise invalid(path, f"tag {number} begins with none of the triggers")
        schema = {**tag.schema, "x-guidance": dict(json_options)}
        rest = [json.dumps(tag.begin[len(trigger) :])] if tag.begin != trigger else []
        end = [json.dumps(tag.end)] if tag.end else []
        parts = [f"opening_{triggers.index(trigger)}", *rest, f"%json {json.dumps(schema)}", *end]
        lines.append(f"tag_{number}: {' '.join(parts)}")
        free.append(f"tag_{number}")
    # A lazy lexeme ends at once where its trigger is complete, so text cannot run past one.
    opening = [f"opening_{i}[lazy]: TEXT {json.dumps(trigger)}" for i, trigger in enumerate(triggers)]
    return "\n".join([f"start: ({' | '.join(free)})* rest", "rest: TEXT", r"TEXT: /(.|\n)*/", *opening, *lines])


def _parse(path: str, value: Any) -> tuple[list[str], list[Tag]]:
    if not isinstance(value, dict) or value.get("type", "structural_tag") != "structural_tag":
        raise invalid(path, 'must be a JSON object of type "structural_tag"')
    if "format" in value:
        return _parse_format(f"{path}.format", value["format"])
    _only(path, value, "type", "triggers", "structures")
    tags = []
    for number, item in enumerate(_list(path, value, "structures")):
        where = f"{path}.structures[{number}]"
        _only(where, item, "begin", "schema", "end")
        tags.append(_tag(where, item, item.get("schema")))
    return _triggers(path, value), tags


def _parse_format(path: str, value: Any) -> tuple[list[str], list[Tag]]:
    if not isinstance(value, dict) or value.get("type") != "triggered_tags":
        raise invalid(path, 'must be a JSON object of type "triggered_tags"; no other is supported')
    _only(path, value, "type", "triggers", "tags")
    tags = []
    for number, item in enumerate(_list(path, value, "tags")):
        where = f"{path}.tags[{number}]"
        _only(where, item, "type", "begin", "content", "end")
        content = item.get("content")
        if not isinstance(content, dict) or content.get("type") != "json_schema":
            raise invalid(where, 'content must be of type "json_schema"; no other is supported')
        tags.append(_tag(where, item, content.get("json_schema")))
    return _triggers(path, value), tags


def _tag(path: str, item: Mapping[str, Any], schema: Any) -> Tag:
    begin, end = item.get("begin"), item.get("end")
    if not isinstance(begin, str) or not begin or not isinstance(end, str):
        raise invalid(path, "begin and end must be strings, begin not an empty one")
    if not isinstance(schema, dict):
        raise invalid(path, "the schema must be a JSON object")
    return Tag(begin, schema, end)


def _triggers(path: str, value: Mapping[str, Any]) -> list[str]:
    triggers = _list(path, value, "triggers")
    if not all(isinstance(one, str) and one for one in triggers):
        raise invalid(path, "triggers must be strings that are not empty")
    return triggers


def _list(path: str, value: Mapping[str, Any], name: str) -> list[Any]:
    items = value.get(name)
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_TAGS:
        raise invalid(path, f"{name} must list 1 to {MAX_TAGS} items")
    return items


def _only(path: str, value: Any, *names: str) -> None:
    if not isinstance(value, dict):
        raise invalid(path, "must be a JSON object")
    if unknown := value.keys() - set(names):
        raise invalid(path, f"unknown or unsupported field {sorted(unknown)[0][:40]!r}")
