"""An executor's step loop on the caller's thread, without RPC: benchmarks send plans to it as a scheduler would."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from quire.v1 import executor_pb2, types_pb2
from services.common.errors import QuireError
from services.executor.backends.base import Backend
from services.executor.batch import StepLimits
from services.executor.core import StepCore
from services.executor.loader import LoadedModel
from services.executor.metrics import ExecutorMetrics
from services.executor.worker import Event, Fault, StepLoop


class BenchLoop:
    """One epoch of a loaded model. `events` are all that its scheduler would have been sent."""

    def __init__(self, model: LoadedModel, limits: StepLimits, backend: Backend | None = None) -> None:
        """`backend` computes in place of the model's own."""
        self.events: list[Event] = []
        self._loop = StepLoop(StepCore(limits), self.events.append, ExecutorMetrics(CollectorRegistry()))
        self._loop.backend = backend or model.backend
        self._loop.proposer = model.proposer
        self._loop.draft_backend = model.draft.backend if model.draft is not None else None
        draft_cache = model.draft.cache if model.draft is not None else None
        self._loop.core.set_model(model.limits, (), draft_cache, model.grammars)
        self._loop.masks = model.grammars.masks if model.grammars is not None else None
        self._epoch = self._loop.core.open(executor_pb2.RunHello(scheduler_id="bench")).epoch

    def take(self, plan: executor_pb2.StepPlan) -> None:
        """Applies a plan, once it has its number."""
        plan.epoch, plan.step = self._epoch, self._loop.core.ledger.last_plan + 1
        self._loop.core.take(plan)

    def turn(self) -> bool:
        """One step; False where nothing can be computed."""
        return self._loop.turn()

    def settle(self) -> None:
        """Returns once no sequence waits for its grammar."""
        while any(sequence.awaits_grammar for sequence in self._loop.core.sequences.values()):
            time.sleep(0.001)

    def check(self) -> None:
        """Raises QuireError where the stream or a sequence ended with an error."""
        for event in self.events:
            if isinstance(event, Fault):
                raise event.error
            for end in event.ended if isinstance(event, executor_pb2.StepResults) else ():
                if end.HasField("error"):
                    raise QuireError.from_detail(end.error)


def greedy_sequence(
    number: int, token_ids: Sequence[int], length: int, max_tokens: int, block_size: int
) -> executor_pb2.SequenceState:
    """Sequence `number`, from 1, in blocks of its own for `length` tokens; others have as many."""
    count = -(-length // block_size)
    first = (number - 1) * count
    return executor_pb2.SequenceState(
        sequence_id=number,
        token_ids=token_ids,
        prompt_length=len(token_ids),
        blocks=[executor_pb2.BlockList(group_id=0, block_ids=range(first, first + count))],
        sampling=types_pb2.SamplingParams(temperature=0.0, seed=number),
        stop=types_pb2.StopCriteria(max_tokens=max_tokens, ignore_eos=True),
    )
