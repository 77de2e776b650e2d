"""From tokens to text: incremental detokenization, end tokens left out, stop strings matched and held back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from quire.v1 import types_pb2
from services.gateway.events import Delta, ScoredToken
from services.gateway.output.parts import CallBegin, CallFault, Part, Text, merged, visible
from services.gateway.output.thinking import ThinkingParser
from services.gateway.positions import Seen, check_ahead
from services.gateway.requests import OpenChoice, Score
from services.gateway.stops import StopMatcher


class Detokenizer(Protocol):
    """Text of a growing output; incomplete characters are held."""

    def push(self, ids: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Vocabulary(Protocol):
    """What is asked about single tokens."""

    def decode(self, ids: Sequence[int], skip_special: bool) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class ChoiceText:
    """The text of one choice."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        detokenizer: Detokenizer,
        matcher: StopMatcher | None,
        end_ids: frozenset[int],
        keep_special: bool,
    ) -> None:
        """`matcher` is None where there are no stop strings; `end_ids` end a choice and are never part of the text."""
        self._vocabulary, self._detokenizer, self._matcher = vocabulary, detokenizer, matcher
        self._end_ids, self._keep_special = end_ids, keep_special

    @property
    def matched(self) -> str | None:
        """The stop string that ended the text, once one did."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, ids: Sequence[int]) -> tuple[str, int]:
        """Text that became certain, and how many of the ids belong to the output: fewer where a stop string ended."""
        if self._matcher is None:
            plain = ids[:-1] if ids and ids[-1] in self._end_ids else ids
            return self._detokenizer.push(plain), len(ids)
        text = ""
        for used, token in enumerate(ids, start=1):
            text += self._push_one(self._matcher, token)
            if self._matcher.matched is not None:
                return text, used
        return text, len(ids)

    def _push_one(self, matcher: StopMatcher, token: int) -> str:
        if token in self._end_ids:
            return ""
        text = matcher.push(self._detokenizer.push([token]))
        if matcher.reads_hidden and not self._keep_special and self._vocabulary.is_special(token):
            text += matcher.push(self._vocabulary.decode([token], False), hidden=True)
        return text

    def finish(self) -> str:
        """The text that was still held, once the choice ended."""
        rest = self._detokenizer.flush()
        if self._matcher is None:
            return rest
        return self._matcher.push(rest) + self._matcher.flush()


class OutputReader:
    """From one choice's tokens to its parts."""

    def __init__(self, text: ChoiceText, parser: ThinkingParser | None) -> None:
        """Without a parser all is text."""
        self._text, self._parser = text, parser
        self._thinking_tokens = 0
        self.calls = 0
        """Calls so far."""

    @property
    def matched(self) -> str | None:
        """The stop string that ended the output, once one did."""
        return self._text.matched

    @property
    def parses(self) -> bool:
        return self._parser is not None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of thinking, its marks included; also what a stop string held back when thinking ended."""
        return self._thinking_tokens if self._parser is not None and self._parser.thought else 0

    def push(self, ids: Sequence[int]) -> tuple[list[Part], int]:
        """Parts that became certain, and how many of the ids belong to the output."""
        parts: list[Part] = []
        done = 0
        while self._parser is not None and self._parser.thinking and done < len(ids) and self.matched is None:
            text, used = self._text.push(ids[done : done + 1])  # one by one, to count them
            done += used
            self._thinking_tokens += used
            parts += self._parser.push(text)
        if done < len(ids) and self.matched is None:
            text, used = self._text.push(ids[done:])
            done += used
            parts += self._parts_of(text)
        return self._counted(parts), done

    def flush(self) -> list[Part]:
        """Parts of the text that was still held, once no more tokens come; it may hold a stop string."""
        return self._counted(self._parts_of(self._text.finish()))

    def finish(self) -> list[Part]:
        """The last parts, once no more text comes."""
        return [] if self._parser is None else self._counted(self._parser.finish())

    def _parts_of(self, text: str) -> list[Part]:
        if self._parser is not None:
            return self._parser.push(text)
        return [Text(text)] if text else []

    def _counted(self, parts: list[Part]) -> list[Part]:
        for part in parts:
            self.calls += isinstance(part, CallBegin) - isinstance(part, CallFault)
        return parts


class DeltaMaker:
    """Makes the deltas of one choice."""

    def __init__(self, vocabulary: Vocabulary, choice: OpenChoice, reader: OutputReader, with_scores: bool) -> None:
        self._vocabulary, self._choice, self._reader, self._with_scores = vocabulary, choice, reader, with_scores
        self.finished = False
        self.taken = 0  # tokens

    @property
    def unread(self) -> int:
        return len(self._choice.output) - self.taken

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of thinking so far; None where it is not told apart."""
        return self._reader.reasoning_tokens if self._reader.parses else None

    def take(self) -> Delta | None:
        """All that is new, or None. Cuts the choice where a stop string is found; the choice then has ended here."""
        choice = self._choice
        if self.finished or (not self.unread and choice.end is None):
            return None
        return self._delta(*choice.since(self.taken), ends=choice.end is not None)

    def skip(self, seen: Seen) -> Delta | None:
        """What the client has already, as one delta; None while that much is not there yet.

        The text behind is the same however it was cut into deltas before.
        """
        choice = self._choice
        if choice.end is not None:
            check_ahead(seen, len(choice.output), choice.index)
        if self.unread < seen.tokens or (seen.ended and choice.end is None):
            return None
        return replace(self._delta(*choice.since(0, seen.tokens), ends=seen.ended), seen=True)

    def _delta(self, ids: list[int], scores: list[Score], *, ends: bool) -> Delta:
        """The next tokens; `ends` where no more come."""
        choice, reader, start = self._choice, self._reader, self.taken
        self.taken += len(ids)
        parts, used = reader.push(ids)
        if reader.matched is None and ends:
            parts += reader.flush()
        if reader.matched is not None:
            choice.cut(start + used)
            ids, scores, ends = ids[:used], scores[:used], True
            self.taken = start + used
        self.finished = ends
        if ends:
            parts += reader.finish()
        return Delta(
            choice=choice.index,
            text=visible(parts),
            parts=merged(parts) if reader.parses else None,
            called=reader.calls > 0,
            token_ids=tuple(ids),
            logprobs=tuple(map(self._scored, ids, scores)) if self._with_scores else None,
            finish_reason=choice.end if ends else None,
            matched_stop=reader.matched,
            matched_token_id=choice.stop_token_id if ends else None,
            cumulative_logprob=choice.cumulative_logprob if ends else None,
            length=self.taken,
        )

    def _scored(self, token: int, score: Score) -> ScoredToken:
        return scored(self._vocabulary, token, score)


def scored(vocabulary: Vocabulary, token: int, score: Score) -> ScoredToken:
    """A token with its log probability and the bytes of all tokens named."""
    top = tuple(
        ScoredToken(other, vocabulary.token_bytes(other), logprob, rank)
        for rank, (other, logprob) in enumerate(score.top, start=1)
    )
    return ScoredToken(token, vocabulary.token_bytes(token), score.logprob, score.rank, top)


def scored_prompt(vocabulary: Vocabulary, ids: Sequence[int], scores: Sequence[Score]) -> tuple[ScoredToken, ...]:
    """The whole prompt; `scores` begin with the second token."""
    first = ScoredToken(ids[0], vocabulary.token_bytes(ids[0]), None, 0)
    return (first, *(scored(vocabulary, token, score) for token, score in zip(ids[1:], scores, strict=True)))


def end_ids(model: types_pb2.ModelDescription, stop: types_pb2.StopCriteria) -> frozenset[int]:
    """Tokens that end a choice of a request."""
    return frozenset(stop.stop_token_ids) | (frozenset() if stop.ignore_eos else frozenset(model.eos_token_ids))
