"""One sequence's way through its grammar, the masks of a step, and the cache of grammars."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest

from quire.v1.types_pb2 import Constraint
from services.common.constraints.compile import compile_grammar
from services.common.constraints.translate import to_grammar
from services.common.errors import QuireError, Reason
from services.executor.backends.base import SamplingRule
from services.executor.grammar.cache import FIXED_BYTES, GrammarCache, memory_of
from services.executor.grammar.grammars import Grammars
from services.executor.grammar.guide import Guide
from services.executor.grammar.vocabulary import Vocabulary
from services.executor.sequences import Ending, Sequence
from tests.fixtures.vocabularies import EOS_ID, byte_level

WORDS = byte_level(["ab", "abc"])
AB, ABC = 260, 261
STOP_ID = ord("!")
SIZE = 300  # of the model's vocabulary: larger than the tokenizer's


def vocabulary() -> Vocabulary:
    return Vocabulary(WORDS.to_json(), SIZE, [EOS_ID])


@pytest.fixture
def grammars():
    made = Grammars(vocabulary, SIZE, mask_threads=1)
    yield made
    made.close()


def settled(grammars: Grammars, rule: Constraint, output=(), end_ids=frozenset({EOS_ID})) -> Guide:
    done = threading.Event()
    grammars.start(done.set)
    guide = grammars.guide(rule, end_ids, output)
    while guide.is_pending:  # an earlier guide's end wakes too
        assert done.wait(20)
        done.clear()
    return guide


def sequence(guide: Guide | None, output=(), drafts=()) -> Sequence:
    made = Sequence(1, [1, *output], 1, 0, SamplingRule(), Ending(frozenset({EOS_ID}), 100), guide)
    made.sample_row.draft_ids = list(drafts)
    return made


def allowed(grammars: Grammars, *sequences: Sequence) -> list[list[set[int]]]:
    """Of each sequence, the tokens allowed at each place; empty for those without a guide."""
    masks = grammars.masks.begin(sequences)
    assert masks is not None
    masks.wait()
    found = []
    for one, first in zip(sequences, masks.first_rows.tolist(), strict=True):
        count = 0 if first < 0 else 1 + len(one.sample_row.draft_ids)
        rows = masks.bits[first : first + count]
        found.append(
            [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in rows]
        )
    return found


def test_masks_follow_the_output(grammars):
    one = sequence(settled(grammars, Constraint(regex="abc?")))
    assert allowed(grammars, one) == [[{ord("a"), AB, ABC}]]
    one.output.append(ord("a"))
    assert allowed(grammars, one) == [[{ord("b")}]]
    one.output.append(ord("b"))
    assert allowed(grammars, one) == [[{ord("c"), EOS_ID}]]
    assert not one.guide.has_ended(one.output)
    one.output.append(ord("c"))
    assert allowed(grammars, one) == [[{EOS_ID}]]
    assert one.guide.has_ended(one.output)


def test_e1_a_guide_that_enters_with_output_stands_where_it_stood(grammars):
    """After a preemption, or on another executor."""
    rule = Constraint(json_schema=json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))
    output = list(b'{"a": 12')
    walked = sequence(settled(grammars, rule))
    for at in range(len(output)):
        resumed = sequence(settled(grammars, rule, output[:at]), output[:at])
        assert allowed(grammars, resumed) == allowed(grammars, walked)
        walked.output.append(output[at])


def test_output_that_does_not_obey_is_an_error_and_nothing_is_allowed(grammars):
    guide = settled(grammars, Constraint(regex="ab"), list(b"ax"))
    assert guide.error is not None
    assert guide.error.field == "constraint.regex"
    assert allowed(grammars, sequence(guide, b"ax")) == [[set()]]


def test_masks_of_drafts_are_those_of_the_output_that_they_would_be(grammars):
    drafts = [AB, ord("c"), ord("d")]
    one = sequence(settled(grammars, Constraint(regex="(ab|cd)*")), drafts=drafts)
    many = allowed(grammars, one)[0]
    for place in range(len(drafts) + 1):
        alone = sequence(settled(grammars, Constraint(regex="(ab|cd)*")), drafts[:place])
        assert [many[place]] == allowed(grammars, alone)[0]
    one.output += drafts  # the guide itself went nowhere
    assert allowed(grammars, one)[0][0] == many[3]


@pytest.mark.parametrize(
    ("drafts", "kept"),
    [
        ([AB, AB, ord("c")], 3),
        ([AB, ord("b"), ord("a")], 1),
        ([ord("x"), AB], 0),
        ([EOS_ID, AB], 1),
        ([258], 0),
        ([], 0),
    ],
)
def test_drafts_are_cut_where_the_grammar_refuses_them(grammars, drafts, kept):
    guide = settled(grammars, Constraint(regex="(ab|cd)*"))
    assert guide.cut([], drafts) == kept
    assert guide.cut([AB], drafts) == kept


def test_guided_and_free_sequences_share_a_step(grammars):
    guide = settled(grammars, Constraint(regex="a"))
    found = allowed(
        grammars,
        sequence(None),
        sequence(guide, drafts=[ord("a")]),
        sequence(None),
        sequence(settled(grammars, Constraint(regex="b"))),
    )
    assert found == [[], [{ord("a")}, {EOS_ID}], [], [{ord("b")}]]
    assert grammars.masks.begin([sequence(None)]) is None


def test_masks_of_many_rows(grammars):
    sequences = [sequence(settled(grammars, Constraint(regex="[ab]+")), b"ab", [AB] * 5) for _ in range(30)]
    rows = allowed(grammars, *sequences)
    assert rows == [[{ord("a"), ord("b"), AB, EOS_ID}] * 6] * 30


@pytest.mark.parametrize("end_ids", [frozenset({STOP_ID}), frozenset({STOP_ID, EOS_ID}), frozenset()])
def test_only_what_ends_the_sequence_is_drawn_where_the_grammar_may_end(grammars, end_ids):
    """Also a stop token that the grammar would take for text, and not an end token that is to be ignored."""
    rule = Constraint(regex="a[!b]*")
    one = sequence(settled(grammars, rule, end_ids=end_ids))
    assert allowed(grammars, one)[0][0] == {ord("a"), AB}
    one.output.append(ord("a"))
    assert allowed(grammars, one)[0][0] == {ord("b")} | (end_ids or {STOP_ID})


def test_a_limit_met_on_the_way_ends_that_sequence_alone(grammars):
    """The grammar is small and compiles, but no parser finds its way through it."""
    rule = Constraint(
        grammar="start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1} | /[a-z]/" for i in range(40)) + '\nr40: "a" | '
    )
    hard, easy = settled(grammars, rule), settled(grammars, Constraint(regex="a+"))
    for count in range(200):
        found = allowed(grammars, sequence(hard, b"a" * count), sequence(easy, b"a" * count))
        assert found[1] == [{ord("a"), EOS_ID} if count else {ord("a")}]
        if hard.error is not None:
            assert found[0] == [set()]
            assert hard.error.reason is Reason.INVALID_FIELD
            return
    pytest.fail("the grammar met no limit")


def test_bad_rules_fail_their_guide(grammars):
    for rule, field in (
        (Constraint(regex="[a"), "constraint.regex"),
        (Constraint(json_schema="{"), "constraint.json_schema"),
    ):
        assert settled(grammars, rule).error.field == field
    assert settled(grammars, Constraint(regex="a")).error is None


def test_o1_compiling_holds_nobody_up(grammars):
    """The caller goes on at once, and the interpreter's other threads run meanwhile."""
    rule = Constraint(
        json_schema=json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}})
    )
    done = threading.Event()
    grammars.start(done.set)
    started = time.thread_time()
    guide = grammars.guide(rule, frozenset({EOS_ID}), [])
    assert guide.is_pending
    assert time.thread_time() - started < 0.05
    turns = 0
    while not done.is_set():
        turns += 1
        time.sleep(0.001)
    assert guide.error is None
    assert turns > 3


def test_a_model_without_an_end_token_is_refused_by_name():
    made = Grammars(lambda: Vocabulary(WORDS.to_json(), SIZE, []), SIZE, mask_threads=1)
    try:
        for _ in range(2):
            error = settled(made, Constraint(regex="a")).error
            assert error is not None
            assert (error.reason, error.field) == (Reason.UNSUPPORTED, "constraint")
    finally:
        made.close()


def test_a_failing_vocabulary_is_an_internal_error_and_no_hang():
    def broken():
        raise RuntimeError("no file")

    made = Grammars(broken, SIZE, mask_threads=1)
    try:
        error = settled(made, Constraint(regex="a")).error
        assert error is not None
        assert error.reason is Reason.INTERNAL
    finally:
        made.close()


def matcher(text: str):
    rule = Constraint(regex=text)
    return compile_grammar(vocabulary().tokenizer, to_grammar(rule), "constraint.regex")


def test_cache_is_bounded_by_bytes_and_keeps_what_was_used_last():
    cache = GrammarCache(3000)
    for name in (b"a", b"b", b"c"):
        cache.keep(name, matcher(name.decode()), 1000)
    assert cache.copy(b"a") is not None
    cache.keep(b"d", matcher("d"), 1000)
    assert cache.copy(b"b") is None
    assert len(cache) == 3
    assert cache.byte_count == 3000
    cache.keep(b"large", matcher("e"), 3001)
    assert cache.copy(b"large") is None
    assert len(cache) == 3
    cache.keep(b"a", matcher("x"), 1000)
    assert cache.byte_count == 3000
    assert memory_of("") == FIXED_BYTES


def test_copies_of_a_kept_grammar_begin_at_its_beginning():
    cache = GrammarCache(10_000)
    cache.keep(b"k", matcher("ab"), 1)
    first = cache.copy(b"k")
    assert first is not None
    assert first.consume_tokens([ord("a")])
    second = cache.copy(b"k")
    assert second is not None
    assert second.validate_tokens([ord("a"), ord("b")]) == 2
    assert first.validate_tokens([ord("b")]) == 1


def test_a_compiled_rule_is_not_compiled_again(grammars, monkeypatch):
    calls = []
    monkeypatch.setattr(
        "services.executor.grammar.grammars.compile_grammar", lambda *args: calls.append(args) or compile_grammar(*args)
    )
    for _ in range(3):
        assert settled(grammars, Constraint(regex="abc")).error is None
    assert len(calls) == 1
    with pytest.raises(QuireError):
        raise settled(grammars, Constraint(regex="a[")).error or AssertionError


def test_nothing_is_compiled_for_a_sequence_that_has_gone(grammars, monkeypatch):
    calls, go_on = [], threading.Event()
    real = grammars._matcher

    def slow(constraint):
        calls.append(constraint.regex)
        assert go_on.wait(20)
        return real(constraint)

    monkeypatch.setattr(grammars, "_matcher", slow)
    first, second = (grammars.guide(Constraint(regex=text), frozenset({EOS_ID}), []) for text in "ab")
    second.abandon()
    first.abandon()  # too late: it is being compiled, and nobody minds
    go_on.set()
    assert settled(grammars, Constraint(regex="c")).error is None
    assert "b" not in calls
    assert second.error is not None
