"""From a rule to a grammar as llguidance reads it: Lark, or one of JSON schemas. Pure."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NoReturn

from llguidance import LLMatcher

from quire.v1 import types_pb2
from services.common.constraints.ebnf import ebnf_to_lark, is_lark
from services.common.constraints.limits import check_constraint, check_nesting, rule_path
from services.common.constraints.structural_tag import tags_to_lark
from services.common.errors import invalid

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

SPACES = r"[\x20\x0A\x0D\x09]{1,32}"
"""Between the tokens of JSON: indented output fits, and no model can write blanks until its budget is used up."""
JSON_OPTIONS: JsonCompileOptions = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": SPACES,
    "coerce_one_of": False,
    "lenient": False,
}


def to_grammar(constraint: types_pb2.Constraint) -> str:
    """The grammar of a rule. Raises INVALID_FIELD naming the field; what is in a grammar only compiling finds out."""
    check_constraint(constraint)
    path = rule_path(constraint)
    match constraint.WhichOneof("rule"):
        case "json_schema":
            return schema_to_grammar(path, parse_json(path, constraint.json_schema))
        case "json_object":
            return schema_to_grammar(path, {"type": "object"})
        case "regex":
            return LLMatcher.grammar_from_regex(constraint.regex)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, constraint.choice.values)))
        case "grammar":
            text = constraint.grammar
            return LLMatcher.grammar_from_lark(text if is_lark(text) else ebnf_to_lark(path, text))
        case _:
            tags = parse_json(path, constraint.structural_tag)
            return LLMatcher.grammar_from_lark(tags_to_lark(path, tags, JSON_OPTIONS))


def schema_to_grammar(path: str, schema: Any) -> str:
    """The grammar of texts that are valid under a JSON schema."""
    if not isinstance(schema, dict):
        raise invalid(path, "must be a JSON object")
    schema = {key: value for key, value in schema.items() if key != "x-guidance"}  # the library's own options
    return LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)


def parse_json(path: str, text: str) -> Any:
    """Strict JSON that is not nested too deeply. Raises INVALID_FIELD."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid(path, "is nested too deeply") from None
    except ValueError as error:
        raise invalid(path, f"is not JSON: {error}") from None
    check_nesting(path, value)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
