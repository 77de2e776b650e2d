"""Names that stand for several models: how they are written, which model they give, and when they are refused."""

from __future__ import annotations

import pytest

from quire.v1 import scheduler_pb2, types_pb2
from services.scheduler import requests
from services.scheduler.aliases import Alias, Facts, Rule, Span, offer, parse_alias, parse_aliases, pick
from services.scheduler.predict import Kind
from services.scheduler.state import Limits
from tests.unit.scheduler.sim import Harness, submit
from tests.unit.scheduler.sim_executor import describe

AUTO = "auto=small@output=..64@waiting=..8,large@priority=1..,small"


def test_how_an_alias_is_written() -> None:
    assert parse_alias(AUTO) == Alias(
        "auto",
        (
            Rule("small", (Span("output", None, 64), Span("waiting", None, 8))),
            Rule("large", (Span("priority", 1, None),)),
            Rule("small"),
        ),
    )
    assert parse_alias("a=org/x:1.5@prompt=-3..7").rules[0] == Rule("org/x:1.5", (Span("prompt", -3, 7),))
    assert parse_alias(AUTO).members == ("small", "large")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("auto", "write NAME="),
        ("=a", "write NAME="),
        ("auto=", "no model name"),
        ("auto=a,,b", "no model name"),
        ("auto=auto,b", "stand for itself"),
        ("auto=a@size=..3", "write FACT="),
        ("auto=a@output=3", "write FACT="),
        ("auto=a@output=..", "write FACT="),
        ("auto=a@output=9..3", "nothing lies between"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        parse_alias(text)


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="two aliases"):
        parse_aliases(["a=x", "a=y"])


def picked(
    output: int = 10, priority: int = 0, waiting: dict[str, int] | None = None, loaded: str = "small large"
) -> str:
    counts = waiting or {}
    return pick(
        parse_alias(AUTO), loaded.split().__contains__, lambda model: Facts(output, 100, priority, counts.get(model, 0))
    ).model


def test_the_first_model_whose_conditions_hold_is_taken() -> None:
    assert picked() == "small"
    assert picked(output=65, priority=1) == "large"
    assert picked(output=65) == "small"
    assert picked(waiting={"small": 9}, priority=5) == "large"
    assert picked(waiting={"large": 9}) == "small"


def test_what_is_not_loaded_is_passed_over() -> None:
    assert picked(loaded="large") == "large"  # no condition holds: the last one on offer


def describe_model(
    name: str, tokenizer: str = "t", context: int = 100, ends: tuple[int, ...] = (0,)
) -> types_pb2.ModelDescription:
    return types_pb2.ModelDescription(
        name=name,
        fingerprint=f"f-{name}",
        tokenizer_fingerprint=tokenizer,
        context_length=context,
        vocab_size=1000 + context,
        eos_token_ids=ends,
    )


def test_an_alias_promises_what_all_its_members_keep() -> None:
    models = {"small": describe_model("small", context=50), "large": describe_model("large")}
    described = offer(parse_alias(AUTO), models).description
    assert described is not None
    assert (described.name, list(described.members)) == ("auto", ["small", "large"])
    assert (described.context_length, described.vocab_size, described.tokenizer_fingerprint) == (50, 1050, "t")
    assert described.fingerprint == ""


@pytest.mark.parametrize(
    ("models", "complaint"),
    [
        ([], "none of small, large is loaded"),
        ([describe_model("small"), describe_model("large", "other")], "different tokenizers"),
        ([describe_model("small"), describe_model("large", ends=(1,))], "different tokens"),
        ([describe_model("small"), describe_model("auto")], "a model has this name"),
    ],
)
def test_an_alias_that_cannot_be_kept_is_not_offered(models: list[types_pb2.ModelDescription], complaint: str) -> None:
    offered = offer(parse_alias(AUTO), {model.name: model for model in models})
    assert offered.description is None
    assert complaint in offered.problem


# In the core


def harness(tokenizer: str = "t0") -> Harness:
    return Harness(
        describe("small", executor_id="e0", fingerprint="fs"),
        describe("large", executor_id="e1", fingerprint="fl", tokenizer=tokenizer),
        limits=Limits(lookahead_tokens=8),
        aliases=(parse_alias("auto=large@priority=1..,small@output=..20,large"),),
    )


def asked(world: Harness, handle: int, **fields: object) -> str:
    """The model that computed a request for the alias."""
    world.send(submit(handle, [handle] * 5, model="auto", **fields))  # type: ignore[arg-type]
    world.settle()
    client = world.clients[handle]
    assert client.done
    (started,) = client.started
    return started.model


def test_gateways_learn_aliases_with_the_models() -> None:
    world = harness()
    late = requests.open_gateway(world.state, "late", world.now)
    assert [model.name for model in late.take_output().models] == ["large", "small", "auto"]


def test_each_request_gets_the_model_that_its_facts_pick() -> None:
    world = harness()
    assert asked(world, 1, max_tokens=20) == "small"
    assert asked(world, 2, max_tokens=21) == "large"  # nothing is known: the budget is expected
    assert asked(world, 3, max_tokens=20, priority=1) == "large"


def test_learned_lengths_decide_where_budgets_are_generous() -> None:
    world = harness()
    for _ in range(12):
        world.state.predictor.ended(Kind("default", "auto", 5), 9)
    assert asked(world, 1, max_tokens=1000) == "small"


def test_the_choice_stays_where_a_request_is_submitted_again() -> None:
    """The gateway names the model that began, and the alias no longer matters."""
    world = harness()
    wanted = submit(1, [1] * 5, max_tokens=30, model="large", ignore_eos=True)
    wanted.progress.append(scheduler_pb2.ChoiceProgress(choice=0, token_ids=[3, 4]))
    world.send(wanted)
    world.settle()
    assert world.clients[1].started[0].model == "large"


def test_members_with_different_tokenizers_are_refused_aloud() -> None:
    world = harness(tokenizer="other")
    assert "different tokenizers" in world.state.alias_problems[0]
    world.send(submit(1, [1] * 5, model="auto"))
    assert world.clients[1].ends[0].error.reason == "MODEL_NOT_FOUND"


def test_an_alias_goes_on_with_what_is_left_of_its_members() -> None:
    world = harness()
    world.lose(1)
    assert asked(world, 1, max_tokens=21) == "small"  # no executor serves the large one
