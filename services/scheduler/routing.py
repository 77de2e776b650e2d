"""Which model a request gets that asked for an alias, and what gateways are told of aliases."""

from __future__ import annotations

from quire.v1 import scheduler_pb2
from services.scheduler.aliases import Facts, offer, pick
from services.scheduler.decisions import Decision
from services.scheduler.expected import expect_of
from services.scheduler.state import State


def refresh_aliases(state: State) -> None:
    """Brings what can be asked for in line with the models on offer."""
    models = {name: model.description for name, model in state.models.items()}
    state.offered_aliases, state.alias_problems = {}, []
    for alias in state.aliases:
        offered = offer(alias, models)
        if offered.description is not None:
            state.offered_aliases[alias.name] = (alias, offered.description)
        else:
            state.alias_problems.append(offered.problem)


def resolve(state: State, submit: scheduler_pb2.Submit, now: float) -> str:
    """The model that shall compute a request: the named one, or a member of the named alias. `now` in seconds."""
    offered = state.offered_aliases.get(submit.model)
    if offered is None:
        return submit.model
    alias, _ = offered
    loaded = [name for name in alias.members if name in state.models]
    served = [name for name in loaded if state.serving(name)] or loaded
    prompt = len(submit.prompt_token_ids)
    output = expect_of(state, submit, alias.name)

    def facts(model: str) -> Facts:
        return Facts(output, prompt, submit.priority, state.waiting_count_of(model))

    picked = pick(alias, served.__contains__, facts)
    why = f"{picked.model}: {picked.why}"
    state.decisions.add(Decision(now, "routed", submit.request_id, 0, submit.tenant, alias.name, why))
    return picked.model
