"""State of the cluster as server-sent events, produced once for all viewers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import NamedTuple

from deployments.http.streaming import unnamed_event
from deployments.parts.console.cluster_watcher import ClusterWatcher

logger = logging.getLogger(__name__)

INTERVAL_S = 2.0  # between two polls
STREAM_S = 10.0  # after which a viewer reconnects: a stopping ingress waits for its open answers
LINGER_S = 3.0  # that polling continues without viewers, which gives them time to reconnect


class StateEvents(NamedTuple):
    whole: bytes
    without_requests: bytes

    def of(self, with_requests: bool) -> bytes:
        return self.whole if with_requests else self.without_requests


class ClusterFeed:
    """Polls the cluster while there are viewers, and sends each of them the results."""

    def __init__(self, watcher: ClusterWatcher):
        self._watcher = watcher
        self._viewers = 0
        self._polling: asyncio.Task[None] | None = None
        self._newest: StateEvents | None = None
        self._next: asyncio.Future[StateEvents] | None = None

    async def events(self, *, with_requests: bool) -> AsyncGenerator[bytes]:
        """Yield the newest state, then every new one, for STREAM_S. with_requests: whether it tells of single
        requests."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + STREAM_S
        self._viewers += 1
        try:
            if self._polling is None:
                self._next = loop.create_future()
                self._polling = asyncio.create_task(self._poll())
            elif self._newest is not None:
                yield self._newest.of(with_requests)
            while (left_s := ends_at - loop.time()) > 0:
                assert self._next is not None
                pending = self._next
                await asyncio.wait([pending], timeout=left_s)
                if pending.done():
                    yield pending.result().of(with_requests)
        finally:
            self._viewers -= 1

    async def _poll(self) -> None:
        loop = asyncio.get_running_loop()
        watched_at = loop.time()
        while self._viewers or loop.time() < watched_at + LINGER_S:
            try:
                state = await self._watcher.poll()
                self._newest = StateEvents(unnamed_event(state), unnamed_event(state.without_requests()))
            except Exception as error:  # noqa: BLE001  whatever it is, the next poll may succeed
                logger.warning("the console cannot see the cluster: %r", error)
            else:
                assert self._next is not None
                self._next.set_result(self._newest)
                self._next = loop.create_future()
            if self._viewers:
                watched_at = loop.time()
            await asyncio.sleep(INTERVAL_S)
        self._polling = self._newest = None
