"""Settings of the scheduler."""

from __future__ import annotations

from pydantic import Field, field_validator

from services.common.settings import CommaList, ServiceSettings, WordList
from services.common.speculation import AUTO, parse_speculation
from services.scheduler.aliases import parse_aliases
from services.scheduler.policy import Infeasible, PolicyName


class SchedulerSettings(ServiceSettings):
    """The scheduler: owns every sequence's state and plans the executors' steps."""

    listen: str = Field("127.0.0.1:50052", description="address to serve gRPC on: host:port or unix:PATH")
    metrics_listen: str = Field("127.0.0.1:9102", description="host:port of the Prometheus endpoint; empty serves none")
    kvmanager: str = Field("127.0.0.1:50053", min_length=1, description="address of the kvmanager")
    executors: CommaList = Field(("127.0.0.1:50054",), min_length=1, description="addresses of the executors")
    aliases: WordList = Field(
        (), description="names for several models: NAME=MODEL@output=..64@waiting=..8,MODEL, others behind a space"
    )
    step_tokens: int = Field(0, ge=0, description="the most tokens that a step computes; 0 leaves it to the executor")
    gap_ms: float = Field(
        150.0, gt=0, description="the longest step that computes prompts beside sequences which decode"
    )
    gap_stretch: float = Field(
        2.5, ge=1, description="such a step takes at most so many times as long as one without prompts"
    )
    max_queued: int = Field(4096, ge=1, description="sequences that may wait before new requests are refused")
    max_queued_tenant: int = Field(2048, ge=1, description="the same for the sequences of one tenant")
    policy: PolicyName = Field("fair", description="order of the queue; fcfs and static are to compare with")
    ageing_seconds: float = Field(10.0, gt=0, description="waiting that raises a priority by one, up to the highest")
    output_cost: float = Field(
        2.0, ge=0, le=1000, description="what an output token costs a tenant of its share, in prompt tokens"
    )
    infeasible: Infeasible = Field("last", description="what becomes of requests that cannot meet their deadline")
    grant_ms: float = Field(20.0, gt=0, description="steps granted at a time, in milliseconds of measured steps")
    lookahead_tokens: int = Field(64, ge=1, description="token slots reserved ahead of need")
    speculation: str = Field(
        AUTO, description="draft tokens of each step where executors propose any: auto chooses, off, or a number"
    )
    resume_seconds: float = Field(30.0, ge=0, description="how long requests wait for a lost executor or kvmanager")
    stall_seconds: float = Field(60.0, gt=0, description="an executor that owes a result for longer counts as lost")

    @field_validator("speculation")
    @classmethod
    def _check_speculation(cls, value: str) -> str:
        parse_speculation(value)
        return value

    @field_validator("aliases")
    @classmethod
    def _check_aliases(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        parse_aliases(value)
        return value
