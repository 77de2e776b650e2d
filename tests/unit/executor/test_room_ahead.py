"""Where a step says that the next one is likely to go on with its tokens alone."""

from __future__ import annotations

from services.executor.batch import StepLimits
from tests.unit.executor.conftest import make_bench
from tests.unit.executor.fake_backend import FakeBackend, loaded
from tests.unit.executor.plans import state


class Asking(FakeBackend):
    """Asks each step, as a backend that begins ahead does."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[list[int] | None] = []

    def step(self, inputs):
        room = inputs.room()
        self.rooms.append(None if room is None else room.tolist())
        return super().step(inputs)


def rooms(limit: int, steps: int, drafts: int = 0, prompts=((1, 2, 3), (4,))) -> list[list[int] | None]:
    made = make_bench(StepLimits(sequences=8, tokens=32))
    backend = Asking()
    made.loop.backend = backend
    made.core.set_model(loaded(backend).limits)
    entering = [state(i, prompt, [3 * i, 3 * i + 1, 3 * i + 2], max_tokens=4) for i, prompt in enumerate(prompts)]
    made.take(enter=entering, grants=[(i, limit, steps, drafts) for i in range(len(prompts))])
    made.run()
    return backend.rooms


def test_steps_that_draw_with_credit_and_budget_may_go_on_up_to_their_blocks() -> None:
    assert rooms(8, 9) == [[12, 12], [12, 12], [12, 12], None], "the fourth token is the last one"


def test_the_last_credit_a_chunk_and_drafts_may_not() -> None:
    assert rooms(8, 2) == [[12, 12], None]
    assert rooms(1, 9, prompts=[(1, 2, 3)]) == [None, None, [12], [12], [12], None]
    assert rooms(8, 9, drafts=2) == [None] * 4
