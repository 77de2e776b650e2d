"""A tiny executor as a plain object.

Its KV is a table of slots: a token is computed from what its blocks really hold, so wrong blocks, lost tokens or early
reuse change the output.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.v1 import executor_pb2, scheduler_pb2, types_pb2
from services.common.errors import QuireError, Reason
from services.common.kv_policy import KvPolicy

VOCAB, EOS = 1000, 0
STOP, LENGTH = types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_REASON_LENGTH
HOT = types_pb2.KV_FORMAT_FP32
FORMATS = {"fp8": types_pb2.KV_FORMAT_FP8, "int8": types_pb2.KV_FORMAT_INT8, "int4": types_pb2.KV_FORMAT_INT4}


def next_token(tokens: list[int], seed: int, choice: int, output_length: int) -> int:
    """Depends on every earlier token. About one in fifty is the end token."""
    data = repr((tokens, seed, choice, output_length)).encode()
    value = int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big")
    return EOS if value % 50 == 0 else 1 + value % (VOCAB - 1)


def log_probabilities(tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Of every token behind these [VOCAB]. The end token is likely."""
    digest = hashlib.blake2b(repr(tokens).encode(), digest_size=8).digest()
    logits = 2.0 * np.random.default_rng(int.from_bytes(digest, "big")).standard_normal(VOCAB)
    logits[EOS] += 5.0
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


def reference(submit: scheduler_pb2.Submit, choice: int) -> tuple[list[int], int]:
    """The output of a choice computed alone, and its finish reason."""
    output: list[int] = []
    prompt = list(submit.prompt_token_ids)
    while True:
        output.append(next_token(prompt + output, submit.sampling.seed, choice, len(output)))
        if output[-1] == EOS and not submit.stop.ignore_eos:
            return output, STOP
        if len(output) >= submit.stop.max_tokens:
            return output, LENGTH


def describe(
    name: str = "m",
    *,
    executor_id: str = "e0",
    blocks: int = 64,
    block_size: int = 4,
    max_sequences: int = 8,
    max_step_tokens: int = 32,
    fingerprint: str = "f0",
    tokenizer: str = "t0",
    kv_policy: str = "",
    colder_blocks: tuple[int, ...] = (),
    disk_blocks: int = 0,
    most_drafts: int = 0,
    weighs_drafts: bool = False,
) -> types_pb2.ExecutorDescription:
    """Block ids of one pool follow those of the one before: hot, colder ones by age, then the disk's."""
    pools = [(types_pb2.TIER_DEVICE, HOT, blocks)]
    for colder, count in zip(KvPolicy.parse(kv_policy).colder, colder_blocks, strict=True):
        pools.append((types_pb2.TIER_DEVICE, FORMATS[colder.format], count))
    if disk_blocks:
        pools.append((types_pb2.TIER_DISK, HOT, disk_blocks))
    firsts = [sum(count for _, _, count in pools[:number]) for number in range(len(pools))]
    return types_pb2.ExecutorDescription(
        executor_id=executor_id,
        model=types_pb2.ModelDescription(
            name=name,
            fingerprint=fingerprint,
            tokenizer_fingerprint=tokenizer,
            context_length=4096,
            vocab_size=VOCAB,
            eos_token_ids=[EOS],
        ),
        groups=[types_pb2.CacheGroup(group_id=0, name="target", block_size=block_size, block_bytes=64)],
        pools=[
            types_pb2.BlockPool(
                pool_id=number,
                group_id=0,
                tier=tier,
                format=format_,
                block_count=count,
                first_block_id=first,
                block_bytes=64,
            )
            for number, ((tier, format_, count), first) in enumerate(zip(pools, firsts, strict=True))
        ],
        speculation=types_pb2.SpeculationDescription(
            proposer="ngram", max_draft_tokens=most_drafts, weighs_drafts=weighs_drafts
        )
        if most_drafts
        else None,
        kv_policy=kv_policy,
        max_sequences=max_sequences,
        max_step_tokens=max_step_tokens,
        decode_step_seconds=0.01,
        prefill_tokens_per_second=1e6,
    )


@dataclass(eq=False)
class SimSequence:
    state: executor_pb2.SequenceState
    tokens: list[int]
    blocks: list[int]
    computed: int
    credit: deque[list[int]] = field(default_factory=deque)  # [token limit, steps, draft limit]
    draft_credit: int = 0  # drafts that may be accepted in all
    drafted: list[tuple[int, int]] = field(default_factory=list)  # proposed and accepted, by step
    new: list[int] = field(default_factory=list)
    scores: list[types_pb2.TokenLogprobs] = field(default_factory=list)  # of what is new, where asked for
    used: int = 0
    fresh: bool = True
    changes: deque[tuple[int, int, int, bool]] = field(default_factory=deque)  # length, position, block, writes

    @property
    def steps(self) -> int:
        return sum(steps for _, steps, _ in self.credit)


class SimExecutor:
    """Computes plans by the rules of the wire. One epoch at a time."""

    def __init__(self, description: types_pb2.ExecutorDescription) -> None:
        self.description = description
        self.block_size = description.groups[0].block_size
        self.policy = KvPolicy.parse(description.kv_policy)
        self.ages = [age for age, pool in enumerate(description.pools) for _ in range(pool.block_count)]
        self.slots: list[list[int | None]] = [[None] * self.block_size for _ in self.ages]
        self.inventory: dict[int, bytes] = {}
        self.done: list[int] = []  # block operations
        self.epoch = 0
        self.largest_step = 0
        self.plan_count = self.copy_count = self.computed_tokens = self.accepted_count = 0
        self.draft_quality = 0.7  # how often a draft is what the model says
        self.is_behind = False  # proposes nothing yet
        self.reset()

    def reset(self) -> int:
        """Opens a new epoch; contents of blocks stay."""
        self.epoch += 1
        self.sequences: dict[int, SimSequence] = {}
        self.operations: deque[executor_pb2.BlockOperation] = deque()
        self.step = self.sent = self.report_credit = 0
        self.unanswered = False
        self.ended: list[executor_pb2.SequenceEnd] = []
        return self.epoch

    def take(self, plan: executor_pb2.StepPlan) -> None:
        if plan.epoch != self.epoch or plan.step != self.step + 1:
            raise QuireError(Reason.PLAN_GAP, f"plan {plan.step} after {self.step}")
        self.plan_count += 1
        self.step, self.report_credit, self.unanswered = plan.step, plan.report_credit, True
        for stay in plan.ended_sequence_ids:
            self.sequences.pop(stay, None)
        for operation in plan.operations:
            if operation.kind == executor_pb2.BLOCK_OPERATION_KIND_COPY:
                self._copy(operation.source_block_id, operation.destination_block_id)
                self.copy_count += 1
            else:
                self.operations.append(operation)
        self.inventory.update((block.block_id, block.key) for block in plan.sealed)
        for gained in plan.append:
            if gained.sequence_id in self.sequences:
                self.sequences[gained.sequence_id].blocks += [i for b in gained.blocks for i in b.block_ids]
        for state in plan.enter:
            assert state.sequence_id not in self.sequences
            assert 0 <= state.computed_length < len(state.token_ids)
            blocks = [i for b in state.blocks for i in b.block_ids]
            self.sequences[state.sequence_id] = SimSequence(state, list(state.token_ids), blocks, state.computed_length)
        for demotion in plan.demotions:
            self._demote_later(demotion)
        assert len(self.sequences) <= self.description.max_sequences
        assert len(plan.sequence_ids) == len(plan.token_limits) == len(plan.step_counts) == len(plan.draft_limits)
        assert len(plan.draft_credits) == len(plan.sequence_ids)
        rows = (plan.sequence_ids, plan.token_limits, plan.step_counts, plan.draft_limits, plan.draft_credits)
        for stay, limit, steps, drafts, draft_credit in zip(*rows, strict=True):
            assert limit >= 1
            assert steps >= 1
            assert 0 <= drafts <= self.description.speculation.max_draft_tokens
            assert limit == 1 or drafts == 0
            if stay in self.sequences:
                self.sequences[stay].credit.append([limit, steps, drafts])
                self.sequences[stay].draft_credit += draft_credit
                if self.sequences[stay].state.stop.stop:
                    assert self.sequences[stay].steps <= 2

    def run(self) -> executor_pb2.StepResults | None:
        """One step, or what is left to say at rest."""
        left, due, hot = self.description.max_step_tokens, False, []
        computed = 0
        for sequence in self.sequences.values():
            self._demote(sequence)
            if not sequence.credit:
                continue
            count = min(sequence.credit[0][0], len(sequence.tokens) - sequence.computed)
            if sequence.computed + count > len(sequence.blocks) * self.block_size or count > left:
                assert sequence.computed + count <= len(sequence.blocks) * self.block_size, "granted past its blocks"
                continue
            assert not sequence.changes or sequence.computed + count <= sequence.changes[0][0], (
                "a chunk across a change"
            )
            drafts = min(self._draft_room(sequence, count), left - count)
            left -= count + drafts
            computed += count + drafts
            self._compute(sequence, count, drafts)
            if sequence.fresh and sequence.new:
                sequence.fresh = False
                hot.append(sequence)
            due = due or sequence.steps in (0, self.report_credit)
        self.largest_step = max(self.largest_step, computed)
        self.computed_tokens += computed
        for ended in self.ended:
            hot.append(self.sequences.pop(ended.sequence_id))
        if computed == 0:
            if self.unanswered or any(s.used for s in self.sequences.values()):
                return self._message(list(self.sequences.values()), 0)
            return None
        if due:
            return self._message([*self.sequences.values(), *hot], 1)
        return self._message(hot, 1) if hot else None

    def fail(self, stay: int) -> None:
        """Ends a sequence with an error in the next step."""
        error = QuireError(Reason.NOT_FINITE, "the model's logits are not finite").to_detail()
        reason = types_pb2.FINISH_REASON_ERROR
        self.ended.append(executor_pb2.SequenceEnd(sequence_id=stay, reason=reason, error=error))

    def move(self) -> bool:
        """Does one block operation; whether there was one."""
        if not self.operations:
            return False
        operation = self.operations.popleft()
        if operation.operation_id in self.done:  # sent twice
            return True
        self._copy(operation.source_block_id, operation.destination_block_id)
        self.inventory[operation.destination_block_id] = operation.key
        self.done.append(operation.operation_id)
        return True

    def _demote_later(self, demotion: executor_pb2.BlockDemotion) -> None:
        sequence = self.sequences.get(demotion.sequence_id)
        if sequence is None:
            return
        assert demotion.at_length >= sequence.computed, "a change comes too late"
        for change in zip(demotion.positions, demotion.block_ids, demotion.writes, strict=True):
            sequence.changes.append((demotion.at_length, *change))

    def _demote(self, sequence: SimSequence) -> None:
        while sequence.changes and sequence.changes[0][0] == sequence.computed:
            _, position, block, writes = sequence.changes.popleft()
            if writes:
                assert self.ages[block] == self.ages[sequence.blocks[position]] + 1
                self._copy(sequence.blocks[position], block)
            sequence.blocks[position] = block

    def _copy(self, source: int, destination: int) -> None:
        self.slots[destination] = self.slots[source][:]
        self.inventory.pop(destination, None)

    def _draft_room(self, sequence: SimSequence, count: int) -> int:
        end = sequence.computed + count
        if end < len(sequence.tokens) or not sequence.credit[0][2]:
            return 0
        most = sequence.state.prompt_length + sequence.state.stop.max_tokens - 1
        room = [
            sequence.credit[0][2],
            sequence.draft_credit,
            len(sequence.blocks) * self.block_size - end,
            most - end,
            *(length - end for length, _, _, _ in list(sequence.changes)[:1]),
        ]
        return min(room)

    def _compute(self, sequence: SimSequence, count: int, drafts: int) -> None:
        for position in range(sequence.computed // self.block_size):
            age = self.policy.age(position, self.block_size, sequence.computed)
            assert self.ages[sequence.blocks[position]] == age, f"position {position} of {sequence.computed} tokens"
        proposed = self._propose(sequence, drafts)
        written = [*sequence.tokens[sequence.computed : sequence.computed + count], *proposed]
        for position, token in enumerate(written, sequence.computed):
            block = sequence.blocks[position // self.block_size]
            assert self.ages[block] == 0
            self.slots[block][position % self.block_size] = token
            self.inventory.pop(block, None)
        sequence.computed += count
        sequence.used += 1
        admits = sequence.credit[0][2] > 0
        sequence.credit[0][1] -= 1
        if sequence.credit[0][1] == 0:
            sequence.credit.popleft()
        if sequence.computed < len(sequence.tokens):
            assert not admits
            return
        accepted = 0
        goes_on = self._draw(sequence)
        for draft in proposed:
            if not goes_on or sequence.tokens[-1] != draft:
                break
            accepted += 1
            sequence.computed += 1
            goes_on = self._draw(sequence)
        if admits:
            sequence.drafted.append((len(proposed), accepted))
            sequence.draft_credit -= accepted
            self.accepted_count += accepted

    def _propose(self, sequence: SimSequence, count: int) -> list[int]:
        """What the model will say, with mistakes."""
        if self.is_behind:
            return []
        tokens, state = list(sequence.tokens), sequence.state
        known = len(tokens)
        for position in range(known, known + count):
            token = next_token(tokens, state.sampling.seed, state.choice, position - state.prompt_length)
            chance = int.from_bytes(hashlib.blake2b(repr((tokens, "draft")).encode(), digest_size=2).digest(), "big")
            tokens.append(token if chance < self.draft_quality * 65536 else VOCAB - 1)
        return tokens[known:]

    def _draw(self, sequence: SimSequence) -> bool:
        """Draws the next token; whether the sequence goes on."""
        read = [
            self.slots[sequence.blocks[p // self.block_size]][p % self.block_size] for p in range(sequence.computed)
        ]
        state = sequence.state
        output_length = len(sequence.tokens) - state.prompt_length
        if state.logprobs.HasField("output_count"):
            token = self._score(sequence, read)  # type: ignore[arg-type]
        else:
            token = next_token(read, state.sampling.seed, state.choice, output_length)  # type: ignore[arg-type]
        sequence.tokens.append(token)
        sequence.new.append(token)
        if token == EOS and not state.stop.ignore_eos:
            self.ended.append(executor_pb2.SequenceEnd(sequence_id=state.sequence_id, reason=STOP, stop_token_id=token))
            return False
        if output_length + 1 >= state.stop.max_tokens:
            self.ended.append(executor_pb2.SequenceEnd(sequence_id=state.sequence_id, reason=LENGTH))
            return False
        return True

    def _score(self, sequence: SimSequence, read: list[int]) -> int:
        """The likeliest token that may be drawn; notes its log probability and those of the likeliest of all."""
        state, found = sequence.state, log_probabilities(read)
        likeliest = np.argsort(-found, kind="stable")
        bans = len(read) - state.prompt_length < state.stop.min_tokens
        ends = set(state.stop.stop_token_ids) if bans else set()
        token = next(int(token) for token in likeliest if token not in ends)
        top = likeliest[: state.logprobs.output_count]
        sequence.scores.append(
            types_pb2.TokenLogprobs(
                chosen=[found[token]],
                ranks=[1 + int((found > found[token]).sum())],
                top_count=len(top),
                top_token_ids=top.tolist(),
                top_logprobs=found[top].tolist(),
            )
        )
        return token

    def _message(self, sequences: list[SimSequence], steps: int) -> executor_pb2.StepResults:
        self.sent += 1
        self.unanswered = False
        told = [s for s in dict.fromkeys(sequences) if s.used]
        message = executor_pb2.StepResults(
            epoch=self.epoch,
            sequence_number=self.sent,
            last_plan=self.step,
            sequence_ids=[s.state.sequence_id for s in told],
            token_counts=[len(s.new) for s in told],
            token_ids=[token for s in told for token in s.new],
            computed_lengths=[s.computed for s in told],
            step_counts=[s.used for s in told],
            proposed_counts=[proposed for s in told for proposed, _ in s.drafted],
            accepted_counts=[accepted for s in told for _, accepted in s.drafted],
            behind=[self.is_behind for s in told for _ in s.drafted] if self.is_behind else [],
            draft_step_counts=[len(s.drafted) for s in told] if any(s.drafted for s in told) else [],
            ended=self.ended,
            logprobs=[
                executor_pb2.SequenceLogprobs(sequence_id=s.state.sequence_id, output=scores)
                for s in told
                for scores in s.scores
            ],
            timings=executor_pb2.StepTimings(step_count=steps, compute_seconds=0.005 * steps),
        )
        for s in told:
            s.new, s.scores, s.drafted, s.used = [], [], [], 0
        self.ended = []
        return message
