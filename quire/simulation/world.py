"""A simulated world: gateway, scheduler, kvmanager and executors, and the links between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.simulation.drafts import Drafts
from quire.simulation.gateway import SimulatedGateway
from quire.simulation.kvmanager import LEASE_SECONDS, SimulatedKvManager
from quire.simulation.load import Load, Prompts, Tenant
from quire.simulation.measures import Measures, Targets
from quire.simulation.network import Fate, Link, Network, on_time
from quire.simulation.policies import Policy
from quire.simulation.scheduler import SimulatedScheduler
from quire.simulation.service import Latencies
from quire.simulation.timeline import Timeline
from quire.v1 import kvmanager_pb2, types_pb2
from services.common.topology import LOCAL_DISTANCE
from services.executor.cost_model import Machine, StepShape
from services.scheduler.state import State

GROUP = 0
TYPICAL_PROMPT = 512
"""Tokens of the prompt by which an executor states its speed."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What is simulated, but for the policy."""

    machine: Machine
    load: Load
    tenants: Sequence[Tenant] = (Tenant("default"),)
    executor_count: int = 1
    node_count: int = 1  # NUMA nodes of each executor's memory
    remote_distance: int = 21  # between two nodes; 10 is local
    max_tokens: int | None = None  # what clients allow; None: as much as the answer will have
    latencies: Latencies = field(default_factory=Latencies)
    shared_cores: float = 0.0  # part of the services' time in which executors stand still
    targets: Targets = field(default_factory=Targets)
    window_seconds: float = 10.0  # of fairness
    drafts: Drafts | None = None  # what executors propose; None: nothing


class Stalled(RuntimeError):
    """Requests are open, and nothing will ever happen."""


class World:
    """All parties of one run. Streams are open when it is made; `run` lets the load begin."""

    def __init__(self, scenario: Scenario, policy: Policy, fate: Fate = on_time) -> None:
        self.scenario = scenario
        self.timeline = Timeline()
        self.network = Network(self.timeline, fate)
        self.links: dict[str, Link[object]] = {}
        self._stolen = 0.0
        message_seconds = scenario.latencies.message
        self.executors = [
            policy.executor(
                self.timeline, describe(scenario, index), scenario.machine.cost, self._take_stolen, scenario.drafts
            )
            for index in range(scenario.executor_count)
        ]
        self.kvmanager = SimulatedKvManager(
            self.timeline, policy.kvmanager(LEASE_SECONDS), message_seconds, self._steal
        )
        state = State(tuple(f"executor-{index}" for index in range(len(self.executors))), policy.limits)
        self.scheduler = SimulatedScheduler(self.timeline, state, message_seconds, self._steal)
        lengths = scenario.load.lengths
        self.gateway = SimulatedGateway(
            self.timeline,
            scenario.load,
            scenario.tenants,
            Prompts(scenario.machine.vocab_size, lengths.block_tokens, int(lengths.prompts.max())),
            scenario.max_tokens,
            Measures(scenario.tenants, scenario.targets, scenario.window_seconds),
            message_seconds,
            self._steal,
        )
        self._connect()

    def run(self) -> None:
        """Until every request has ended. Raises Stalled where that will not be."""
        timeline, gateway = self.timeline, self.gateway
        while not gateway.model:
            timeline.advance()
        gateway.start()
        while not gateway.is_done:
            if not len(timeline):
                raise Stalled(f"{len(gateway.open)} requests never end")
            timeline.advance()

    def _connect(self) -> None:
        """Opens all streams, as services that found each other have them."""
        scheduler, gateway, kvmanager = self.scheduler, self.gateway, self.kvmanager
        gateway.send = self._link(
            "gateway to scheduler",
            scheduler.open_gateway("gateway", self._link("scheduler to gateway", gateway.receive)),
        )
        kvmanager.send = self._link(
            "kvmanager to scheduler",
            scheduler.open_kvmanager(self._link("scheduler to kvmanager", kvmanager.reserve)),
        )
        for index, executor in enumerate(self.executors):
            welcome = executor.open()
            receive = scheduler.open_executor(
                index, welcome, self._link(f"scheduler to executor {index}", executor.receive)
            )
            executor.send = self._link(f"executor {index} to scheduler", receive)
            report = self._link(f"executor {index} to kvmanager", kvmanager.report)
            report(kvmanager_pb2.ReportRequest(description=executor.description, epoch=executor.epoch), 0.0)

    def _link(self, name: str, receive: Callable[..., None]) -> Callable[..., None]:
        link: Link[object] = Link(self.network, name, self.scenario.latencies.link, receive)
        self.links[name] = link
        return link.send

    def _steal(self, seconds: float) -> None:
        self._stolen += seconds * self.scenario.shared_cores

    def _take_stolen(self) -> float:
        stolen, self._stolen = self._stolen, 0.0
        return stolen


def describe(scenario: Scenario, index: int) -> types_pb2.ExecutorDescription:
    """What a modelled executor says of itself. Executors take turns in which node is theirs."""
    machine, nodes = scenario.machine, scenario.node_count
    each = max(1, machine.block_count // nodes)
    prompt = min(TYPICAL_PROMPT, machine.max_step_tokens)
    step = machine.cost.seconds(StepShape(1, prompt, 0, 0))
    prefill = machine.cost.seconds(StepShape(0, 0, prompt, prompt * (prompt + 1) // 2))
    return types_pb2.ExecutorDescription(
        executor_id=f"executor-{index:03}",
        model=types_pb2.ModelDescription(
            name="model",
            fingerprint="model",
            tokenizer_fingerprint="tokenizer",
            context_length=machine.context_length,
            vocab_size=machine.vocab_size,
            eos_token_ids=[0],
        ),
        groups=[
            types_pb2.CacheGroup(
                group_id=GROUP, name="target", block_size=machine.block_size, block_bytes=machine.block_bytes
            )
        ],
        pools=[
            types_pb2.BlockPool(
                pool_id=node,
                group_id=GROUP,
                tier=types_pb2.TIER_DEVICE,
                format=types_pb2.KV_FORMAT_BF16,
                rank_nodes=[node],
                distance=LOCAL_DISTANCE if node == index % nodes else scenario.remote_distance,
                block_count=each,
                first_block_id=node * each,
                block_bytes=machine.block_bytes,
            )
            for node in range(nodes)
        ],
        max_sequences=machine.max_sequences,
        max_step_tokens=machine.max_step_tokens,
        decode_step_seconds=step,
        prefill_tokens_per_second=prompt / prefill if prefill else 0.0,
        speculation=scenario.drafts.describe(step) if scenario.drafts is not None else None,
    )
