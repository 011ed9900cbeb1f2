"""Gives the engines of a replica the role that the autoscaling policy has chosen for it. Independent of Ray."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from deployments.replicas.replica_engines import ReplicaEngines
from engine.wire.stats.handoff_stats import Role

logger = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.2


class RoleFollower:
    """Polls the role chosen for one replica, and sets it. When a decode replica becomes a prefill replica, its running
    requests and its holds move to other decode replicas if `leave` is given; otherwise its engines finish them."""

    def __init__(
        self,
        engines: ReplicaEngines[Any],
        read: Callable[[], Awaitable[Role | None]],
        leave: Callable[[Callable[[], bool]], Coroutine[Any, Any, None]] | None = None,
    ):
        """read: function that returns the chosen role; None if none is known, so that the role stays. leave: function
        that moves requests and holds to other replicas, as long as the function that it gets returns true; None if they
        do not move."""
        self.role: Role = "decode"
        self._engines, self._read, self._leave = engines, read, leave
        self._departing: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Follow until cancelled. If the role cannot be read, the engines keep their role."""
        try:
            while True:
                try:
                    role = await self._read() or self.role
                except Exception as error:  # noqa: BLE001 - of Ray, while its head node restarts
                    logger.warning("the role of this replica cannot be read: %r", error)
                    role = self.role
                if role != self.role:
                    self._change(role)
                await asyncio.sleep(POLL_INTERVAL_S)
        finally:
            if self._departing is not None:
                self._departing.cancel()

    def _change(self, role: Role) -> None:
        self.role = role
        self._engines.set_role(role)
        logger.info("role changed role=%s requests=%d", role, self._engines.num_answers)
        if self._leave is not None and role == "prefill" and (self._departing is None or self._departing.done()):
            self._departing = asyncio.create_task(self._leave(lambda: self.role == "prefill"))
