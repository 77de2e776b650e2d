"""Native samplers: one for each sequence that needs more than the argmax of its logits, kept with the sequence."""

from __future__ import annotations

from kernels import _native
from services.executor.backends.base import SampleRow
from services.executor.sampling.draw import takes_argmax


def sampler_of(row: SampleRow, vocab_size: int, is_masked: bool = False) -> _native.Sampler | None:
    """The row's sampler, made at first sight, with all output so far taken in; None where the argmax is enough, which
    a mask rules out."""
    if not is_masked and row.rule.logprob_count < 0 and takes_argmax(row):
        return None
    sampler = row.prepared
    if not isinstance(sampler, _native.Sampler):
        sampler = row.prepared = make_sampler(row, vocab_size)
    if sampler.needs_history and sampler.observed < len(row.output_ids):
        sampler.observe(row.output_ids[sampler.observed :])
    return sampler


def make_sampler(row: SampleRow, vocab_size: int) -> _native.Sampler:
    """The native form of the row's rule, no output taken in."""
    rule = row.rule
    return _native.Sampler(
        temperature=rule.temperature,
        top_k=rule.top_k,
        top_p=rule.top_p,
        min_p=rule.min_p,
        repetition_penalty=rule.repetition_penalty,
        presence_penalty=rule.presence_penalty,
        frequency_penalty=rule.frequency_penalty,
        logit_bias=dict(rule.logit_bias),
        seed=rule.seed,
        choice=rule.choice,
        min_tokens=rule.min_tokens,
        banned_until_min_tokens=rule.banned_until_min_tokens,
        logprob_count=rule.logprob_count,
        prompt_ids=row.prompt_ids,
        vocab_size=vocab_size,
    )
