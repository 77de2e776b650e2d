"""The integrity check finds what it should: each test breaks one thing by hand."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.kvmanager.holdings import Session
from services.kvmanager.manager import KvManager
from tests.unit.kvmanager.helpers import compute, manager, only_executor, reservation


def sound() -> tuple[KvManager, Session]:
    """Sequence 1 holds blocks 0 to 2, block 3 is cached, 4 to 7 are free."""
    made, session = manager()
    made.reserve(session, reservation(1, range(9)))
    compute(made, session, 1)
    made.reserve(session, reservation(2, range(50, 54)))
    compute(made, session, 2)
    made.release(session, 2)
    assert made.verify() == []
    return made, session


def lose_a_reference(made: KvManager, session: Session) -> None:
    only_executor(made).pools[0].blocks.drop(2)


def leak_a_reference(made: KvManager, session: Session) -> None:
    only_executor(made).pools[0].blocks.hold([3])


def take_without_holder(made: KvManager, session: Session) -> None:
    only_executor(made).pools[0].blocks.take(1)


def forget_in_the_index_only(made: KvManager, session: Session) -> None:
    only_executor(made).pools[0].index.remove(3)


def find_an_unready_block(made: KvManager, session: Session) -> None:
    only_executor(made).pools[0].index.add(bytes(32), 2)


def lose_a_key(made: KvManager, session: Session) -> None:
    session.holdings[1].groups[0].keys.pop()


def lose_a_sequence(made: KvManager, session: Session) -> None:
    session.holdings.clear()


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lose_a_reference, "e pool 0: block 2 counts 0 holders and has 1"),
        (leak_a_reference, "e pool 0: block 3 counts 1 holders and has 0"),
        (take_without_holder, "e pool 0: block 4 counts 1 holders and has 0"),
        (forget_in_the_index_only, "e pool 0: a keyed block cannot be found"),
        (find_an_unready_block, "e pool 0: block 2 can be found and is PENDING"),
        (lose_a_key, "sequence 1: 1 keys for 2 full blocks"),
        (lose_a_sequence, "sessions and executors name different sequences"),
    ],
)
def test_damage_is_found(damage: Callable[[KvManager, Session], None], finding: str) -> None:
    made, session = sound()
    damage(made, session)
    assert finding in made.verify()
