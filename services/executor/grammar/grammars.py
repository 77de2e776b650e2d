"""Compiles rules in a thread of their own, so that no step waits for one that its own sequences do not need."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from llguidance import LLMatcher

from quire.v1 import types_pb2
from services.common.constraints.compile import compile_grammar
from services.common.constraints.limits import rule_path
from services.common.constraints.translate import to_grammar
from services.common.errors import QuireError, Reason
from services.executor.grammar.cache import GrammarCache, memory_of
from services.executor.grammar.guide import Guide
from services.executor.grammar.masks import MaskMaker
from services.executor.grammar.vocabulary import Vocabulary

log = logging.getLogger("quire.executor")
CACHE_BYTES = 64 << 20
SLOW_SECONDS = 0.2


class Grammars:
    """A model's. `guide` and `masks` are the step thread's; compiled grammars belong to the thread that compiles."""

    def __init__(
        self, vocabulary: Callable[[], Vocabulary], vocab_size: int, mask_threads: int, cache_bytes: int = CACHE_BYTES
    ) -> None:
        """`vocabulary` is made for the first rule: it is large, and most models never meet one."""
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | QuireError | None = None
        self._cache = GrammarCache(cache_bytes)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._wake: Callable[[], None] = lambda: None
        self.masks = MaskMaker(vocab_size, mask_threads)

    def start(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, whenever a guide is pending no more."""
        self._wake = wake

    def close(self) -> None:
        """Ends the threads; what is still pending stays so."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.masks.close()

    def guide(self, constraint: types_pb2.Constraint, end_ids: frozenset[int], output: Sequence[int]) -> Guide:
        """A pending guide for a sequence with that output so far. `end_ids`: the tokens that end the sequence."""
        guide = Guide(rule_path(constraint), end_ids)
        self._thread.submit(self._settle, guide, constraint, list(output))
        return guide

    def _settle(self, guide: Guide, constraint: types_pb2.Constraint, output: list[int]) -> None:
        if not guide.is_pending:
            return
        try:
            guide.begin(self._matcher(constraint), output)
        except QuireError as error:
            guide.fail(error)
        except BaseException as error:  # a panic of the library is no Exception
            log.exception("a grammar could not be compiled")
            guide.fail(QuireError(Reason.INTERNAL, f"constraint: {type(error).__name__} while compiling"))
        self._wake()

    def _matcher(self, constraint: types_pb2.Constraint) -> LLMatcher:
        """A matcher of the sequence's own, at the grammar's beginning."""
        key = hashlib.sha256(constraint.SerializeToString(deterministic=True)).digest()
        if (found := self._cache.copy(key)) is not None:
            return found
        vocabulary = self._loaded()
        started = time.perf_counter()
        grammar = to_grammar(constraint)
        compiled = compile_grammar(vocabulary.tokenizer, grammar, rule_path(constraint))
        seconds = time.perf_counter() - started
        if seconds > SLOW_SECONDS:
            log.info("a grammar took long to compile", extra={"seconds": round(seconds, 3), "bytes": len(grammar)})
        self._cache.keep(key, compiled, memory_of(grammar))
        return compiled.deep_copy()

    def _loaded(self) -> Vocabulary:
        if self._vocabulary is None:
            try:
                self._vocabulary = self._make_vocabulary()
                self.masks.end_ids = self._vocabulary.end_ids
            except QuireError as error:
                self._vocabulary = error
        if isinstance(self._vocabulary, QuireError):
            raise self._vocabulary
        return self._vocabulary
