"""In fp32, a token's logits are the same bits whatever ran beside it and however its prompt was cut."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.fixtures.models import make_rand_model
from tests.unit.executor.torch_runs import Runs, token_ids

PROMPT, NEIGHBOURS = 150, 27


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def decode(runs: Runs, sequence: int, tokens: list[int], neighbours: dict[int, list[int]]) -> list[torch.Tensor]:
    """Logits after each token, fed one a step beside neighbours that are fed one token too."""
    found = []
    for i, token in enumerate(tokens):
        others = {other: [own[i]] for other, own in neighbours.items()}
        # In the middle of the batch, so that its row is neither first nor last.
        order = [*list(others)[: len(others) // 2], sequence, *list(others)[len(others) // 2 :]]
        found.append(runs.step({key: others.get(key, [token]) for key in order})[sequence])
    return found


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_size", "threads", "chunks"),
    [
        (4, 2, 16, 1, (1, 16, 64, 47)),
        (3, 1, 20, 1, (16, 64, 47)),
        (4, 4, 16, 1, (16, 64, 47)),
        (4, 2, 16, 2, (16, 64, 47)),
    ],
)
def test_same_bits_alone_batched_and_chunked(
    tmp_path: Path, heads: int, kv_heads: int, head_size: int, threads: int, chunks: tuple[int, ...]
) -> None:
    path = make_rand_model(tmp_path, heads=heads, kv_heads=kv_heads, head_size=head_size, intermediate=1531)
    runs = Runs(path, threads=threads)
    vocab = runs.backend.spec.vocab_size
    prompt, output = token_ids(1, PROMPT, vocab), token_ids(2, 4, vocab)

    expected = [runs.prefill(0, prompt, PROMPT), *decode(runs, 0, output, {})]

    for sequence, chunk in enumerate(chunks, start=1):
        assert torch.equal(runs.prefill(sequence, prompt, chunk), expected[0]), f"chunks of {chunk}"
    everything = runs.prefill(5, prompt + output, 1000)
    assert torch.equal(everything, expected[-1]), "the last token as part of a prompt"

    others = {10 + i: token_ids(100 + i, 4, vocab) for i in range(NEIGHBOURS)}
    start = {10 + i: token_ids(200 + i, 1 + 7 * i, vocab) for i in range(NEIGHBOURS)}
    together = runs.step(dict(list(start.items())[:9]) | {6: prompt} | dict(list(start.items())[9:]))
    assert torch.equal(together[6], expected[0]), "a prompt among prompts"
    for found, alone in zip(decode(runs, 6, output, others), expected[1:], strict=True):
        assert torch.equal(found, alone), "a decode among decodes"


def test_same_bits_for_other_thread_counts(tmp_path: Path) -> None:
    """Matrices of real models: BLAS splits very small ones of odd sizes differently."""
    path = make_rand_model(tmp_path, hidden=576, heads=9, kv_heads=3, head_size=64, intermediate=1536, layers=1)
    found = []
    for threads in (1, 2, 3):
        runs = Runs(path, threads=threads)
        prompt = token_ids(3, PROMPT, runs.backend.spec.vocab_size)
        found.append(torch.stack([runs.prefill(0, prompt, 64), *decode(runs, 0, [5, 6], {})]))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
