"""Growing pauses between attempts to reach a peer."""

from __future__ import annotations

import asyncio

FIRST_SECONDS, LONGEST_SECONDS = 0.1, 2.0
NAMED_ABSENCES = 4
"""Services start side by side: a peer that has not been there yet is worth a warning only after so many attempts."""


class Backoff:
    """Each pause is twice as long as the last, up to a limit; a peer that was there makes it begin anew."""

    def __init__(self) -> None:
        self._seconds = FIRST_SECONDS

    def reset(self) -> None:
        self._seconds = FIRST_SECONDS

    async def pause(self) -> None:
        seconds, self._seconds = self._seconds, min(2 * self._seconds, LONGEST_SECONDS)
        await asyncio.sleep(seconds)
