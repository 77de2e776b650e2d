"""Finds out whether rules of outputs can be followed, before their requests are submitted.

The executor compiles them again, for its model's tokens; here only faults matter, and a client hears of them at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from quire.v1 import gateway_pb2, types_pb2
from services.common.constraints.compile import compile_grammar
from services.common.constraints.letters import byte_vocabulary
from services.common.constraints.limits import rule_path
from services.common.constraints.translate import to_grammar
from services.common.errors import QuireError, Reason
from services.gateway.chat_plan import Reading
from services.gateway.output_rule import enforced_schemas, output_rule

REMEMBERED = 4096
MOST_WAITING = 64
MOST_VOCABULARIES = 16
Key = tuple[bytes, frozenset[str]]


class RuleChecker:
    """Owns a thread, so that neither the event loop nor a prompt waits for a rule."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rules")
        self._passed: OrderedDict[Key, None] = OrderedDict()
        self._vocabularies: OrderedDict[frozenset[str], LLTokenizer] = OrderedDict()  # the thread's own
        self._waiting = 0

    def stop(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, constraint: types_pb2.Constraint, special_texts: frozenset[str]) -> None:
        """Raises INVALID_FIELD naming the field for what cannot be followed; QUEUE_FULL where too many wait.

        `special_texts`: of the model's special tokens.
        """
        key = hashlib.sha256(constraint.SerializeToString(deterministic=True)).digest(), special_texts
        if key in self._passed:
            self._passed.move_to_end(key)
            return
        if self._waiting >= MOST_WAITING:
            raise QuireError(Reason.QUEUE_FULL, f"{self._waiting} rules of outputs wait to be compiled")
        self._waiting += 1
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._compile, constraint, special_texts)
        finally:
            self._waiting -= 1
        self._passed[key] = None
        if len(self._passed) > REMEMBERED:
            self._passed.popitem(last=False)

    async def constraint_of(
        self, request: gateway_pb2.GenerationInput, reading: Reading | None, special_texts: frozenset[str]
    ) -> types_pb2.Constraint | None:
        """What the output must obey, by the request's own rule and by its tools. Raises as `check` does."""
        own = request.constraint if request.HasField("constraint") else None
        if own is not None:
            await self.check(own, special_texts)
        if reading is None:
            return own
        constraint = output_rule(request.chat, reading, own, special_texts)
        for path, schema in enforced_schemas(request.chat):
            with _naming(path):
                await self.check(types_pb2.Constraint(json_schema=schema), special_texts)
        if constraint is not None and constraint is not own:
            if request.beam_width:
                what = "beam_width: beam search does not go with tools that are forced or strict"
                raise QuireError(Reason.UNSUPPORTED, what, field="beam_width")
            with _naming("chat.tools" if own is None or request.chat.tools else rule_path(own)):
                await self.check(constraint, special_texts)
        return constraint

    def _compile(self, constraint: types_pb2.Constraint, special_texts: frozenset[str]) -> None:
        path = rule_path(constraint)
        try:
            compile_grammar(self._vocabulary(special_texts), to_grammar(constraint), path)
        except QuireError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise QuireError(Reason.INVALID_FIELD, f"{path}: cannot be compiled", field=path) from error

    def _vocabulary(self, special_texts: frozenset[str]) -> LLTokenizer:
        found = self._vocabularies.get(special_texts)
        if found is None:
            found = self._vocabularies[special_texts] = byte_vocabulary(special_texts)
            if len(self._vocabularies) > MOST_VOCABULARIES:
                self._vocabularies.popitem(last=False)
        return found


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Failures name this field: a client knows nothing of rules that are made of it."""
    try:
        yield
    except QuireError as error:
        if not error.field:
            raise
        what = error.message.removeprefix(f"{error.field}: ")
        raise QuireError(error.reason, f"{path}: {what}", field=path) from error
