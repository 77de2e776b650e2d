"""A name that stands for several loaded models, with rules that pick one of them per request.

Written `NAME=MODEL@CONDITION@CONDITION,MODEL,...`, as in `auto=small@output=..64@waiting=..8,large@priority=1..,small`:
the first model whose conditions hold is taken; where none do, the last one on offer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.v1 import types_pb2
from services.common.limits import MODEL_NAME

_SPAN = re.compile(r"(-?[0-9]{1,9})?\.\.(-?[0-9]{1,9})?")


class Facts(NamedTuple):
    """What conditions ask of a request; the names are those of conditions."""

    output: int  # expected output tokens of a choice
    prompt: int  # tokens
    priority: int
    waiting: int  # sequences that wait for the model in question


class Span(NamedTuple):
    """A condition: one fact lies between two numbers, both included. None is no bound."""

    fact: str
    least: int | None
    most: int | None

    def __str__(self) -> str:
        least, most = ("" if bound is None else bound for bound in (self.least, self.most))
        return f"{self.fact}={least}..{most}"

    def holds(self, facts: Facts) -> bool:
        value: int = getattr(facts, self.fact)
        return (self.least is None or value >= self.least) and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True)
class Rule:
    """A model, and when to take it."""

    model: str
    conditions: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Alias:
    """A name and its rules, in order."""

    name: str
    rules: tuple[Rule, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """The models that it names, each once, in the order of the rules."""
        return tuple(dict.fromkeys(rule.model for rule in self.rules))


def parse_alias(text: str) -> Alias:
    """An alias as it is written. ValueError says what is wrong."""
    name, separator, rest = text.partition("=")
    if not separator or not MODEL_NAME.fullmatch(name):
        raise ValueError(f"{text!r}: write NAME=MODEL@CONDITION,MODEL")
    rules = tuple(_parse_rule(name, part) for part in rest.split(","))
    if name in {rule.model for rule in rules}:
        raise ValueError(f"{name}: cannot stand for itself")
    return Alias(name, rules)


def _parse_rule(alias: str, text: str) -> Rule:
    model, *conditions = text.split("@")
    if not MODEL_NAME.fullmatch(model):
        raise ValueError(f"{alias}: {model!r} is no model name")
    return Rule(model, tuple(_parse_span(alias, condition) for condition in conditions))


def _parse_span(alias: str, text: str) -> Span:
    fact, _, span = text.partition("=")
    match = _SPAN.fullmatch(span)
    if fact not in Facts._fields or match is None or span == "..":
        known = ", ".join(Facts._fields)
        raise ValueError(f"{alias}: {text!r}: write FACT=LEAST..MOST, with one of {known} and either bound or both")
    least, most = (int(bound) if bound else None for bound in match.groups())
    if least is not None and most is not None and least > most:
        raise ValueError(f"{alias}: {text!r}: nothing lies between {least} and {most}")
    return Span(fact, least, most)


def parse_aliases(texts: Sequence[str]) -> tuple[Alias, ...]:
    """Several aliases, each name once. ValueError says what is wrong."""
    aliases = tuple(map(parse_alias, texts))
    names = [alias.name for alias in aliases]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"{twice[0]}: two aliases have this name")
    return aliases


class Picked(NamedTuple):
    """The model for one request, and what spoke for it."""

    model: str
    why: str


def pick(alias: Alias, on_offer: Callable[[str], bool], facts_of: Callable[[str], Facts]) -> Picked:
    """The model for one request. `facts_of` a model are the request's own and that model's queue."""
    rules = [rule for rule in alias.rules if on_offer(rule.model)]
    for rule in rules:
        facts = facts_of(rule.model)
        if all(condition.holds(facts) for condition in rule.conditions):
            found = (f"{getattr(facts, c.fact)} lies in {c}" for c in rule.conditions)
            return Picked(rule.model, ", ".join(found) or "nothing speaks for one before it")
    return Picked(rules[-1].model, "no conditions hold: it is the last on offer")


class Offered(NamedTuple):
    """An alias beside the models on offer: what gateways learn of it, or why it cannot be asked for."""

    description: types_pb2.ModelDescription | None
    problem: str


def offer(alias: Alias, models: Mapping[str, types_pb2.ModelDescription]) -> Offered:
    """Describes an alias as a model: what holds for whichever of its members will compute.

    Gateways turn text into tokens and find ends before a member is picked, so members must agree on both.
    """
    if alias.name in models:
        return Offered(None, f"alias {alias.name}: a model has this name")
    members = [models[name] for name in alias.members if name in models]
    if not members:
        return Offered(None, f"alias {alias.name}: none of {', '.join(alias.members)} is loaded")
    first = members[0]
    for other in members[1:]:
        if other.tokenizer_fingerprint != first.tokenizer_fingerprint:
            return Offered(None, f"alias {alias.name}: {first.name} and {other.name} have different tokenizers")
        if set(other.eos_token_ids) != set(first.eos_token_ids):
            return Offered(None, f"alias {alias.name}: {first.name} and {other.name} end texts with different tokens")
    description = types_pb2.ModelDescription(
        name=alias.name,
        tokenizer_fingerprint=first.tokenizer_fingerprint,
        context_length=min(model.context_length for model in members),
        vocab_size=min(model.vocab_size for model in members),
        eos_token_ids=first.eos_token_ids,
        loaded_at=max(model.loaded_at for model in members),
        members=[model.name for model in members],
    )
    if first.HasField("bos_token_id"):
        description.bos_token_id = first.bos_token_id
    return Offered(description, "")
