"""More blocks for a sequence that runs: all that it asks for, with the colder copies which that takes, or none."""

from __future__ import annotations

from services.kvmanager.holdings import Holding
from services.kvmanager.placement import Outcome
from services.kvmanager.reservations import ExtensionAnswer, GroupBlocks, demoted


def grow(holding: Holding, slots: int) -> ExtensionAnswer:
    """Gives a sequence blocks up to `slots` token slots in every group."""
    groups = holding.groups
    counts = [max(0, group.pool.spec.blocks_for(slots) - len(group.blocks)) for group in groups]
    if not any(counts):
        return ExtensionAnswer(holding.sequence_id, Outcome.GRANTED)
    policy = holding.executor.spec.policy
    copies = [
        group.copies(policy, group.slots, group.slots + count * group.pool.spec.block_size) if policy.colder else None
        for group, count in zip(groups, counts, strict=True)
    ]
    wanted = list(zip(groups, counts, copies, strict=True))
    if any(c > g.pool.blocks.available_count or (plan is not None and not plan.fits) for g, c, plan in wanted):
        ever = all(group.fits_ever(count, plan) for group, count, plan in wanted)
        return ExtensionAnswer(holding.sequence_id, Outcome.NO_BLOCKS if ever else Outcome.NEVER_FITS)
    demotions = holding.grow(counts, copies)
    gained = [
        GroupBlocks(group.pool.spec.group_id, group.pool.ids(group.blocks[len(group.blocks) - count :]))
        for group, count in zip(groups, counts, strict=True)
        if count
    ]
    changes = [change for group, new in zip(groups, demotions, strict=True) for change in demoted(group.ages, new)]
    return ExtensionAnswer(holding.sequence_id, Outcome.GRANTED, gained, changes)
