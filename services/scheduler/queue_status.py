"""The queues for people: who waits and why, who was admitted and why, what each tenant was served."""

from __future__ import annotations

from itertools import islice

from quire.v1 import scheduler_status_pb2
from services.scheduler.decisions import Admission, obstacle
from services.scheduler.fairness import Account
from services.scheduler.sequence import Phase, Request, Sequence
from services.scheduler.state import Model, State

TENANTS, ENTRIES = 50, 20
"""At most so many tenants of a model are listed, and so many sequences that wait or were admitted."""


def describe_queues(state: State, now: float) -> list[scheduler_status_pb2.QueueStatus]:
    """One queue per model that can be asked for. Changes nothing. `now` in seconds."""
    return [_describe(state, name, model, now) for name, model in sorted(state.models.items())]


def describe_refusals(state: State) -> list[scheduler_status_pb2.RefusalCount]:
    return [scheduler_status_pb2.RefusalCount(reason=reason, count=n) for reason, n in sorted(state.refusals.items())]


def describe_decisions(state: State, now: float) -> list[scheduler_status_pb2.DecisionStatus]:
    """The latest of each kind, newest first. `now` in seconds."""
    return [
        scheduler_status_pb2.DecisionStatus(
            what=decision.what,
            request_id=decision.request_id,
            choice=decision.choice,
            tenant=decision.tenant,
            model=decision.model,
            age_seconds=now - decision.at,
            reason=decision.why,
        )
        for decision in state.decisions.latest()
    ]


def _describe(state: State, name: str, model: Model, now: float) -> scheduler_status_pb2.QueueStatus:
    accounts = model.ledger.accounts()
    shares = model.ledger.shares()
    ranked = sorted(accounts, key=lambda account: (-account.live_count, -account.cost, account.tenant))
    return scheduler_status_pb2.QueueStatus(
        model=name,
        policy=state.limits.policy.name,
        waiting_count=sum(account.waiting_count for account in accounts),
        running_count=sum(account.running_count for account in accounts),
        tenants=[_tenant(account, shares[account]) for account in ranked[:TENANTS]],
        waiting=_waiting(state, name, model, now),
        admissions=[_admission(admission, now) for admission in islice(reversed(model.admissions), ENTRIES)],
    )


def _tenant(account: Account, share: float) -> scheduler_status_pb2.TenantStatus:
    return scheduler_status_pb2.TenantStatus(
        tenant=account.tenant,
        weight=account.weight,
        waiting_count=account.waiting_count,
        running_count=account.running_count,
        prompt_tokens=account.prompt_tokens,
        output_tokens=account.output_tokens,
        virtual_time=account.virtual_time,
        share=share,
    )


def _waiting(state: State, name: str, model: Model, now: float) -> list[scheduler_status_pb2.WaitingStatus]:
    """Those that the kvmanager was asked for, then the queue in its order."""
    asked = [a.sequence for a in state.asked.values() if a.model is model and a.sequence is not None]
    found = [(sequence, "the kvmanager was asked for its blocks") for sequence in asked[:ENTRIES]]
    missing = obstacle(state, name, model)
    for sequence, behind in islice(model.queue.upcoming(ENTRIES, now), ENTRIES - len(found)):
        found.append((sequence, "; ".join(part for part in (missing, behind) if part) or "about to be placed"))
    return [_entry(sequence, reason, now) for sequence, reason in found]


def _entry(sequence: Sequence, reason: str, now: float) -> scheduler_status_pb2.WaitingStatus:
    request = sequence.request
    return scheduler_status_pb2.WaitingStatus(
        request_id=request.request_id,
        choice=sequence.choice,
        tenant=request.tenant,
        priority=request.priority,
        waited_seconds=now - request.arrived_at,
        token_count=len(sequence.token_ids),
        reason=reason + _siblings(request),
    )


def _siblings(request: Request) -> str:
    """Those that the queue does not hold yet: they find the blocks of the first one's prompt."""
    count = sum(s.phase is Phase.WAITING for s in request.sequences[1:]) if request.siblings_wait else 0
    return f"; {count} more choices wait for its prompt" if count else ""


def _admission(admission: Admission, now: float) -> scheduler_status_pb2.AdmissionStatus:
    return scheduler_status_pb2.AdmissionStatus(
        request_id=admission.request_id,
        choice=admission.choice,
        tenant=admission.tenant,
        age_seconds=now - admission.at,
        waited_seconds=admission.waited_seconds,
        target=admission.target,
        reason=admission.why,
        placement_reasons=admission.placement,
    )
