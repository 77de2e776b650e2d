"""Finds out whether rules of outputs can be followed, before their requests are submitted.

The executor compiles them again, for its model's tokens; here only faults matter, and a client hears of them at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLTokenizer

from quire.v1 import types_pb2
from services.common.constraints.compile import compile_grammar
from services.common.constraints.letters import byte_vocabulary
from services.common.constraints.limits import rule_path
from services.common.constraints.translate import to_grammar
from services.common.errors import QuireError, Reason

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
