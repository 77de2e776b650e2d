"""Guided sequences on each backend: what is drawn, when it ends, and that neighbours notice nothing."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import torch

from quire.v1 import types_pb2
from quire.v1.types_pb2 import ChoiceList, Constraint
from services.executor.backends.base import SampleRow, SamplingRule, StepInputs
from services.executor.batch import StepLimits
from services.executor.loader import LoadedModel, make_loader
from services.executor.sampling import draw, scores
from services.executor.sampling.draw import single_rows
from services.executor.settings import ExecutorSettings
from services.executor.speculation.proposer import DraftRequest
from services.executor.warmup import warm_up
from tests.fixtures.models import make_rand_model
from tests.fixtures.vocabularies import END_OF_TURN_ID, EOS_ID
from tests.unit.executor.conftest import Bench, make_bench
from tests.unit.executor.plans import ends, state, tokens_by_sequence

BLOCK_SIZES = {"torch": 4, "cpu": 32}
END_IDS = (EOS_ID, END_OF_TURN_ID)
STOP, LENGTH, ERROR = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH, types_pb2.FINISH_REASON_ERROR
PROMPT = [7, 3, 9, 12]
WORD = Constraint(regex="[a-f]{4,9}")
DRAWN = {"temperature": 1.0, "seed": 11, "top_p": 0.95}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.set_num_threads(1)
    return make_rand_model(tmp_path_factory.mktemp("rand"), 3)


@pytest.fixture(scope="module", params=BLOCK_SIZES)
def model(path, request) -> LoadedModel:
    asked = {"backend": request.param, "block_size": BLOCK_SIZES[request.param], "kv_blocks": 96}
    loaded = make_loader(ExecutorSettings.model_validate(asked | {"dtype": "fp32", "threads": 2}))("rand", str(path))
    assert loaded.backend.name == request.param
    warm_up(loaded.backend, loaded.shape, 64, loaded.backend.spec.context_length)
    return loaded


@pytest.fixture
def bench(model) -> Bench:
    made = make_bench(StepLimits(sequences=8, tokens=64))
    made.loop.backend = model.backend
    made.core.set_model(model.limits, guides=model.grammars)
    made.loop.masks = model.grammars.masks
    return made


def guided(sequence_id: int, rule: Constraint | None = None, **options):
    """Sequence i holds blocks of its own."""
    prompt = options.pop("prompt", PROMPT)
    made = state(
        sequence_id, prompt, range(12 * (sequence_id % 8), 12 * (sequence_id % 8) + 12), **{"max_tokens": 40, **options}
    )
    if rule is not None:
        made.constraint.CopyFrom(rule)
    return made


def run(bench: Bench, *entering, drafts: int = 0):
    """Output and end of each sequence, by id."""
    grants = [(one.sequence_id, 64, 200, drafts) for one in entering]
    bench.take(enter=entering, grants=grants)
    sent = []
    deadline = time.monotonic() + 60
    while True:
        sent += bench.run()
        if not any(one.awaits_grammar for one in bench.core.sequences.values()):
            break
        assert time.monotonic() < deadline
        time.sleep(0.001)
    sent += bench.run()
    assert not bench.core.sequences
    output, ended = tokens_by_sequence(sent), ends(sent)
    return {one.sequence_id: (output.get(one.sequence_id, []), ended[one.sequence_id]) for one in entering}


def test_greedy_and_drawn_output_obeys_and_ends_with_the_end_token(bench):
    found = run(bench, guided(1, WORD), guided(2, WORD, **DRAWN), guided(3, WORD, temperature=3.0, seed=5, top_k=3))
    for output, end in found.values():
        assert end.reason == STOP
        assert end.stop_token_id == output[-1] in END_IDS
        assert 4 <= len(output) - 1 <= 9
        assert set(output[:-1]) <= set(b"abcdef")


def test_what_is_drawn_is_the_draw_under_the_mask(bench, model, path):
    """The same as the reference draws from the model's own logits."""
    [(output, _)] = run(bench, guided(1, Constraint(regex="[a-p]{12}"), logprobs=2, **DRAWN)).values()
    logits = torch.from_numpy(
        model.backend.logits(whole_step(PROMPT + output[:-1]), range(len(PROMPT) - 1, len(PROMPT) + len(output) - 1))
    )
    guide = bench_guide(model, Constraint(regex="[a-p]{12}"))
    rule = SamplingRule(temperature=1.0, top_p=0.95, seed=11, min_tokens=0, banned_until_min_tokens=(EOS_ID,))
    for at, token in enumerate(output):
        row = SampleRow(0, rule, PROMPT, output[:at])
        row.allowed = mask_of(model, guide, output[:at])
        assert draw.draw([logits[at].numpy()], [row]) == [token]


def whole_step(tokens):
    count = len(tokens)
    return StepInputs(
        token_ids=np.array(tokens, np.int32),
        positions=np.arange(count, dtype=np.int32),
        query_starts=np.array([0, count], np.int32),
        context_lengths=np.array([count], np.int32),
        block_tables=np.arange(12, dtype=np.int32)[None, :],
        samples=[],
    )


def bench_guide(model, rule):
    done = threading.Event()
    model.grammars.start(done.set)
    guide = model.grammars.guide(rule, frozenset({EOS_ID}), [])
    assert done.wait(20)
    return guide


def mask_of(model, guide, output):
    row = np.zeros((model.backend.spec.vocab_size + 31) // 32, np.uint32)
    guide.follow(output)
    guide.matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
    return row


def test_logprobs_are_those_of_the_model_before_the_mask(bench, model):
    """As vLLM reports them by default."""
    sent_before = len(bench.sent)
    [(output, _)] = run(bench, guided(1, Constraint(choice=ChoiceList(values=["x"])), logprobs=1)).values()
    rows = range(len(PROMPT) - 1, len(PROMPT) + len(output) - 1)
    logits = model.backend.logits(whole_step(PROMPT + output[:-1]), rows)
    expected = scores.score(list(logits), output, 1)
    [told] = [part.output for message in bench.sent[sent_before:] for part in message.logprobs if part.output.chosen][
        :1
    ]
    assert output[0] == ord("x")
    assert told.chosen[0] == pytest.approx(expected.chosen[0], abs=1e-5)
    assert told.top_token_ids[0] == expected.top_ids[0][0] != output[0]


def test_output_does_not_depend_on_batch_chunks_drafts_or_resumption(bench, model):
    rules = [WORD, Constraint(json_object=True), Constraint(grammar='root ::= "(" root ")" | [0-9]{2}'), None]
    options = [{}, DRAWN, {"temperature": 1.3, "seed": 3, "repetition_penalty": 1.2, "frequency_penalty": 0.3}]
    asked = [(rule, option) for rule in rules for option in options][:8]
    alone = [run(bench, guided(100 + i, rule, **option))[100 + i][0] for i, (rule, option) in enumerate(asked)]
    together = run(bench, *(guided(200 + i, rule, **option) for i, (rule, option) in enumerate(asked)))
    assert [together[200 + i][0] for i in range(len(asked))] == alone
    bench.loop.proposer = Guess([token for output in alone for token in output])
    drafted = run(bench, *(guided(300 + i, rule, **option) for i, (rule, option) in enumerate(asked)), drafts=5)
    bench.loop.proposer = None
    assert [drafted[300 + i][0] for i in range(len(asked))] == alone
    for i, (rule, option) in enumerate(asked):
        half = len(alone[i]) // 2
        resumed = guided(400 + i, rule, output=alone[i][:half], **option)
        assert run(bench, resumed)[400 + i][0] == alone[i][half:]


class Guess:
    """Drafts that are sometimes right, sometimes refused by the grammar, and sometimes merely wrong."""

    name, detail = "guess", ""

    def __init__(self, tokens):
        self.tokens, self.calls = tokens, 0

    def catch_up(self, requests: list[DraftRequest]):
        return [True] * len(requests)

    def propose(self, requests: list[DraftRequest], tables, tokens):
        self.calls += 1
        return [[self.tokens[(self.calls * 7 + at) % len(self.tokens)] for at in range(most)] for _, most in requests]

    def computed(self, plain, tokens, seconds):
        pass


def test_choices_of_a_request_go_their_own_ways(bench):
    entering = [guided(i, WORD, **DRAWN) for i in range(4)]
    for choice, one in enumerate(entering):
        one.choice = choice
    outputs = [output for output, _ in run(bench, *entering).values()]
    assert len({tuple(output) for output in outputs}) > 1
    assert all(set(output[:-1]) <= set(b"abcdef") for output in outputs)


@pytest.mark.parametrize("options", [{"min_tokens": 30}, {"ignore_eos": True}, {"min_tokens": 30, "ignore_eos": True}])
def test_o2_the_end_of_the_grammar_wins(bench, options):
    """It ends where no end token may be drawn, instead of drawing anything else."""
    [(output, end)] = run(bench, guided(1, Constraint(choice=ChoiceList(values=["four"])), **options)).values()
    assert (bytes(output), end.reason, end.HasField("stop_token_id")) == (b"four", STOP, False)


def test_stop_tokens_are_drawn_only_where_the_grammar_may_end(bench):
    """Also those that are text to it."""
    letters = list(b"abcdef")
    [(output, end)] = run(
        bench, guided(1, Constraint(regex="[a-f]{6}[a-z]*"), stop_ids=letters, ignore_eos=True, **DRAWN)
    ).values()
    if end.reason == STOP:
        assert end.stop_token_id in letters
        output = output[:-1]
        assert set(output[6:]).isdisjoint(letters)
    assert len(output) >= 6 or not set(output) & set(letters)


def test_budget_ends_what_the_grammar_does_not(bench):
    [(output, end)] = run(
        bench, guided(1, Constraint(regex="a+b"), max_tokens=7, logit_bias={ord("b"): -100.0})
    ).values()
    assert (output, end.reason) == ([ord("a")] * 7, LENGTH)


@pytest.mark.parametrize(
    ("rule", "field"),
    [
        (Constraint(regex="[a"), "constraint.regex"),
        (Constraint(), "constraint"),
        (Constraint(json_schema='{"$ref": "#"}'), "constraint.json_schema"),
        (Constraint(json_schema=json.dumps({"type": "integer", "multipleOf": 999_999_937})), "constraint.json_schema"),
    ],
)
def test_o1_a_bad_rule_ends_its_sequence_alone(bench, rule, field):
    plain = run(bench, guided(1), guided(2, WORD))
    found = run(bench, guided(11), guided(12, WORD), guided(13, rule))
    assert [found[i + 10][0] for i in (1, 2)] == [plain[i][0] for i in (1, 2)]
    output, end = found[13]
    assert (output, end.reason, end.error.reason) == ([], ERROR, "INVALID_FIELD")
    assert end.error.message.startswith(f"{field}:")


def test_output_so_far_that_does_not_obey_is_refused(bench):
    [(output, end)] = run(bench, guided(1, WORD, output=b"zz")).values()
    assert (output, end.error.reason) == ([], "INVALID_FIELD")


def test_neighbours_go_on_while_a_grammar_is_compiled(bench, model, monkeypatch):
    """Their steps, and the guided sequence's own prompt but for its end."""
    compiling, go_on = threading.Event(), threading.Event()
    real = model.grammars._matcher

    def slow(constraint):
        compiling.set()
        assert go_on.wait(20)
        return real(constraint)

    monkeypatch.setattr(model.grammars, "_matcher", slow)
    long = guided(1, WORD, prompt=list(range(1, 36)))
    bench.take(enter=[long, guided(2, max_tokens=20, ignore_eos=True)], grants=[(1, 15, 50), (2, 64, 50)])
    sent = bench.run()
    assert compiling.is_set()
    assert len(tokens_by_sequence(sent)[2]) == 20
    assert 0 < bench.core.sequences[1].computed < 35
    go_on.set()
    while bench.core.sequences[1].awaits_grammar:
        time.sleep(0.001)
    assert ends(bench.run())[1].reason == STOP


def test_single_rows_carry_the_masks_of_their_places(model):
    """What the torch backend draws from: rows in order, each with its own bits."""

    class Masks:
        bits = np.arange(12, dtype=np.uint32).reshape(4, 3)
        first_rows = np.array([-1, 1], np.int32)

    free, masked = SampleRow(0, SamplingRule(), [1], [2]), SampleRow(5, SamplingRule(), [1], [2], draft_ids=[3, 4])
    singles = single_rows([free, masked], Masks())  # type: ignore[arg-type]
    assert [row.row for row in singles] == [0, 5, 6, 7]
    assert singles[0].allowed is None
    assert [row.allowed.tolist() for row in singles[1:]] == Masks.bits[1:].tolist()
    assert [list(row.output_ids) for row in singles[1:]] == [[2], [2, 3], [2, 3, 4]]
