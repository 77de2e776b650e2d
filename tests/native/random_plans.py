"""Random steps over random sequences: prompts in chunks beside decodes, shared and copied prefixes, preemption."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from services.executor.backends.base import Sampled, SamplingRule
from services.executor.batch import BlockTables, Row, Step, build_step
from services.executor.sequences import Drafted, Ending, Sequence

BLOCK = 32
MOST_SEQUENCES, MOST_PROMPT, MOST_OUTPUT = 7, 130, 12

Copy = Callable[[list[tuple[int, int]]], None]


def random_rule(random: Random, vocab: int) -> SamplingRule:
    def one_of(*values: float) -> float:
        return random.choice(values)

    ids = random.sample(range(vocab), 8)
    return SamplingRule(
        temperature=one_of(0, 0, 0.7, 1, 1.4),
        top_k=int(one_of(0, 0, 0, 1, 5, 40)),
        top_p=one_of(1, 1, 0.95, 0.5, 0),
        min_p=one_of(0, 0, 0.05),
        repetition_penalty=one_of(1, 1, 1.3, 0.8),
        presence_penalty=one_of(0, 0, 0.6, -0.5),
        frequency_penalty=one_of(0, 0, 0.4),
        logit_bias=random.choice([{}, {}, {ids[0]: 5.0, ids[1]: -100.0}]),
        seed=random.getrandbits(64) - 2**63,
        choice=random.randrange(3),
        min_tokens=random.choice([0, 0, 4]),
        banned_until_min_tokens=tuple(ids[2:]),
        logprob_count=random.choice([-1, -1, 0, 3]),
        prompt_logprob_count=random.choice([-1, -1, -1, 0, 2]),
    )


@dataclass
class Running:
    sequence: Sequence
    blocks: list[int]


@dataclass
class RandomPlans:
    """Draws steps and takes in what came of them. Blocks are counted, for sequences share them."""

    random: Random
    vocab: int
    block_count: int
    copy: Copy  # to be called before the step that follows
    running: list[Running] = field(default_factory=list)
    waiting: list[Sequence] = field(default_factory=list)  # preempted
    seen: Counter[str] = field(default_factory=Counter)  # how often what happened

    def __post_init__(self) -> None:
        self._tables = BlockTables(BLOCK)
        self._uses: Counter[int] = Counter()
        self._ids = iter(range(1, 1 << 30))

    def next_step(self) -> Step:
        """A step of at least one token."""
        random = self.random
        if len(self.running) < MOST_SEQUENCES and random.random() < 0.4:
            self._enter()
        if len(self.running) > 1 and random.random() < 0.1:
            self._preempt(random.choice(self.running))
        while True:
            rows = self._choose_rows()
            if rows:
                self.seen["rows"] += len(rows)
                return build_step(rows, self._tables)
            self._enter()

    def finish(self, step: Step, token_ids: list[int]) -> None:
        """Takes in the tokens drawn, for each of step.sampling one and one for each draft."""
        drawn = iter(token_ids)
        for row in step.rows:
            row.sequence.computed += row.count
        for sequence in step.sampling:
            sequence.unreported.drafted.append(Drafted(0))
            sequence.take([Sampled(token, None) for token in islice(drawn, sequence.sample_row.count)])
            self.seen["accepted"] += sequence.unreported.drafted[-1].accepted
            self.seen["tokens"] += 1
            if len(sequence.output) >= MOST_OUTPUT or self.random.random() < 0.05:
                self._leave(next(one for one in self.running if one.sequence is sequence))

    def _choose_rows(self) -> list[Row]:
        random, rows = self.random, []
        chosen = random.sample(self.running, random.randint(0, len(self.running)))
        for one in chosen:
            if one not in self.running:
                continue  # another one's blocks were taken from it
            left = one.sequence.remaining
            count = min(left, random.choice([1, 2, 7, 31, 33, 64, 200]))
            # Tokens near those of the output are the likeliest to be accepted: there are few.
            drafts = (
                random.choices([*one.sequence.output[-4:], 3], k=random.choice([0, 0, 1, 5])) if count == left else []
            )
            if self._make_room(one, one.sequence.computed + count + len(drafts)):
                rows.append(Row(one.sequence, count, draft_ids=drafts))
        return [row for row in rows if any(one.sequence is row.sequence for one in self.running)]

    def _enter(self) -> None:
        random = self.random
        if self.waiting and random.random() < 0.7:
            old = self.waiting.pop(0)
            self._start(list(old.tokens), old.prompt_length, old.rule, computed=0, blocks=[])
            self.seen["resumed"] += 1
            return
        tokens = [random.randrange(self.vocab) for _ in range(random.randint(1, MOST_PROMPT))]
        rule = random_rule(random, self.vocab)
        sources = [one for one in self.running if one.sequence.computed > BLOCK]
        source = random.choice(sources) if sources and random.random() < 0.7 else None
        if source is None:
            self._start(tokens, len(tokens), rule, computed=0, blocks=[])
            return
        shared = random.randint(BLOCK, source.sequence.computed)
        if random.random() < 0.5:  # whole blocks are shared, others copied
            shared = shared // BLOCK * BLOCK
            blocks = source.blocks[: shared // BLOCK]
            self.seen["shared"] += len(blocks)
        else:
            copied = source.blocks[: -(-shared // BLOCK)]
            blocks = self._free()[: len(copied)]
            if len(blocks) < len(copied):
                return
            self.copy(list(zip(copied, blocks, strict=True)))
            self.seen["copied"] += len(blocks)
        prompt = [*source.sequence.tokens[:shared], *tokens[:40]]
        self._start(prompt, len(prompt), rule, computed=shared, blocks=blocks)

    def _start(
        self, tokens: list[int], prompt_length: int, rule: SamplingRule, computed: int, blocks: list[int]
    ) -> None:
        sequence = Sequence(next(self._ids), tokens, prompt_length, computed, rule, Ending(frozenset(), MOST_OUTPUT))
        sequence.table = self._tables.add(blocks)
        self._uses.update(blocks)
        self.running.append(Running(sequence, list(blocks)))

    def _make_room(self, one: Running, length: int) -> bool:
        """Blocks for `length` tokens, taken from others where none is free."""
        while len(one.blocks) * BLOCK < length:
            free = self._free()
            if free:
                block = self.random.choice(free)
                self._uses[block] += 1
                one.blocks.append(block)
                self._tables.append(one.sequence.table, [block])
            else:
                others = [other for other in self.running if other is not one]
                if not others:
                    return False
                self._preempt(self.random.choice(others))
        return True

    def _free(self) -> list[int]:
        return [block for block in range(self.block_count) if not self._uses[block]]

    def _preempt(self, one: Running) -> None:
        self._leave(one)
        self.waiting.append(one.sequence)
        self.seen["preempted"] += 1

    def _leave(self, one: Running) -> None:
        self.running.remove(one)
        self._uses.subtract(one.blocks)
        self._tables.release(one.sequence.table)
