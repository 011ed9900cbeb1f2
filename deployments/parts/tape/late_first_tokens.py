"""Tells the replicas of a model when its first tokens begin to be late."""

from __future__ import annotations

import asyncio
import logging

from deployments.parts.tape.questions import TIMEOUT_S, FirstTokensLate
from deployments.parts.tape.slo_alarm import SloAlarm
from deployments.replicas.pools import EnginePool

logger = logging.getLogger(__name__)


class LateFirstTokens:
    def __init__(self, pool: EnginePool, target_s: float):
        """target_s: for the time to the first token."""
        self._pool, self._alarm = pool, SloAlarm(target_s)
        self._telling = set[asyncio.Task[list[object]]]()

    def observe(self, first_token_s: float, now: float) -> None:
        """Record the time to a request's first token."""
        if reason := self._alarm.observe(first_token_s, now):
            logger.warning("first tokens are late: %s", reason)
            telling = asyncio.create_task(self._pool.ask(FirstTokensLate(reason), object, TIMEOUT_S))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
