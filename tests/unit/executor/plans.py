"""Short ways to write plans."""

from __future__ import annotations

from quire.v1 import executor_pb2, types_pb2


def blocks(*ids: int, drafts=None) -> list[executor_pb2.BlockList]:
    """`drafts`: those of the draft model."""
    lists = [executor_pb2.BlockList(group_id=0, block_ids=ids)]
    return lists if drafts is None else [*lists, executor_pb2.BlockList(group_id=1, block_ids=drafts)]


def state(
    sequence_id: int,
    prompt,
    block_ids,
    *,
    output=(),
    computed: int = 0,
    max_tokens: int = 8,
    min_tokens: int = 0,
    stop_ids=(),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    draft_blocks=None,
    **sampling,
) -> executor_pb2.SequenceState:
    return executor_pb2.SequenceState(
        sequence_id=sequence_id,
        token_ids=[*prompt, *output],
        prompt_length=len(prompt),
        computed_length=computed,
        blocks=blocks(*block_ids, drafts=draft_blocks),
        sampling=types_pb2.SamplingParams(**{"seed": 1, "temperature": 0.0, **sampling}),
        stop=types_pb2.StopCriteria(
            max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_ids, ignore_eos=ignore_eos
        ),
        logprobs=types_pb2.LogprobOptions(output_count=logprobs, prompt_count=prompt_logprobs),
    )


def plan(epoch: int, step: int, *, grants=(), **fields) -> executor_pb2.StepPlan:
    """`grants`: (sequence id, token limit, steps) or (sequence id, token limit, steps, draft limit)."""
    return executor_pb2.StepPlan(
        epoch=epoch,
        step=step,
        sequence_ids=[grant[0] for grant in grants],
        token_limits=[grant[1] for grant in grants],
        step_counts=[grant[2] for grant in grants],
        draft_limits=[grant[3] if len(grant) > 3 else 0 for grant in grants],
        **fields,
    )


def tokens_by_sequence(messages) -> dict[int, list[int]]:
    """All output ids of each sequence over some results messages."""
    found: dict[int, list[int]] = {}
    for message in messages:
        at = 0
        for sequence_id, count in zip(message.sequence_ids, message.token_counts, strict=True):
            found.setdefault(sequence_id, []).extend(message.token_ids[at : at + count])
            at += count
        assert at == len(message.token_ids)
    return found


def ends(messages) -> dict[int, executor_pb2.SequenceEnd]:
    found: dict[int, executor_pb2.SequenceEnd] = {}
    for message in messages:
        for end in message.ended:
            assert end.sequence_id not in found
            found[end.sequence_id] = end
    return found
