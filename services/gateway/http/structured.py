"""How clients ask for structured output: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from quire.v1.types_pb2 import ChoiceList, Constraint
from services.common.constraints.limits import MAX_LISTED_CHOICES, MAX_RULE_BYTES, check_nesting
from services.gateway.http.body_types import Body, Ignored, only
from services.gateway.http.errors import bad_request, renaming

if TYPE_CHECKING:
    from services.gateway.http.schemas import GenerationBody

Text = Annotated[str, Field(max_length=MAX_RULE_BYTES)]
Json = Text | dict[str, Any]
Choices = Annotated[list[str], Field(fail_fast=True, max_length=MAX_LISTED_CHOICES)]
Rule = tuple[str, Constraint]  # with the client's name of the field that holds it


class JsonSchemaFormat(Body):
    name: Annotated[str, Field(max_length=256)] | None = None
    description: Ignored = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: Annotated[bool | None, Field(description="The schema is enforced either way.")] = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description='Of type "json_schema".')
    structures: list[Any] | None = Field(default=None, description='Of type "structural_tag", with triggers.')
    triggers: list[Any] | None = None
    format: dict[str, Any] | None = Field(default=None, description='Of type "structural_tag", instead of structures.')


class StructuredOutputs(Body):
    json_: Json | None = Field(None, alias="json", description="A JSON schema, or its text.")
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = Field(None, description="EBNF from the rule root, or Lark from the rule start.")
    json_object: bool | None = None
    structural_tag: Json | None = None
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None
    disable_fallback: Ignored = None
    whitespace_pattern: Annotated[Any, only()] = None


def rule_of(body: GenerationBody) -> Rule | None:
    """What the output must obey. Raises HttpError naming the field where two rules are given, or none that is whole."""
    found = [rule for rule in (*_formats(body.response_format), *_structured(body)) if rule is not None]
    if len(found) > 1:
        raise bad_request(found[1][0], f"does not go with {found[0][0]}: an output obeys one rule")
    return found[0] if found else None


def _formats(wanted: ResponseFormat | None) -> Iterator[Rule]:
    if wanted is None:
        return
    fields = {"json_schema": ("json_schema",), "structural_tag": ("structures", "triggers", "format")}
    for kind, names in fields.items():
        for name in names:
            if getattr(wanted, name) is not None and wanted.type != kind:
                raise bad_request(f"response_format.{name}", f"goes with type {kind}")
    match wanted.type:
        case "json_object":
            yield "response_format", Constraint(json_object=True)
        case "json_schema":
            if wanted.json_schema is None:
                raise bad_request("response_format.json_schema", "is required", "missing_parameter")
            name = "response_format.json_schema.schema"
            yield name, Constraint(json_schema=_text(name, wanted.json_schema.schema_))
        case "structural_tag":
            tag = wanted.model_dump(exclude_none=True, exclude={"json_schema"})
            yield "response_format", Constraint(structural_tag=_text("response_format", tag))


def _structured(body: GenerationBody) -> Iterator[Rule | None]:
    guided: tuple[tuple[str, Any], ...] = (
        ("json_schema", body.guided_json),
        ("regex", body.guided_regex),
        ("choice", body.guided_choice),
        ("grammar", body.guided_grammar),
    )
    for kind, value in guided:
        yield _rule(f"guided_{kind.removesuffix('_schema')}", kind, value)
    if body.structured_outputs is None:
        return
    wanted = body.structured_outputs
    rules = [
        _rule("structured_outputs.json", "json_schema", wanted.json_),
        _rule("structured_outputs.regex", "regex", wanted.regex),
        _rule("structured_outputs.choice", "choice", wanted.choice),
        _rule("structured_outputs.grammar", "grammar", wanted.grammar),
        _rule("structured_outputs.json_object", "json_object", wanted.json_object or None),
        _rule("structured_outputs.structural_tag", "structural_tag", wanted.structural_tag),
    ]
    if not any(rules):
        raise bad_request("structured_outputs", "states no rule", "missing_parameter")
    yield from rules


def _rule(name: str, kind: str, value: Any) -> Rule | None:
    if value is None:
        return None
    if isinstance(value, dict):
        value = _text(name, value)
    if isinstance(value, list):
        value = ChoiceList(values=value)
    return name, Constraint(**{kind: value})


def _text(name: str, value: dict[str, Any]) -> str:
    with renaming({}):
        check_nesting(name, value)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
