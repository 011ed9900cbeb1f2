"""Finds ranks that hang. It asks every rank again and again, since a process that hangs does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

POLL_INTERVAL_S = 1.0
HEALTH = "health"  # concurrency group of a rank's actor in which it answers while it runs


class RankWatch:
    """How long each rank has not answered.

    This time is counted in polls. So a pause of this process itself counts as one poll, since the answers of the ranks
    are then still waiting to be read.
    """

    def __init__(self) -> None:
        self._asked: dict[int, asyncio.Future[None]] = {}
        self._silent_s: dict[int, float] = {}

    async def poll(self, ranks: Mapping[int, Any]) -> None:
        """Ask these ranks, except those whose answer is still to come, and wait for POLL_INTERVAL_S. ranks: actors by
        number. Others are forgotten."""
        for number in self._asked.keys() - ranks.keys():
            self._asked.pop(number).cancel()
        for number in ranks.keys() - self._asked.keys():
            answer = ranks[number].answer.options(concurrency_group=HEALTH).remote()
            self._asked[number] = asyncio.ensure_future(answer)
        await asyncio.sleep(POLL_INTERVAL_S)
        silent_s = {number: self._silent_s.get(number, 0.0) + POLL_INTERVAL_S for number in self._asked}
        for number, answer in list(self._asked.items()):
            if answer.done():
                answer.exception()  # that of a rank that has ended is of no interest here
                del self._asked[number], silent_s[number]
        self._silent_s = silent_s

    def silent(self, seconds: float) -> list[int]:
        """Return the numbers of the ranks that have not answered for so long, in ascending order."""
        return sorted(number for number, silent_s in self._silent_s.items() if silent_s >= seconds)

    def close(self) -> None:
        for answer in self._asked.values():
            answer.cancel()
